"""Weights of the best evaluations, and their average."""

import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel


def best_steps(history: Iterable[dict], metric: str, count: int, greater_is_better: bool = True) -> list[int]:
    """The steps of the `count` best evaluations in a trainer's log, the best first; of equals, the later."""
    scores = {entry["step"]: entry[metric] for entry in history if metric in entry}
    sign = 1 if greater_is_better else -1
    return sorted(scores, key=lambda step: (sign * scores[step], step), reverse=True)[:count]


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write the weights atomically; tied weights are written once."""
    tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
    weights = {name: value.contiguous() for name, value in model.state_dict().items() if name not in tied}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    save_file(weights, unfinished)
    os.replace(unfinished, path)


def load_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Load weights into a model; only tied ones may be missing."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = sorted(set(missing) - set(model._tied_weights_keys or {})) + sorted(unexpected)
    if wrong:
        raise ValueError(f"The weights do not belong to this model: {wrong[0]} (and {len(wrong) - 1} others).")


def average_weights(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of several files of weights, computed in float64; integer tensors are copied from the first file."""
    first = load_file(paths[0])
    sums = {name: value.double() for name, value in first.items() if value.is_floating_point()}
    for path in paths[1:]:
        for name, value in load_file(path).items():
            if name in sums:
                sums[name] += value.double()
    return {name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value for name, value in first.items()}


def remove_all_but(folder: Path, retained: Iterable[Path]) -> None:
    """Delete the weights in a folder except for the given files."""
    retained = {path.resolve() for path in retained}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.unfinished")]:
        if path.resolve() not in retained:
            path.unlink()

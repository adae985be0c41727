"""Averages of weights: over the best evaluations, and exponentially over updates."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..utils.fingerprints import digest_tensors

DIGEST = "sha256"  # entry of the metadata


def best_steps(history: Iterable[dict], metric: str, count: int, greater_is_better: bool = True) -> list[int]:
    """The steps of the `count` best evaluations in a trainer's log, the best first; of equals, the later."""
    scores = {entry["step"]: entry[metric] for entry in history if metric in entry}
    sign = 1 if greater_is_better else -1
    return sorted(scores, key=lambda step: (sign * scores[step], step), reverse=True)[:count]


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights to write, tied ones once. If FSDP has sharded the model, all processes must call this."""
    tied = set(model._tied_weights_keys or {}) if model.config.tie_word_embeddings else set()
    weights = {name: value for name, value in model.state_dict().items() if name not in tied}
    return {name: (value.full_tensor() if is_sharded(value) else value).contiguous() for name, value in weights.items()}


def is_sharded(weight: Tensor) -> bool:
    """Whether every process has a part of the weight only."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write weights atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(weights, unfinished, metadata={DIGEST: digest_of_tensors(weights)})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Weights of `save_weights`; an error if the file is damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(DIGEST)  # none in files of earlier versions
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dict)
        damage = None if expected in (None, digest_of_tensors(weights)) else "it is not what was written"
    except SafetensorError as error:
        damage = str(error)
    if damage is not None:
        raise ValueError(f"{path} is damaged ({damage}); remove it, and the run continues without these weights.")
    return weights


def digest_of_tensors(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    digest_tensors(weights, digest)
    return digest.hexdigest()


def load_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Load weights into a model; only tied ones may be missing."""
    # Not of `named_parameters`, in which those that a forward pass has gathered are whole.
    own: dict[str, Any] = {name: weight for name, weight in model.state_dict().items() if is_sharded(weight)}
    if own:
        from torch.distributed.tensor import distribute_tensor

        weights = {
            name: distribute_tensor(value, own[name].device_mesh, own[name].placements) if name in own else value
            for name, value in weights.items()
        }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    wrong = sorted(set(missing) - set(model._tied_weights_keys or {})) + sorted(unexpected)
    if wrong:
        raise ValueError(f"The weights do not belong to this model: {wrong[0]} (and {len(wrong) - 1} others).")


def average_weights(paths: list[Path]) -> dict[str, Tensor]:
    """The mean of several files of weights, computed in float64; integer tensors are copied from the first file."""
    first = read_weights(paths[0])
    sums = {name: value.double() for name, value in first.items() if value.is_floating_point()}
    for path in paths[1:]:
        for name, value in read_weights(path).items():
            if name in sums:
                sums[name] += value.double()
    return {name: (sums[name] / len(paths)).to(value.dtype) if name in sums else value for name, value in first.items()}


def remove_all_but(folder: Path, retained: Iterable[Path]) -> None:
    """Delete the weights in a folder except for the given files."""
    retained = {path.resolve() for path in retained}
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.unfinished")]:
        if path.resolve() not in retained:
            path.unlink()


class MovingAverage:
    """The exponential moving average of a model's trained weights, w̄ ← β·w̄ + (1 − β)·w after every update.

    β = min(decay, (1 + n) / (10 + n)) after n updates, so that the first weights are soon forgotten.

    >>> average = MovingAverage(model, decay=0.999)  # doctest: +SKIP
    >>> average.update(model)  # after every update  # doctest: +SKIP
    >>> with average.in_place_of_weights(model):  # doctest: +SKIP
    ...     evaluate(model)
    """

    FILE = "moving_average.safetensors"

    def __init__(self, model: PreTrainedModel, decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self.weights = {name: weight.detach().clone() for name, weight in trained(model).items()}

    @torch.no_grad()
    def update(self, model: PreTrainedModel) -> None:
        """Take the current weights into the average."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        current = trained(model)
        torch._foreach_lerp_(
            list(self.weights.values()), [current[name].detach() for name in self.weights], weight=1 - decay
        )

    @contextmanager
    def in_place_of_weights(self, model: PreTrainedModel) -> Iterator[None]:
        """Let the model have the average; afterwards it has its own weights again."""
        own = {name: weight.detach().clone() for name, weight in trained(model).items()}
        self.load_into(model)
        try:
            yield
        finally:
            set_weights(model, own)

    def load_into(self, model: PreTrainedModel) -> None:
        """Replace the model's weights by the average."""
        set_weights(model, self.weights)

    def save(self, folder: Path) -> None:
        """Write the average and the number of updates into a checkpoint."""
        weights = {name: weight.contiguous() for name, weight in self.weights.items()}
        save_file(weights, folder / self.FILE, metadata={"updates": str(self.updates)})

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        with safe_open(folder / self.FILE, "pt") as file:
            self.updates = int(file.metadata()["updates"])
            self.weights = {name: file.get_tensor(name).to(weight.device) for name, weight in self.weights.items()}


def trained(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, tied ones once."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy values into the parameters of these names."""
    parameters = dict(model.named_parameters())
    for name, value in weights.items():
        parameters[name].copy_(value)

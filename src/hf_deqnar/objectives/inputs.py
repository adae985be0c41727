"""Proxy inputs Z: which tokens of the proxy target the decoder is shown while it learns the others.

An input is a function that says, for every position of the target, whether it is revealed. Revealed tokens stand on the
canvas, the others are `<mask>`; the likelihood counts only what was not revealed (MPLE paper, appendix E.6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..alignment import edit_distance

SMALLEST_WEIGHT = 1e-12  # a token that must not be revealed still may, if there is no other


@dataclass
class Prediction:
    """What the model says when it is shown nothing, per position of the target."""

    tokens: Tensor  # rows, positions: arg-max
    reference: Tensor  # rows, positions: P(t_i | X), the probability of the target's token


# (target tokens, where they are, prediction or None, share of training done, generator) → revealed; rows × positions
ProxyInput = Callable[[Tensor, Tensor, Prediction | None, float, torch.Generator | None], Tensor]


def masked(
    target: Tensor,
    mask: Tensor,
    prediction: Prediction | None = None,
    progress: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Nothing is revealed: the vanilla input (Gu et al. 2018)."""
    return torch.zeros_like(mask, dtype=torch.bool)


def conditional_masking(
    target: Tensor,
    mask: Tensor,
    prediction: Prediction | None = None,
    progress: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    ratio: float | None = None,
) -> Tensor:
    """CMLM: l = ⌊λ·L⌋ tokens are revealed, λ uniform in [0, 1) or fixed (Ghazvininejad et al. 2019)."""
    lengths = mask.sum(dim=1)
    if ratio is None:
        share = torch.rand(len(target), generator=generator, device=target.device)
    else:
        share = torch.full((len(target),), ratio, device=target.device)
    # A little more than λ·L, so that 0.2 · 10 is 2 in floating point as well.
    return reveal((share.double() * lengths + 1e-6).long(), mask, torch.ones_like(mask, dtype=torch.float), generator)


def glancing(
    target: Tensor,
    mask: Tensor,
    prediction: Prediction,
    progress: float = 0.0,
    generator: torch.Generator | None = None,
    *,
    start: float = 0.5,
    end: float = 0.3,
    distance: str = "hamming",
    by: str = "uniform",
) -> Tensor:
    """GLAT: l = ⌊λ·d(T, prediction)⌋ tokens are revealed, λ falling from `start` to `end` (Qian et al. 2021).

    Args:
        distance: d counts wrong positions (`hamming`) or edits (`levenshtein`).
        by: which tokens: any (`uniform`), or with a chance proportional to P(t_i | X) (`reference`) or to
            1 − P(t_i | X) (`difficulty`), as in table 3 of the MPLE paper.
    """
    if distance == "hamming":
        errors = ((prediction.tokens != target) & mask).sum(dim=1)
    else:
        lengths = mask.sum(dim=1)
        errors = edit_distance(prediction.tokens, target, lengths, lengths)
    ratio = start + (end - start) * min(max(progress, 0.0), 1.0)
    weights = glancing_weights(prediction.reference, by)
    return reveal((ratio * errors.double() + 1e-6).long(), mask, weights, generator)


def glancing_weights(reference: Tensor, by: str) -> Tensor:
    """What a token's chance to be revealed is proportional to, given P(t_i | X)."""
    return {"uniform": torch.ones_like(reference), "reference": reference, "difficulty": 1 - reference}[by]


INPUTS: dict[str, ProxyInput] = {
    "masked": masked,
    "cmlm": conditional_masking,
    "cmlm_fixed": partial(conditional_masking, ratio=0.2),
    "glat": glancing,
    "glat_levenshtein": partial(glancing, distance="levenshtein"),
    "glat_reference": partial(glancing, by="reference"),
    "glat_difficulty": partial(glancing, by="difficulty"),
}


def needs_prediction(chosen: ProxyInput) -> bool:
    """Whether an input looks at what the model says first."""
    return getattr(chosen, "func", chosen) is glancing


def reveal(count: Tensor, mask: Tensor, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Choose `count` positions of every row without replacement, with chances proportional to the weights.

    Gumbel noise added to log-weights turns "the largest" into such a sample (Efraimidis and Spirakis 2006).
    """
    uniform = torch.rand(mask.shape, generator=generator, device=mask.device).clamp(1e-12, 1 - 1e-7)
    keys = weights.double().clamp_min(SMALLEST_WEIGHT).log() - (-uniform.double().log()).log()
    keys = keys.masked_fill(~mask, float("-inf"))
    rank = keys.argsort(dim=1, descending=True).argsort(dim=1)
    return (rank < count[:, None]) & mask

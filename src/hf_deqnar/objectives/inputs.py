"""Proxy inputs Z: which tokens of the proxy target the decoder is given while it learns the others.

A proxy input is a function that returns, for every target position, whether its token is revealed. Revealed tokens
stand on the canvas and the others are `<mask>`. The loss covers the tokens that are not revealed (MPLE paper, appendix
E.6). To add one, write a function with the signature `ProxyInput` and a line in `INPUTS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .matching import edit_distance, hamming_distance

SMALLEST_WEIGHT = 1e-12  # a token of weight 0 can still be drawn if no other is left


@dataclass
class Prediction:
    """The model's prediction on a fully masked canvas."""

    tokens: Tensor  # (batch, canvas): arg-max
    target_probs: Tensor  # (batch, canvas): P(t_i | X), the probability of the target token


# (target tokens, mask, prediction or None, training progress from 0 to 1, generator) → revealed, all (batch, canvas)
ProxyInput = Callable[..., Tensor]


def masked(
    target: Tensor,
    mask: Tensor,
    prediction: Prediction | None = None,
    progress: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Vanilla input: no token is revealed.

    Learns: every target token from the source alone.
    Inputs: source and target.
    Requirements: none.
    Example: `hf-deqnar train --objective masked`; it is the default of `parse_objective`.
    Reference: Gu et al. 2018; MPLE paper, appendix E.5.
    """
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
    """CMLM: l = ⌊λ·L⌋ uniformly chosen tokens are revealed, λ uniform in [0, 1) or fixed.

    Learns: the masked tokens given the source and the revealed ones, as mask-predict decoding needs them.
    Inputs: source and target.
    Requirements: with CTC the target is first aligned with a prediction, which takes one more solve.
    Example: `hf-deqnar train --objective cmlm`; `cmlm_fixed` has λ = 0.2.
    Reference: Ghazvininejad et al. 2019; MPLE paper, appendix E.6.

    Args:
        ratio: a fixed λ; drawn for every sentence if None.
    """
    lengths = mask.sum(dim=1)
    if ratio is None:
        ratios = torch.rand(len(target), generator=generator, device=target.device)
    else:
        ratios = torch.full((len(target),), ratio, device=target.device)
    return reveal(floor(ratios.double() * lengths), mask, torch.ones_like(mask, dtype=torch.float), generator)


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
    rounded: bool = False,
) -> Tensor:
    """GLAT: l = ⌊λ·d(T, prediction)⌋ tokens are revealed, λ decreasing linearly from `start` to `end`.

    For a graph d counts wrong vertices of the best path only, and `DagLength.glancing` has the options of
    DA-Transformer.

    Learns: a masked token from the source, with the more help the more the model's own prediction is wrong.
    Inputs: source, target, and the model's prediction on a masked canvas.
    Requirements: one more solve per batch for that prediction; `glance_nfe` limits its evaluations.
    Example: `hf-deqnar train --objective ctc+glat`.
    Reference: Qian et al. 2021; MPLE paper, appendix E.6 and table 3.

    Args:
        distance: a name in `DISTANCES`: d counts wrong positions (`hamming`) or edits (`levenshtein`).
        by: which tokens are revealed, a name in `GLANCING_WEIGHTS`: any (`uniform`), or with a probability proportional
            to P(t_i | X) (`reference`) or to 1 − P(t_i | X) (`difficulty`).
        rounded: round l to the nearest integer instead of down.
    """
    errors = DISTANCES[distance](prediction.tokens, target, mask)
    ratio = start + (end - start) * min(max(progress, 0.0), 1.0)
    weights = glancing_weights(prediction.target_probs, by)
    count = ratio * errors.double()
    return reveal(floor(count + 0.5 if rounded else count), mask, weights, generator)


# (predicted tokens, target tokens, mask), all (batch, canvas) → distance of every row, (batch)
DISTANCES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "hamming": hamming_distance,
    "levenshtein": lambda tokens, target, mask: edit_distance(tokens, target, mask.sum(dim=1), mask.sum(dim=1)),
}

# P(t_i | X) → what the probability of revealing token i is proportional to
GLANCING_WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": torch.ones_like,
    "reference": lambda target_probs: target_probs,
    "difficulty": lambda target_probs: 1 - target_probs,
}

INPUTS: dict[str, ProxyInput] = {
    "masked": masked,
    "cmlm": conditional_masking,
    "cmlm_fixed": partial(conditional_masking, ratio=0.2),
    "glat": glancing,
    "glat_levenshtein": partial(glancing, distance="levenshtein"),
    "glat_reference": partial(glancing, by="reference"),
    "glat_difficulty": partial(glancing, by="difficulty"),
}


def glancing_weights(target_probs: Tensor, by: str) -> Tensor:
    """What the probability of revealing a token is proportional to, given P(t_i | X)."""
    return GLANCING_WEIGHTS[by](target_probs)


def needs_prediction(proxy_input: ProxyInput) -> bool:
    """Whether a proxy input depends on the model's prediction on a masked canvas."""
    return getattr(proxy_input, "func", proxy_input) is glancing


def floor(values: Tensor) -> Tensor:
    """⌊values⌋ with a tolerance for rounding errors, so that ⌊0.2 · 10⌋ is 2."""
    return (values + 1e-6).long()


def reveal(count: Tensor, mask: Tensor, weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Sample `count` positions of every row without replacement, with probabilities proportional to the weights.

    The largest keys log w_i + g_i with Gumbel noise g_i are such a sample (Efraimidis and Spirakis 2006).
    """
    uniform = torch.rand(mask.shape, generator=generator, device=mask.device).clamp(1e-12, 1 - 1e-7)
    keys = weights.double().clamp_min(SMALLEST_WEIGHT).log() - (-uniform.double().log()).log()
    keys = keys.masked_fill(~mask, float("-inf"))
    rank = keys.argsort(dim=1, descending=True).argsort(dim=1)
    return (rank < count[:, None]) & mask

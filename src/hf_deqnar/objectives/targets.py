"""Proxy targets T: what the model is asked to say, which need not be the reference word for word.

A target is a function of the labels and of what the model says unseen, and returns labels. `raw` and `distilled` differ
in the data only; the others look for a T that is near the reference and easy to predict (MPLE paper, appendix E).
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..alignment import aligned_target, matched_target

# (labels, their lengths, log-probabilities from a masked canvas or None, empty token, share of training done) → labels
ProxyTarget = Callable[[Tensor, Tensor, Tensor | None, int, float], Tensor]

SKIP_PENALTY = 5.0  # between 5 and 10 works best in table 2 of the MPLE paper
ORDER_AGNOSTIC_START = 0.5  # share of training with the plain target first, so that permutations stay near it


def reference(
    labels: Tensor,
    lengths: Tensor,
    log_probabilities: Tensor | None = None,
    empty: int = 0,
    progress: float = 0.0,
) -> Tensor:
    """T = Y: the labels as they are, raw or distilled."""
    return labels


def aligned(
    labels: Tensor,
    lengths: Tensor,
    log_probabilities: Tensor,
    empty: int,
    progress: float = 0.0,
    *,
    skip_penalty: float = SKIP_PENALTY,
) -> Tensor:
    """AXE: a subsequence of Y with empty tokens inserted, monotonically aligned with the prediction."""
    proxy, _ = aligned_target(log_probabilities, labels, lengths, lengths, empty, skip_penalty)
    return proxy.masked_fill(labels < 0, -100)


def order_agnostic(
    labels: Tensor,
    lengths: Tensor,
    log_probabilities: Tensor,
    empty: int,
    progress: float = 0.0,
    *,
    start: float = ORDER_AGNOSTIC_START,
) -> Tensor:
    """OaXE: the permutation of Y that the model finds likeliest, after a warm start on Y itself."""
    return labels if progress < start else matched_target(log_probabilities, labels, lengths)


# Dynamic KD: one of several candidates, chosen by `choose_candidates` before anything else; from there on a reference.
dynamically_distilled: ProxyTarget = partial(reference)

TARGETS: dict[str, ProxyTarget] = {
    "raw": reference,
    "distilled": reference,
    "dynamic_kd": dynamically_distilled,
    "axe": aligned,
    "oaxe": order_agnostic,
}


def choose_candidates(negative_log_likelihood: Tensor, similarity: Tensor, gamma: Tensor, beta: float) -> Tensor:
    """Dynamic KD: for every row, argmin_T L_NAT(T) − β·Σ_i γ_i·S(Γ_i, T) (MPLE paper, equation 21).

    The scales are those of the paper's tables, in which β = 0.2 belongs to an L_NAT per token and a BLEU of 0 to 100
    (L_target = −7.08 is 35.4 BLEU); appendix F does not say it again. A sum over tokens would also prefer the shortest
    candidate, whatever it says.

    Args:
        negative_log_likelihood: rows × candidates, −log P(T | X) per token of T from a masked canvas.
        similarity: rows × candidates × candidates, S(Γ_i, Γ_j), 0 to 100: the sentence BLEU of Γ_j, with Γ_i as the
            reference.
        gamma: candidates, how much each teacher is trusted.
    """
    distortion = -beta * torch.einsum("i,rij->rj", gamma.to(similarity.dtype), similarity)
    return (negative_log_likelihood + distortion).argmin(dim=1)

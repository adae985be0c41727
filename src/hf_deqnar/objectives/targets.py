"""Proxy targets T: the sequence whose likelihood is maximised, which may differ from the reference Y.

A proxy target is a function of the labels and of the model's prediction on a masked canvas that returns labels. `raw`
and `distilled` differ only in the data. The others choose a T that is close to the reference and easier to predict
(MPLE paper, appendix E). To add one, write a function with the signature `ProxyTarget` and a line in `TARGETS`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .matching import aligned_target, matched_target

# (labels, their lengths, log-probabilities on a masked canvas or None, empty token, training progress from 0 to 1)
# → labels
ProxyTarget = Callable[..., Tensor]

SKIP_PENALTY = 5.0  # 5 to 10 gives the highest BLEU in table 2 of the MPLE paper
ORDER_AGNOSTIC_START = 0.5  # share of training on the reference, which keeps later permutations close to it


def reference(
    labels: Tensor,
    lengths: Tensor,
    log_probs: Tensor | None = None,
    empty: int = 0,
    progress: float = 0.0,
) -> Tensor:
    """T = Y: the labels of the data, raw or distilled.

    Learns: the labels as they are.
    Inputs: source and target.
    Requirements: for `distilled`, data made by `hf-deqnar distill`.
    Example: `hf-deqnar train --objective distilled+glat`.
    Reference: Gu et al. 2018; MPLE paper, appendices E.1 and E.2.
    """
    return labels


def aligned(
    labels: Tensor,
    lengths: Tensor,
    log_probs: Tensor,
    empty: int,
    progress: float = 0.0,
    *,
    skip_penalty: float = SKIP_PENALTY,
) -> Tensor:
    """AXE: a subsequence of Y with empty tokens inserted, monotonically aligned with the prediction.

    Learns: a target that a shift by one position does not make wrong; empty tokens are removed after generation.
    Inputs: source, target, and the model's log-probabilities on a masked canvas.
    Requirements: `length="predict"`, since CTC has its own alignment; one more solve per batch.
    Example: `hf-deqnar train --objective axe`.
    Reference: Ghazvininejad et al. 2020; MPLE paper, appendix E.3, equation 20.

    Args:
        skip_penalty: δ of equation 20.
    """
    proxy, _ = aligned_target(log_probs, labels, lengths, lengths, empty, skip_penalty)
    return proxy.masked_fill(labels < 0, -100)


def order_agnostic(
    labels: Tensor,
    lengths: Tensor,
    log_probs: Tensor,
    empty: int,
    progress: float = 0.0,
    *,
    start: float = ORDER_AGNOSTIC_START,
) -> Tensor:
    """OaXE: the permutation of Y with the highest likelihood, after a first part of training on Y itself.

    Learns: the tokens of the target in any order.
    Inputs: source, target, and the model's log-probabilities on a masked canvas.
    Requirements: `length="predict"`; scipy (the `train` extra); one more solve per batch.
    Example: `hf-deqnar train --objective oaxe`.
    Reference: Du et al. 2021; MPLE paper, appendix E.4.

    Args:
        start: share of training after which permutations are used.
    """
    return labels if progress < start else matched_target(log_probs, labels, lengths)


# Dynamic KD: `choose_candidates` selects the labels among several candidates first; then T = Y. A partial, because the
# table and comparisons must distinguish it from `reference`.
dynamically_distilled: ProxyTarget = partial(reference)

TARGETS: dict[str, ProxyTarget] = {
    "raw": reference,
    "distilled": reference,
    "dynamic_kd": dynamically_distilled,
    "axe": aligned,
    "oaxe": order_agnostic,
}


def choose_candidates(negative_log_likelihood: Tensor, similarity: Tensor, gamma: Tensor, beta: float) -> Tensor:
    """Dynamic KD: the index of argmin_T L_NAT(T) − β·Σ_i γ_i·S(Γ_i, T) over the candidates T of every row.

    Learns: the candidate that is likely under the model and similar to the other candidates.
    Inputs: source, and for every sentence the translations of several teachers and the raw target.
    Requirements: data with candidates, made by `hf-deqnar distill` with several teachers; one γ per candidate.
    Example: `hf-deqnar train --objective dynamic_kd+glat --gamma 0.7 1.3 2.3`.
    Reference: MPLE paper, appendix F (candidate selection criterion, equation 21) and section 4.4.

    L_NAT is per token and S is BLEU from 0 to 100, the scales of the paper's tables (L_target = −7.08 = −0.2 · 35.4
    BLEU); appendix F does not restate them. A sum over tokens would prefer the shortest candidate.

    Args:
        negative_log_likelihood: (batch, candidates), −log P(T | X) per token of T on a masked canvas.
        similarity: (batch, candidates, candidates), S(Γ_i, Γ_j): sentence BLEU of Γ_j with Γ_i as the reference.
        gamma: (candidates), the weight of every candidate.
    """
    distortion = -beta * torch.einsum("i,rij->rj", gamma.to(similarity.dtype), similarity)
    return (negative_log_likelihood + distortion).argmin(dim=1)

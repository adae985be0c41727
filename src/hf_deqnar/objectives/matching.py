"""Matching of targets with predictions: AXE's alignment, OaXE's assignment, and the distances of GLAT."""

import torch
from torch import Tensor
from torch.nn import functional


def aligned_target(
    log_probs: Tensor,
    targets: Tensor,
    canvas_lengths: Tensor,
    target_lengths: Tensor,
    empty: int,
    skip_penalty: float,
) -> tuple[Tensor, Tensor]:
    """AXE's proxy target T: the monotonic alignment of predictions and target tokens with the least cost.

    A prediction j is aligned with the empty token ε or with one or more successive target tokens, of which the first
    becomes T_j:

        −Σ_j log P_j(T_j) − δ·Σ_j Σ_{further tokens m of j} log P_j(y_m)

    (Ghazvininejad et al. 2020; MPLE paper, appendix E.3, equation 20). With D_j(i) the least cost of the first j
    predictions and i tokens, and E_j(i) the same if prediction j is aligned with token i,

        E_j(i) = min(D_{j−1}(i − 1) − log P_j(y_i), E_j(i − 1) − δ·log P_j(y_i)),
        D_j(i) = min(D_{j−1}(i) − log P_j(ε), E_j(i)).

    The recursion of E along i is a cumulative minimum of costs minus their cumulative sum, so only j is a loop.

    Args:
        log_probs: (batch, canvas, vocabulary).
        targets: (batch, length), −100 at padding.
        empty: index of ε in the vocabulary.
        skip_penalty: δ.

    Returns:
        T, (batch, canvas) with `empty` after the end of a row, and its cost, (batch).
    """
    rows, canvas, _ = log_probs.shape
    precise = log_probs.double()
    longest = targets.shape[1]
    costs = -precise.gather(2, targets.clamp_min(0)[:, None].expand(-1, canvas, -1))  # (batch, canvas, length)
    empty_costs = -precise[:, :, empty]
    best = torch.full((rows, longest + 1), float("inf"), dtype=precise.dtype, device=precise.device)
    best[:, 0] = 0
    first = torch.zeros(rows, canvas, longest + 1, dtype=torch.long, device=precise.device)
    is_aligned = torch.zeros(rows, canvas, longest + 1, dtype=torch.bool, device=precise.device)
    for position in range(canvas):
        further = (skip_penalty * costs[:, position]).cumsum(dim=1)
        lowest, start = (best[:, :-1] + costs[:, position] - further).cummin(dim=1)
        aligned = functional.pad(lowest + further, (1, 0), value=float("inf"))
        skipped = best + empty_costs[:, position, None]
        is_aligned[:, position] = aligned < skipped
        first[:, position, 1:] = start
        inside = (position < canvas_lengths)[:, None]
        best = torch.where(inside, torch.minimum(aligned, skipped), best)

    remaining = target_lengths
    proxy = torch.full((rows, canvas), empty, device=targets.device)
    for position in range(canvas - 1, -1, -1):
        chosen = is_aligned[:, position].gather(1, remaining[:, None])[:, 0] & (position < canvas_lengths)
        start = first[:, position].gather(1, remaining[:, None])[:, 0]
        proxy[:, position] = torch.where(chosen, targets.gather(1, start[:, None])[:, 0], proxy[:, position])
        remaining = torch.where(chosen, start, remaining)
    return proxy, best.gather(1, target_lengths[:, None])[:, 0]


def matched_target(log_probs: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
    """OaXE's proxy target: the permutation T of the target with the least −Σ_j log P_j(T_j).

    Hungarian matching, row by row (Du et al. 2021; MPLE paper, appendix E.4). Canvas and target have the same length.

    Args:
        log_probs: (batch, length, vocabulary).
        targets: (batch, length), −100 at padding.
    """
    from scipy.optimize import linear_sum_assignment  # in the train extra

    proxy = targets.clone()
    costs = -log_probs.gather(2, targets.clamp_min(0)[:, None].expand(-1, log_probs.shape[1], -1))
    for row, length in enumerate(target_lengths.tolist()):
        positions, tokens = linear_sum_assignment(costs[row, :length, :length].double().cpu().numpy())
        proxy[row, torch.as_tensor(positions)] = targets[row, torch.as_tensor(tokens)]
    return proxy


def hamming_distance(first: Tensor, second: Tensor, mask: Tensor) -> Tensor:
    """Number of positions inside the mask at which two sequences differ, (batch)."""
    return ((first != second) & mask).sum(dim=1)


def edit_distance(first: Tensor, second: Tensor, first_lengths: Tensor, second_lengths: Tensor) -> Tensor:
    """Levenshtein distance of every row, (batch): the least number of insertions, deletions and substitutions.

    D_j(i) = min(D_{j−1}(i) + 1, D_{j−1}(i − 1) + [a_i ≠ b_j], D_j(i − 1) + 1); the last term, along i, is computed as a
    cumulative minimum.

    >>> edit_distance(torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]), torch.tensor([3]), torch.tensor([3]))
    tensor([2])
    """
    steps = torch.arange(first.shape[1] + 1, device=first.device)
    distance = steps.expand(len(first), -1)
    for position in range(second.shape[1]):
        substituted = distance[:, :-1] + (first != second[:, position, None])
        best = torch.cat([distance[:, :1] + 1, torch.minimum(distance[:, 1:] + 1, substituted)], dim=1)
        best = (best - steps).cummin(dim=1).values + steps
        distance = torch.where((position < second_lengths)[:, None], best, distance)
    return distance.gather(1, first_lengths[:, None])[:, 0]

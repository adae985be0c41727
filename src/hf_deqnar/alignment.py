"""Matching a canvas with a target: how many ways, which is best, and what text a path stands for."""

import torch
from torch import Tensor
from torch.nn import functional


def ctc_loss(
    logits: Tensor, targets: Tensor, canvas_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """−log Σ_a Π_t p(a_t), over the paths a that collapse to the target, for every row (Graves et al. 2006).

    A target that does not fit on its canvas has no path: its loss would be infinite, so it is returned as 0 and the
    second result is false there.

    Args:
        logits: rows × canvas × vocabulary.
        targets: rows × length; what stands behind `target_lengths` is not read.
        blank: id of the blank token, which is never part of a target.
    """
    # On the CPU torch demands this layout and int64 lengths; the log-softmax must span all classes for its gradient.
    log_probabilities = functional.log_softmax(logits.float(), dim=-1).transpose(0, 1)
    loss = functional.ctc_loss(
        log_probabilities, targets.clamp_min(0), canvas_lengths, target_lengths, blank=blank, reduction="none"
    )
    fits = loss.isfinite()
    return torch.where(fits, loss, torch.zeros_like(loss)), fits

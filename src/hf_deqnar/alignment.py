"""Matching a canvas with a target: how many ways, which is best, and what text a path stands for."""

import torch
from torch import Tensor
from torch.nn import functional


def ctc_loss(
    logits: Tensor, targets: Tensor, canvas_lengths: Tensor, target_lengths: Tensor, blank: int
) -> tuple[Tensor, Tensor]:
    """−log Σ_a Π_t p(a_t), over the paths a that collapse to the target, for every row (Graves et al. 2006).

    A target that does not fit on its canvas has no path. Its loss would be infinite; it is returned as 0, with no
    gradient, and the second result is false there.

    Args:
        logits: rows × canvas × vocabulary.
        targets: rows × length; what stands behind `target_lengths` is not read.
        blank: id of the blank token, which is never part of a target.
    """
    # The log-softmax must span all classes: torch's CTC gradient is only right behind one.
    loss = functional.ctc_loss(
        functional.log_softmax(logits.float(), dim=-1).transpose(0, 1),
        targets.clamp_min(0),
        canvas_lengths,
        target_lengths,
        blank=blank,
        reduction="none",
        zero_infinity=True,
    )
    return loss, needed_canvas(targets, target_lengths) <= canvas_lengths


def needed_canvas(targets: Tensor, target_lengths: Tensor) -> Tensor:
    """The shortest canvas of every row: its tokens, and a blank between any two equal neighbours."""
    inside = torch.arange(1, targets.shape[1], device=targets.device)[None] < target_lengths[:, None]
    return target_lengths + ((targets[:, 1:] == targets[:, :-1]) & inside).sum(dim=1)

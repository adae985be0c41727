"""−log P(T | Z, X) of a batch, summed over what is to be predicted, and how many tokens that is."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ..alignment import ctc_loss

# (logits, labels, revealed, canvas lengths, blank, label smoothing) → (sum of losses, number of tokens)
Likelihood = Callable[[Tensor, Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def cross_entropy(
    logits: Tensor, labels: Tensor, revealed: Tensor, canvas_lengths: Tensor, blank: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """−Σ log P(t_i | Z, X) over the tokens that were not revealed; (1 − ε) on the token, ε spread over all others."""
    hidden = labels.masked_fill(revealed, -100)
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), hidden.flatten(), label_smoothing=smoothing, reduction="sum"
    )
    return loss, (hidden >= 0).sum()


def connectionist(
    logits: Tensor, labels: Tensor, revealed: Tensor, canvas_lengths: Tensor, blank: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """−log Σ_paths P(path | Z, X), CTC over the whole canvas; targets longer than their canvas are left out."""
    if smoothing:
        raise ValueError(f"label_smoothing={smoothing} has no meaning for CTC; set it to 0.")
    lengths = (labels >= 0).sum(dim=1)
    loss, fits = ctc_loss(logits, labels, canvas_lengths, lengths, blank)
    return loss.sum(), (lengths * fits).sum()


LIKELIHOODS: dict[str, Likelihood] = {"ce": cross_entropy, "ctc": connectionist}


def sentence_losses(logits: Tensor, labels: Tensor, canvas_lengths: Tensor, blank: int, ctc: bool) -> Tensor:
    """−log P(T | X) of every row, without smoothing: what candidates are compared by."""
    if ctc:
        lengths = (labels >= 0).sum(dim=1)
        loss, fits = ctc_loss(logits, labels, canvas_lengths, lengths, blank)
        return torch.where(fits, loss, float("inf"))
    losses = functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    return losses.reshape(labels.shape).sum(dim=1)

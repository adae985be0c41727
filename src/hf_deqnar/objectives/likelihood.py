"""−log P(T | Z, X) of a batch, summed over what is to be predicted, and how many tokens that is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..alignment import ctc_of_log_probabilities, needed_canvas
from .projection import OwnWords, Reading, cross_entropy_total, ctc_total


@dataclass
class Question:
    """What is to be predicted on a canvas."""

    labels: Tensor  # rows, length; −100 at padding
    revealed: Tensor  # rows, canvas: what the canvas already says
    canvas_mask: Tensor  # rows, canvas
    blank: int
    smoothing: float = 0.0

    def select(self, rows: Tensor) -> "Question":
        return Question(self.labels[rows], self.revealed[rows], self.canvas_mask[rows], self.blank, self.smoothing)


# (features, vocabulary projection, question) → (sum of losses, number of tokens)
Likelihood = Callable[[Tensor, Tensor, Question], tuple[Tensor, Tensor]]


def cross_entropy(features: Tensor, weight: Tensor, question: Question) -> tuple[Tensor, Tensor]:
    """−Σ log P(t_i | Z, X) over the tokens that were not revealed; (1 − ε) on the token, ε spread over all."""
    hidden = (question.labels >= 0) & ~question.revealed
    loss = cross_entropy_total(features[hidden], weight, question.labels[hidden], question.smoothing)
    return loss, hidden.sum()


def connectionist(features: Tensor, weight: Tensor, question: Question) -> tuple[Tensor, Tensor]:
    """−log Σ_paths P(path | Z, X), CTC over the whole canvas; targets longer than their canvas are left out."""
    if question.smoothing:
        raise ValueError(f"label_smoothing={question.smoothing} has no meaning for CTC; set it to 0.")
    loss, fits = ctc_total(features, question.canvas_mask, weight, question.labels, question.blank)
    return loss, ((question.labels >= 0).sum(dim=1) * fits).sum()


LIKELIHOODS: dict[str, Likelihood] = {"ce": cross_entropy, "ctc": connectionist}


def sentence_losses(reading: Reading, own: OwnWords, canvas_mask: Tensor, ctc: bool) -> Tensor:
    """−log P(T | X) of every row, without smoothing: what candidates are compared by. ∞ where CTC has no path."""
    lengths, canvas_lengths = (own.labels >= 0).sum(dim=1), canvas_mask.sum(dim=1)
    if ctc:
        loss = ctc_of_log_probabilities(reading.log_probabilities, own.labels, canvas_lengths, lengths, 0)
        return torch.where(needed_canvas(own.labels, lengths) <= canvas_lengths, loss, float("inf"))
    chosen = reading.log_probabilities.gather(2, own.labels.clamp_min(0)[:, :, None])[:, :, 0]
    return -(chosen * (own.labels >= 0)).sum(dim=1)

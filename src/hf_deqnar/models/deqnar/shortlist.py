"""Shortlist: the tokens that may occur in the translation of a sentence.

The output projection computes logits of the full vocabulary, although the source determines most tokens of its
translation. For every source token the table lists its most likely target tokens in the training data (companions);
common tokens are on every shortlist; no logits are computed for other tokens.
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from .configuration_deqnar import DeqNarConfig

UNKNOWN = -1


def never_written(config: DeqNarConfig) -> list[int]:
    """Tokens that are never generated."""
    never = {config.pad_token_id, config.mask_token_id, config.bos_token_id}
    never |= set() if config.predicts_blanks else {config.blank_token_id}
    return [token for token in never if token is not None]


@dataclass
class Words:
    """The shortlist of a batch; it always includes special tokens."""

    tokens: Tensor  # words: ids of the union over rows, ascending
    outside: Tensor | None  # rows, 1, words: true if a word is not on the row's shortlist; None if all are on every one

    def select(self, rows: Tensor) -> "Words":
        return self if self.outside is None else Words(self.tokens, self.outside[rows])

    def of_row(self, row: int) -> "Words":
        """The shortlist of one row."""
        if self.outside is None or len(self.outside) == 1:
            return self
        inside = ~self.outside[row : row + 1]
        return Words(self.tokens[inside[0, 0]], self.outside[row : row + 1][inside][None, None])

    def hide(self, logits: Tensor) -> Tensor:
        """Logits over `tokens` (rows × positions × words) with −∞ for words that are not on the row's shortlist."""
        return logits if self.outside is None else logits.masked_fill(self.outside, float("-inf"))

    def places(self, tokens: list[int]) -> list[int]:
        """Indices of special tokens in `tokens`."""
        return torch.searchsorted(self.tokens, self.tokens.new_tensor(tokens)).tolist()

    def spread(self, scores: Tensor, config: DeqNarConfig) -> Tensor:
        """Scores over `tokens` as scores over the vocabulary, with −∞ for other tokens."""
        full = scores.new_full((*scores.shape[:-1], config.vocab_size), float("-inf"))
        return full.index_copy(-1, self.tokens, scores)


class Shortlist(nn.Module):
    """Source tokens → shortlist. Its tables are counted by `data.shortlist_counts` and saved with the model."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.shortlist_size)
        self.never = never_written(config)
        self.register_buffer("companions", torch.full(shape, UNKNOWN, dtype=torch.int32))
        self.register_buffer("common", torch.full((config.shortlist_common,), UNKNOWN, dtype=torch.int32))

    def forward(self, input_ids: Tensor, source_mask: Tensor) -> Words:
        # In numpy, which has less overhead per operation than torch; this dominates for a single sentence.
        companions, common = self.companions.cpu().numpy(), self.common.cpu().numpy()
        if common[0] == UNKNOWN:
            raise ValueError("The shortlist of this model is empty; create it with hf-deqnar shortlist.")
        rows = len(input_ids)
        listed = companions[input_ids.cpu().numpy()]
        listed[~source_mask.cpu().numpy()] = common[0]  # padding has no companions
        allowed = numpy.zeros((rows, len(companions)), dtype=bool)
        allowed[:, common] = allowed[:, self.never] = True
        allowed[numpy.arange(rows)[:, None], listed.reshape(rows, -1)] = True
        tokens = allowed.any(axis=0).nonzero()[0]
        outside = None if rows == 1 else torch.from_numpy(~allowed[:, None, tokens]).to(input_ids.device)
        return Words(torch.from_numpy(tokens).to(input_ids.device), outside)

    def extend(self, vocabulary: int) -> None:
        """Extend the vocabulary; new tokens are on every shortlist and have no companions."""
        known, size = self.companions.shape
        new = torch.arange(known, vocabulary, dtype=torch.int32, device=self.common.device)
        self.companions = torch.cat([self.companions, self.common[:1].expand(len(new), size)])
        if self.common[0] != UNKNOWN:
            self.common = torch.cat([self.common, new])

    def full_vocabulary(self) -> Words:
        """The full vocabulary."""
        return Words(torch.arange(len(self.companions), device=self.companions.device), None)

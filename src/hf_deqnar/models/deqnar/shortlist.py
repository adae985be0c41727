"""A shortlist: the few tokens that the translation of a sentence can be made of.

To find one token a projection looks at the whole vocabulary, though a source says nearly all that its translation can
be about. For every source token the table holds its likeliest companions in the training data; some common tokens go
with every source; the rest of the vocabulary is not looked at.
"""

from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn

from .configuration_deqnar import DeqNarConfig

UNKNOWN = -1


def never_written(config: DeqNarConfig) -> list[int]:
    """The tokens that are never part of a text."""
    never = {config.pad_token_id, config.mask_token_id, config.bos_token_id}
    return [token for token in never if token is not None]


@dataclass
class Words:
    """The tokens that the rows of a batch may be made of; special ones are always among them."""

    tokens: Tensor  # words: ids of all that some row may use, ascending
    outside: Tensor | None  # rows, 1, words: true where a row may not use one; None if all rows may use all

    def select(self, rows: Tensor) -> "Words":
        return self if self.outside is None else Words(self.tokens, self.outside[rows])

    def of_row(self, row: int) -> "Words":
        """What one row may be made of, and nothing else."""
        if self.outside is None or len(self.outside) == 1:
            return self
        inside = ~self.outside[row : row + 1]
        return Words(self.tokens[inside[0, 0]], self.outside[row : row + 1][inside][None, None])

    def hide(self, logits: Tensor) -> Tensor:
        """Logits over `tokens` (rows × positions × words) with −∞ where a row may not use a word."""
        return logits if self.outside is None else logits.masked_fill(self.outside, float("-inf"))

    def places(self, tokens: list[int]) -> list[int]:
        """Where special tokens stand among the words."""
        return torch.searchsorted(self.tokens, self.tokens.new_tensor(tokens)).tolist()

    def spread(self, scores: Tensor, config: DeqNarConfig) -> Tensor:
        """Scores over `tokens` as scores over the vocabulary, with −∞ for all others."""
        whole = scores.new_full((*scores.shape[:-1], config.vocab_size), float("-inf"))
        return whole.index_copy(-1, self.tokens, scores)


class Shortlist(nn.Module):
    """Source tokens → words. Its tables are learned by `corpus.shortlist` and saved with the model."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.shortlist_size)
        self.never = never_written(config)
        self.register_buffer("companions", torch.full(shape, UNKNOWN, dtype=torch.int32))
        self.register_buffer("common", torch.full((config.shortlist_common,), UNKNOWN, dtype=torch.int32))

    def forward(self, input_ids: Tensor, source_mask: Tensor) -> Words:
        # In numpy, whose small operations cost less than torch's: for a single sentence they are all the work there is.
        companions, common = self.companions.cpu().numpy(), self.common.cpu().numpy()
        if common[0] == UNKNOWN:
            raise ValueError("This model's shortlist was never learned; give it one with hf-deqnar shortlist.")
        rows = len(input_ids)
        listed = companions[input_ids.cpu().numpy()]
        listed[~source_mask.cpu().numpy()] = common[0]  # padding has no companions of its own
        allowed = numpy.zeros((rows, len(companions)), dtype=bool)
        allowed[:, common] = allowed[:, self.never] = True
        allowed[numpy.arange(rows)[:, None], listed.reshape(rows, -1)] = True
        tokens = allowed.any(axis=0).nonzero()[0]
        outside = None if rows == 1 else torch.from_numpy(~allowed[:, None, tokens]).to(input_ids.device)
        return Words(torch.from_numpy(tokens).to(input_ids.device), outside)

    def extend(self, vocabulary: int) -> None:
        """Know more tokens: new ones are on every list, and bring no others."""
        known, size = self.companions.shape
        new = torch.arange(known, vocabulary, dtype=torch.int32, device=self.common.device)
        self.companions = torch.cat([self.companions, self.common[:1].expand(len(new), size)])
        if self.common[0] != UNKNOWN:
            self.common = torch.cat([self.common, new])

    def whole_vocabulary(self) -> Words:
        """As if there were no list."""
        return Words(torch.arange(len(self.companions), device=self.companions.device), None)

"""n-grams: how likely a token is after those that stand before it.

A parallel decoder chooses every token without knowing what its neighbours became, and so may mix two ways to say a
thing. A table of what follows what in the target language knows nothing of the source, but tells such a mixture from a
sentence, and is looked up in microseconds. A CTC beam search asks it about every token that it adds to a prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from .ctc import extend_hash

MIN_PROB = 1e-3  # of a token that a search with n-grams looks up: they seldom speak for less likely ones
NO_TOKEN = -1  # stands before the start of a text
TWO_TO_64 = 1 << 64


class Ngrams(nn.Module):
    """log p(token | the tokens before it). Its tables are learned by `corpus.ngrams` and saved with the model.

    The longest n-gram that is listed tells; where one is not, what is left for such tokens after this context goes on
    to the shorter ones:

        p(w | h) = p*(h w) if h w is listed, else b(h)·p(w | h without its first token)
    """

    keys: Tensor
    chances: Tensor
    backoffs: Tensor
    first_chances: Tensor
    first_backoffs: Tensor

    def __init__(self, vocabulary: int, order: int, entries: int) -> None:
        super().__init__()
        self.order = order
        self.register_buffer("keys", torch.zeros(entries, dtype=torch.long))  # hashes of two tokens and more, ascending
        self.register_buffer("chances", torch.zeros(entries))  # log p*
        self.register_buffer("backoffs", torch.zeros(entries))  # log b
        self.register_buffer("first_chances", torch.zeros(vocabulary))  # the same of single tokens
        self.register_buffer("first_backoffs", torch.zeros(vocabulary))

    @property
    def learned(self) -> bool:
        """No token is certain, as all are before something is learned."""
        return float(self.first_chances[0]) < 0

    def extend(self, vocabulary: int) -> None:
        """Know more tokens: new ones are as likely as the least likely known, after whatever."""
        new = vocabulary - len(self.first_chances)
        least = self.first_chances.min().expand(new)
        self.first_chances = torch.cat([self.first_chances, least])
        self.first_backoffs = torch.cat([self.first_backoffs, torch.zeros_like(least)])

    def forward(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """log p of every token.

        Args:
            contexts: … × (order − 1) tokens before it, `NO_TOKEN` where a text has not begun.
            tokens: …, or what that can be broadcast with.
        """
        found = self.first_chances[tokens].float()
        for size in range(1, self.order):
            context = contexts[..., contexts.shape[-1] - size :]
            hashes = torch.zeros_like(context[..., 0])
            for place in range(size):
                hashes = extend_hash(hashes, context[..., place])
            if size == 1:
                left = self.first_backoffs[context[..., 0].clamp_min(0)].float()
            else:
                left = self._look_up(self.backoffs, hashes, torch.zeros_like(found[..., :1]))
            shorter = found + left
            longer = self._look_up(self.chances, extend_hash(hashes, tokens), shorter)
            found = torch.where(context[..., 0] == NO_TOKEN, found, longer)
        return found

    def _look_up(self, values: Tensor, hashes: Tensor, otherwise: Tensor) -> Tensor:
        place = torch.searchsorted(self.keys, hashes).clamp_max(len(self.keys) - 1)
        return torch.where(self.keys[place] == hashes, values[place].float(), otherwise)

    def one_by_one(self) -> Callable[[tuple[int, ...], int], float]:
        """The same for one token at a time, in Python's numbers: context, token → log p."""
        tables = (self.chances, self.backoffs, self.first_chances, self.first_backoffs)
        chances, backoffs, first_chances, first_backoffs = (table.float().numpy() for table in tables)
        keys = self.keys.numpy()
        last = len(keys) - 1

        def look_up(values: numpy.ndarray, number: int, otherwise: float) -> float:
            number %= TWO_TO_64
            number -= TWO_TO_64 if number >= TWO_TO_64 // 2 else 0
            place = min(int(keys.searchsorted(number)), last)
            return float(values[place]) if keys[place] == number else otherwise

        def log_chance(context: tuple[int, ...], token: int) -> float:
            found = float(first_chances[token])
            for size in range(1, min(len(context), self.order - 1) + 1):
                number = 0
                for each in context[len(context) - size :]:
                    number = extend_hash(number, each)
                left = float(first_backoffs[context[-1]]) if size == 1 else look_up(backoffs, number, 0.0)
                found = look_up(chances, extend_hash(number, token), found + left)
            return found

        return log_chance


@dataclass
class Fluency:
    """What a beam search adds for a token, w·log p(token | …) + bonus, and for the end of a text, w·log p(end | …)."""

    ngrams: Ngrams
    weight: float
    bonus: float
    end: int  # stands before every text, too

    def __call__(self, texts: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
        """For prefixes (rows × beam × longest, and their lengths) and tokens (rows × 1 × candidates)."""
        contexts = self._contexts(texts, counts)[:, :, None]
        return self.weight * self.ngrams(contexts, tokens) + self.bonus

    def of_end(self, texts: Tensor, counts: Tensor) -> Tensor:
        """rows × beam."""
        return self.weight * self.ngrams(self._contexts(texts, counts), torch.full_like(counts, self.end))

    def of_text(self, texts: Tensor, counts: Tensor) -> Tensor:
        """What all tokens of the texts added together, without their ends: rows × beam."""
        before = self.ngrams.order - 1
        padded = functional.pad(functional.pad(texts, (1, 0), value=self.end), (before - 1, 0), value=NO_TOKEN)
        contexts = padded.unfold(-1, before, 1)[..., : texts.shape[-1], :]
        added = self.weight * self.ngrams(contexts, texts) + self.bonus
        inside = torch.arange(texts.shape[-1], device=texts.device) < counts[..., None]
        return (added * inside).sum(dim=-1)

    def _contexts(self, texts: Tensor, counts: Tensor) -> Tensor:
        """The last tokens of every text: rows × beam × (order − 1)."""
        steps = torch.arange(1 - self.ngrams.order, 0, device=texts.device)
        places = counts[:, :, None] + steps
        tokens = texts.gather(2, places.clamp(0, texts.shape[2] - 1))
        tokens = torch.where(places == -1, self.end, tokens)
        return tokens.masked_fill(places < -1, NO_TOKEN)

    def one_by_one(self, names: list[int] | None = None) -> tuple[Callable, Callable]:
        """For one token at a time in Python's numbers: (prefix, token) → what is added, and prefix → what its end adds.

        Args:
            names: the tokens that the search calls 0, 1, …; it calls them by their ids if not given.
        """
        before, log_chance = self.ngrams.order - 1, self.ngrams.one_by_one()
        known: dict[tuple[tuple[int, ...], int], float] = {}

        def context_of(prefix: tuple[int, ...]) -> tuple[int, ...]:
            last = prefix[-before:] if names is None else tuple(names[place] for place in prefix[-before:])
            return last if len(last) == before else (self.end, *last)

        def of_token(prefix: tuple[int, ...], token: int) -> float:
            key = prefix[-before:], token
            if len(prefix) < before or key not in known:
                chance = log_chance(context_of(prefix), token if names is None else names[token])
                known[key] = self.weight * chance + self.bonus
            return known[key]

        def of_end(prefix: tuple[int, ...]) -> float:
            return self.weight * log_chance(context_of(prefix), self.end)

        return of_token, of_end

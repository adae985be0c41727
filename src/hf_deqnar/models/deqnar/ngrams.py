"""n-gram language model: the probability of a token given the preceding tokens.

A parallel decoder predicts every token independently of its neighbours, so outputs of different modes can be mixed. An
n-gram model of the target language is independent of the source, but scores fluent sequences higher, and a look-up
takes microseconds. CTC beam search adds its score for every token that extends a prefix.

KenLM is not used: its Python package needs a compiler, and its files could not be saved with a model as tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional

from .ctc_beam_search import extend_hash

MIN_PROB = 1e-3  # minimum probability of tokens in a search with n-grams; less likely tokens are rarely selected
NO_TOKEN = -1  # placeholder before the start of a text
TWO_TO_64 = 1 << 64
SIGN = numpy.uint64(1 << 63)  # numbers without sign, after an exclusive or with it, have the order of those with sign


class Ngrams(nn.Module):
    """log p(token | preceding tokens). Its tables are counted by `data.ngram_counts` and saved with the model.

    The longest listed n-gram is used; otherwise the model backs off to shorter ones:

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
        self.register_buffer(
            "keys", torch.zeros(entries, dtype=torch.long)
        )  # hashes of n-grams of two or more tokens, ascending
        self.register_buffer("chances", torch.zeros(entries))  # log p*
        self.register_buffer("backoffs", torch.zeros(entries))  # log b
        self.register_buffer("first_chances", torch.zeros(vocabulary))  # of single tokens
        self.register_buffer("first_backoffs", torch.zeros(vocabulary))
        self._index: tuple[Tensor, HashIndex] | None = None  # keys, and their index

    @property
    def learned(self) -> bool:
        """Whether the tables are filled; before, all log-probabilities are 0."""
        return float(self.first_chances[0]) < 0

    def extend(self, vocabulary: int) -> None:
        """Extend the vocabulary; new tokens get the lowest unigram probability."""
        new = vocabulary - len(self.first_chances)
        least = self.first_chances.min().expand(new)
        self.first_chances = torch.cat([self.first_chances, least])
        self.first_backoffs = torch.cat([self.first_backoffs, torch.zeros_like(least)])

    def forward(self, contexts: Tensor, tokens: Tensor) -> Tensor:
        """log p of every token.

        Args:
            contexts: … × (order − 1) tokens before it, `NO_TOKEN` before the start of a text.
            tokens: …, or a shape that can be broadcast with it.
        """
        found = self.first_chances[tokens].float()
        for size in range(1, self.order):
            context = contexts[..., contexts.shape[-1] - size :]
            hashes = torch.zeros_like(context[..., 0])
            for place in range(size):
                hashes = extend_hash(hashes, context[..., place])
            if size == 1:
                backoff = self.first_backoffs[context[..., 0].clamp_min(0)].float()
            else:
                backoff = self._look_up(self.backoffs, hashes, torch.zeros_like(found[..., :1]))
            shorter = found + backoff
            longer = self._look_up(self.chances, extend_hash(hashes, tokens), shorter)
            found = torch.where(context[..., 0] == NO_TOKEN, found, longer)
        return found

    def _look_up(self, values: Tensor, hashes: Tensor, otherwise: Tensor) -> Tensor:
        place = torch.searchsorted(self.keys, hashes).clamp_max(len(self.keys) - 1)
        return torch.where(self.keys[place] == hashes, values[place].float(), otherwise)

    def one_by_one(self) -> Callable[[tuple[int, ...], int], float]:
        """log p for one token at a time, with Python floats: context, token → log p."""
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
                backoff = float(first_backoffs[context[-1]]) if size == 1 else look_up(backoffs, number, 0.0)
                found = look_up(chances, extend_hash(number, token), found + backoff)
            return found

        return log_chance

    def by_array(self) -> Callable[[numpy.ndarray, numpy.ndarray], numpy.ndarray]:
        """`forward` in NumPy: contexts (n × (order − 1)), tokens (n) → log p."""
        tables = (self.chances, self.backoffs, self.first_chances, self.first_backoffs)
        chances, backoffs, first_chances, first_backoffs = (table.float().numpy() for table in tables)
        if self._index is None or self._index[0] is not self.keys:
            self._index = self.keys, HashIndex(self.keys.numpy())
        find = self._index[1]

        def log_chances(contexts: numpy.ndarray, tokens: numpy.ndarray) -> numpy.ndarray:
            found = first_chances[tokens]
            for size in range(1, self.order):
                context = contexts[:, contexts.shape[1] - size :]
                hashes = numpy.zeros_like(tokens)
                for number in range(size):
                    hashes = extend_hash(hashes, context[:, number])
                if size == 1:
                    backoff = first_backoffs[numpy.maximum(context[:, 0], 0)]
                else:
                    place, listed = find(hashes)
                    backoff = numpy.where(listed, backoffs[place], numpy.float32(0))
                place, listed = find(extend_hash(hashes, tokens))
                longer = numpy.where(listed, chances[place], found + backoff)
                found = numpy.where(context[:, 0] == NO_TOKEN, found, longer)
            return found

        return log_chances

    def _load_from_state_dict(self, *arguments: Any, **options: Any) -> None:
        self._index = None  # the keys are replaced in place
        super()._load_from_state_dict(*arguments, **options)


class HashIndex:
    """Finds hashes in ascending keys: hashes → places, and whether the key there is the hash.

    Hashes are evenly distributed. Their first bits tell the place to within a few keys, which is several times as fast
    as a binary search.

    >>> HashIndex(numpy.array([-5, 3, 8]))(numpy.array([3, 4]))
    (array([1, 2]), array([ True, False]))
    """

    def __init__(self, keys: numpy.ndarray) -> None:
        bits = max(1, (len(keys) - 1).bit_length())
        self.shift = numpy.uint64(64 - bits)
        buckets = numpy.arange(1 << bits, dtype=numpy.uint64) << self.shift
        self.starts = (keys.view(numpy.uint64) ^ SIGN).searchsorted(buckets)
        self.largest_bucket = int(numpy.diff(self.starts, append=len(keys)).max())
        self.keys, self.bounded = keys, numpy.append(keys, numpy.iinfo(numpy.int64).max)

    def __call__(self, hashes: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        place = self.starts[(hashes.view(numpy.uint64) ^ SIGN) >> self.shift]
        for _ in range(self.largest_bucket):
            place = place + (self.bounded[place] < hashes)
        place = numpy.minimum(place, len(self.keys) - 1)
        return place, self.keys[place] == hashes


@dataclass
class Fluency:
    """Terms of a beam search: w·log p(token | …) + bonus for a token, w·log p(end | …) for the end of a text."""

    ngrams: Ngrams
    weight: float
    bonus: float
    end: int  # also the context before every text

    def __call__(self, texts: Tensor, counts: Tensor, tokens: Tensor) -> Tensor:
        """For prefixes (rows × beam × longest, and their lengths) and tokens (rows × 1 × candidates)."""
        contexts = self._contexts(texts, counts)[:, :, None]
        return self.weight * self.ngrams(contexts, tokens) + self.bonus

    def of_end(self, texts: Tensor, counts: Tensor) -> Tensor:
        """rows × beam."""
        return self.weight * self.ngrams(self._contexts(texts, counts), torch.full_like(counts, self.end))

    def of_text(self, texts: Tensor, counts: Tensor) -> Tensor:
        """Sum of the terms of all tokens of the texts, without their ends: rows × beam."""
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

    def by_array(self, names: numpy.ndarray | None = None) -> tuple[numpy.ndarray, Callable]:
        """The context before a text, and contexts (n × (order − 1)), tokens (n) → terms of the tokens.

        Args:
            names: token ids of the indices 0, 1, … of the search, which are in contexts as well, except the one before
                a text. Default: the indices are token ids.
        """
        log_chances, before = self.ngrams.by_array(), self.ngrams.order - 1
        # Before a text: no token, and the end. With names, both have indices beyond them.
        start = numpy.array([NO_TOKEN] * (before - 1) + [self.end])
        if names is None:
            return start, lambda contexts, tokens: self.weight * log_chances(contexts, tokens) + self.bonus
        start = numpy.array([len(names)] * (before - 1) + [len(names) + 1])
        named = numpy.append(names, [NO_TOKEN, self.end])
        return start, lambda contexts, tokens: self.weight * log_chances(named[contexts], named[tokens]) + self.bonus

    def one_by_one(self, names: numpy.ndarray | None = None) -> tuple[Callable, Callable]:
        """For one token at a time, with Python floats: (prefix, token) → term of the token, prefix → term of its end.

        Args:
            names: token ids of the indices 0, 1, … of the search. Default: the indices are token ids.
        """
        before, log_chance = self.ngrams.order - 1, self.ngrams.one_by_one()
        listed = None if names is None else names.tolist()
        cache: dict[tuple[tuple[int, ...], int], float] = {}

        def context_of(prefix: tuple[int, ...]) -> tuple[int, ...]:
            last = prefix[-before:] if listed is None else tuple(listed[place] for place in prefix[-before:])
            return last if len(last) == before else (self.end, *last)

        def of_token(prefix: tuple[int, ...], token: int) -> float:
            key = prefix[-before:], token
            if len(prefix) < before or key not in cache:
                chance = log_chance(context_of(prefix), token if listed is None else listed[token])
                cache[key] = self.weight * chance + self.bonus
            return cache[key]

        def of_end(prefix: tuple[int, ...]) -> float:
            return self.weight * log_chance(context_of(prefix), self.end)

        return of_token, of_end

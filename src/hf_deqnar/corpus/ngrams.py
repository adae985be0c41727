"""Learning how likely a token is after those before it, for `ngrams_deqnar`."""

from collections.abc import Sequence

import numpy
import torch

from ..alignment import extend_hash
from ..configuration_deqnar import DeqNarConfig
from ..generation_deqnar import DeqNarGenerationConfig
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..ngrams_deqnar import NOBODY, Ngrams

Tokens = Sequence[Sequence[int]]


def learn_ngrams(texts: Tokens, vocabulary: int, end: int, order: int, least: int) -> Ngrams:
    """A table of n-grams, smoothed by Witten and Bell (1991).

    A context h was seen c(h) times, with u(h) different tokens after it; so often a token after it was new, and as
    often it may be new again. With p(w) the same over all tokens alike,

        p(w | h) = (c(h w) + u(h)·p(w | h without its first token)) / (c(h) + u(h)).

    Args:
        texts: token ids, without the end of a text.
        end: stands before and behind every text.
        order: tokens of the longest n-gram.
        least: n-grams of three tokens and more that were seen less often are not listed; their share of c(h) goes where
            u(h) goes.
    """
    tokens = numpy.concatenate([numpy.array([end, *text, end], dtype=numpy.int64) for text in texts])
    place = numpy.concatenate([numpy.arange(len(text) + 2) for text in texts])
    written = numpy.bincount(tokens[place > 0], minlength=vocabulary)
    kinds = numpy.count_nonzero(written)
    first = (written + kinds / vocabulary) / (written.sum() + kinds)

    table = Ngrams(vocabulary, order=1, entries=1)  # of what is listed so far
    table.first_chances.copy_(torch.from_numpy(numpy.log(first)))
    hashes = extend_hash(numpy.zeros_like(tokens), tokens)
    for size in range(2, order + 1):
        shorter, hashes = hashes, extend_hash(numpy.roll(hashes, 1), tokens)  # of the n-grams that end at each place
        places = numpy.flatnonzero(place >= size - 1)
        keys, examples, count = numpy.unique(hashes[places], return_index=True, return_counts=True)
        examples = places[examples]
        contexts, which = numpy.unique(shorter[examples - 1], return_inverse=True)
        listed = count >= (least if size > 2 else 1)
        seen, new = numpy.bincount(which, count), numpy.bincount(which)
        left = seen - numpy.bincount(which, count * listed) + new
        before = numpy.full((len(keys), order - 1), NOBODY)
        for step in range(1, size - 1):  # without the first token of the context
            before[:, order - 1 - step] = tokens[examples - step]
        lower = table(torch.from_numpy(before), torch.from_numpy(tokens[examples])).exp().numpy()
        chances = numpy.log((count + left[which] * lower) / (seen + new)[which])
        backoffs = numpy.log(left / (seen + new))
        if size == 2:
            table.first_backoffs[torch.from_numpy(tokens[examples - 1])] = torch.from_numpy(backoffs[which]).float()
        else:
            spot = numpy.searchsorted(table.keys.numpy(), contexts).clip(0, len(table.keys) - 1)
            known = table.keys.numpy()[spot] == contexts
            table.backoffs[torch.from_numpy(spot[known])] = torch.from_numpy(backoffs[known]).float()
        table = with_entries(table, size, keys[listed], chances[listed])
    return table


def with_entries(table: Ngrams, order: int, keys: numpy.ndarray, chances: numpy.ndarray) -> Ngrams:
    """The table with longer n-grams."""
    kept = slice(0, None if table.order > 1 else 0)
    every = torch.cat([table.keys[kept], torch.from_numpy(keys)])
    larger, sorting = Ngrams(len(table.first_chances), order, len(every)), every.argsort()
    larger.keys.copy_(every[sorting])
    larger.chances.copy_(torch.cat([table.chances[kept], torch.from_numpy(chances).float()])[sorting])
    larger.backoffs.copy_(torch.cat([table.backoffs[kept], torch.zeros(len(keys))])[sorting])
    larger.first_chances, larger.first_backoffs = table.first_chances, table.first_backoffs
    return larger


def end_of(config: DeqNarConfig) -> int:
    """The token that ends a text."""
    if not isinstance(config.eos_token_id, int):
        raise ValueError(f"eos_token_id={config.eos_token_id}, but n-grams need one token that ends a text.")
    return config.eos_token_id


def add_ngrams(
    model: DeqNarForConditionalGeneration, texts: Tokens, *, order: int, least: int, weight: float, bonus: float
) -> None:
    """Give a CTC model n-grams of texts (token ids of the target language), which its beam search then looks at.

    Args:
        order, least: as in `learn_ngrams`.
        weight, bonus: what `generate` does with them if nothing else is asked for (`ngram_weight`, `token_bonus`).
    """
    config = model.config
    if config.length != "ctc":
        raise ValueError(f"length='{config.length}': n-grams are for the beam search of models with length='ctc'.")
    if order < 2 or least < 1:
        raise ValueError(f"order={order} and least={least} must be at least 2 and 1.")
    if len(texts) == 0:
        raise ValueError("There is no text to learn n-grams from.")
    end = end_of(config)
    without_end = [[token for token in text if token != end] for text in texts]
    ngrams = learn_ngrams(without_end, config.vocab_size, end, order, least)
    model.model.ngrams = ngrams.to(model.device)
    config.ngram_order, config.ngram_entries = order, len(ngrams.keys)
    beam = max(model.generation_config.ctc_beam_size, 5)
    model.generation_config.update(ctc_beam_size=beam, ngram_weight=weight, token_bonus=bonus)


def without_ngrams(model: DeqNarForConditionalGeneration) -> DeqNarForConditionalGeneration:
    """A model that was given n-grams, as it was before: for training, which changes what they were weighed against."""
    if model.model.ngrams is not None:
        model.model.ngrams = None
        model.config.ngram_order = model.config.ngram_entries = 0
        usual = DeqNarGenerationConfig()
        for name in ("ctc_beam_size", "ngram_weight", "token_bonus"):
            setattr(model.generation_config, name, getattr(usual, name))
    return model

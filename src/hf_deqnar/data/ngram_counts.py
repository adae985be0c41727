"""Counting n-grams of the target language, for the CTC beam search (`models.deqnar.ngrams`)."""

from collections.abc import Sequence

import numpy
import torch
from tqdm import tqdm

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.ctc_beam_search import extend_hash
from ..models.deqnar.generation_config_deqnar import SEARCH_OPTIONS, DeqNarGenerationConfig
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.ngrams import NO_TOKEN, Ngrams

Tokens = Sequence[Sequence[int]]


def learn_ngrams(texts: Tokens, vocabulary: int, end: int, order: int, least: int) -> Ngrams:
    """N-gram probabilities with Witten-Bell smoothing (Witten and Bell 1991).

    With c(h) the count of a context h, u(h) the number of distinct tokens that follow it, and the uniform distribution
    below unigrams,

        p(w | h) = (c(h w) + u(h)·p(w | h without its first token)) / (c(h) + u(h)).

    Args:
        texts: token ids, without the end token.
        vocabulary: number of tokens.
        end: token that is added before and after every text.
        order: tokens of the longest n-gram.
        least: smallest count of an n-gram of three or more tokens that is listed; the counts of the others are added to
            u(h) in the numerator.
    """
    tokens = numpy.concatenate([numpy.array([end, *text, end], dtype=numpy.int64) for text in texts])
    positions = numpy.concatenate([numpy.arange(len(text) + 2) for text in texts])
    counts = numpy.bincount(tokens[positions > 0], minlength=vocabulary)
    distinct = numpy.count_nonzero(counts)
    unigrams = (counts + distinct / vocabulary) / (counts.sum() + distinct)

    table = Ngrams(vocabulary, order=1, entries=1)
    table.first_chances.copy_(torch.from_numpy(numpy.log(unigrams)))
    hashes = extend_hash(numpy.zeros_like(tokens), tokens)
    for size in tqdm(range(2, order + 1), desc="counting n-grams", unit="order", delay=2, disable=None):
        shorter, hashes = hashes, extend_hash(numpy.roll(hashes, 1), tokens)  # of the n-gram that ends at each index
        indices = numpy.flatnonzero(positions >= size - 1)
        keys, examples, count = numpy.unique(hashes[indices], return_index=True, return_counts=True)
        examples = indices[examples]
        contexts, context_of = numpy.unique(shorter[examples - 1], return_inverse=True)
        listed = count >= (least if size > 2 else 1)
        total, followers = numpy.bincount(context_of, count), numpy.bincount(context_of)
        unlisted = total - numpy.bincount(context_of, count * listed) + followers
        before = numpy.full((len(keys), order - 1), NO_TOKEN)
        for step in range(1, size - 1):  # without the first token of the context
            before[:, order - 1 - step] = tokens[examples - step]
        lower = table(torch.from_numpy(before), torch.from_numpy(tokens[examples])).exp().numpy()
        log_probs = numpy.log((count + unlisted[context_of] * lower) / (total + followers)[context_of])
        backoffs = numpy.log(unlisted / (total + followers))
        if size == 2:
            table.first_backoffs[torch.from_numpy(tokens[examples - 1])] = torch.from_numpy(
                backoffs[context_of]
            ).float()
        else:
            rows = numpy.searchsorted(table.keys.numpy(), contexts).clip(0, len(table.keys) - 1)
            known = table.keys.numpy()[rows] == contexts
            table.backoffs[torch.from_numpy(rows[known])] = torch.from_numpy(backoffs[known]).float()
        table = add_entries(table, size, keys[listed], log_probs[listed])
    return table


def add_entries(table: Ngrams, order: int, keys: numpy.ndarray, log_probs: numpy.ndarray) -> Ngrams:
    """A table that also lists n-grams of the next order.

    Args:
        table: lists the shorter n-grams.
        order: tokens of the new n-grams.
        keys: their hashes.
        log_probs: log p(last token | context) of each.
    """
    old = slice(0, None if table.order > 1 else 0)  # a table of order 1 has one unused entry
    all_keys = torch.cat([table.keys[old], torch.from_numpy(keys)])
    larger, sorting = Ngrams(len(table.first_chances), order, len(all_keys)), all_keys.argsort()
    larger.keys.copy_(all_keys[sorting])
    larger.chances.copy_(torch.cat([table.chances[old], torch.from_numpy(log_probs).float()])[sorting])
    larger.backoffs.copy_(torch.cat([table.backoffs[old], torch.zeros(len(keys))])[sorting])
    larger.first_chances, larger.first_backoffs = table.first_chances, table.first_backoffs
    return larger


def end_token_id(config: DeqNarConfig) -> int:
    """The id of the only token that ends a text; an error if there are several or none."""
    if not isinstance(config.eos_token_id, int):
        raise ValueError(f"eos_token_id={config.eos_token_id}, but n-grams need one token that ends a text.")
    return config.eos_token_id


def add_ngrams(
    model: DeqNarForConditionalGeneration, texts: Tokens, *, order: int, least: int, weight: float, bonus: float
) -> None:
    """Add n-grams to a model of CTC or graphs, for its beam search.

    Args:
        model: with `length="ctc"` or `"dag"`; changed in place.
        texts: token ids of the target language.
        order, least: as for `learn_ngrams`.
        weight, bonus: defaults of `ngram_weight` and `token_bonus` in the model's generation config.
    """
    config = model.config
    search = LENGTH_MODELS[config.length].search_option
    if search is None:
        raise ValueError(
            f"length='{config.length}': n-grams need a model with length='ctc' or 'dag', whose beam search uses them."
        )
    if order < 2 or least < 1:
        raise ValueError(f"order={order} and least={least} must be at least 2 and 1.")
    if len(texts) == 0:
        raise ValueError("There is no text to learn n-grams from.")
    end = end_token_id(config)
    without_end = [[token for token in text if token != end] for text in texts]
    ngrams = learn_ngrams(without_end, config.vocab_size, end, order, least)
    model.model.ngrams = ngrams.to(model.device)
    config.ngram_order, config.ngram_entries = order, len(ngrams.keys)
    assert model.generation_config is not None  # only before `__init__` has ended
    beam = {search: max(getattr(model.generation_config, search), 5)}
    model.generation_config.update(**beam, ngram_weight=weight, token_bonus=bonus)


def remove_ngrams(model: DeqNarForConditionalGeneration) -> DeqNarForConditionalGeneration:
    """Remove the n-grams of a model and reset their generation options; returns the model.

    For further training, after which the weight of the n-grams would have to be tuned again.
    """
    if model.model.ngrams is not None:
        model.model.ngrams = None
        model.config.ngram_order = model.config.ngram_entries = 0
        defaults = DeqNarGenerationConfig()
        for name in (*SEARCH_OPTIONS, "ngram_weight", "token_bonus"):
            setattr(model.generation_config, name, getattr(defaults, name))
    return model

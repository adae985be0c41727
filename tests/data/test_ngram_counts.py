import math
from collections import Counter, defaultdict

import pytest
import torch

from hf_deqnar.data.ngram_counts import add_ngrams, learn_ngrams
from hf_deqnar.models.deqnar.ngrams import NO_TOKEN

from ..conftest import VOCABULARY, random_sentences, small_model

END = 2


def brute_force(texts: list[list[int]], order: int, least: int):
    """Witten and Bell's p(w | h), one n-gram at a time: a function of a context and a token."""
    counts: dict[tuple, Counter] = defaultdict(Counter)
    for text in texts:
        padded = [END, *text, END]
        for position in range(1, len(padded)):
            for size in range(min(order, position + 1)):
                counts[tuple(padded[position - size : position])][padded[position]] += 1

    def probability(context: tuple[int, ...], token: int) -> float:
        after = counts[context]
        total, distinct = sum(after.values()), len(after)
        lower = probability(context[1:], token) if context else 1 / VOCABULARY
        if total == 0:
            return lower
        listed = {one: count for one, count in after.items() if len(context) < 2 or count >= least}
        unlisted = total - sum(listed.values()) + distinct
        return (listed.get(token, 0) + unlisted * lower) / (total + distinct)

    return probability


def contexts_of(texts: list[list[int]], order: int) -> list[tuple[int, ...]]:
    """Contexts that occur in the texts, and some that do not."""
    occurring = [
        tuple([END, *text][max(0, position - order + 2) : position + 1])
        for text in texts
        for position in range(len(text))
    ]
    return [*occurring[:40], (7, 9, 7)[: order - 1], (END,)]


@pytest.mark.parametrize(("order", "least"), [(2, 1), (3, 1), (3, 2), (4, 2)])
def test_probabilities_equal_brute_force_and_sum_to_one(order, least):
    texts = [[6 + token % 9 for token in text] for text in random_sentences(80, seed=3)]
    table, expected = learn_ngrams(texts, VOCABULARY, END, order, least), brute_force(texts, order, least)
    one_by_one, every = table.one_by_one(), torch.arange(VOCABULARY)
    for context in contexts_of(texts, order):
        padded = torch.tensor([NO_TOKEN] * (order - 1 - len(context)) + list(context))
        found = table(padded[None], every)
        assert found.exp().sum().item() == pytest.approx(1, abs=1e-4)
        for token in range(VOCABULARY):
            assert found[token].item() == pytest.approx(math.log(expected(context, token)), abs=1e-4)
            assert one_by_one(context, token) == pytest.approx(found[token].item(), abs=1e-5)


def test_adding_ngrams_sets_the_config_and_the_generation_options():
    model = small_model(length="ctc")
    add_ngrams(model, [[8, 9, END], [8, 9, 10, END]], order=3, least=1, weight=0.3, bonus=0.5)
    options = model.generation_config
    assert (options.ctc_beam_size, options.ngram_weight, options.token_bonus) == (5, 0.3, 0.5)
    assert (model.config.ngram_order, model.config.ngram_entries) == (3, len(model.model.ngrams.keys))
    assert torch.equal(model.model.ngrams.keys, model.model.ngrams.keys.sort().values)


def test_invalid_arguments_are_refused():
    settings = {"order": 3, "least": 1, "weight": 0.2, "bonus": 1.0}
    with pytest.raises(ValueError, match="length='predict'"):
        add_ngrams(small_model(length="predict"), [[8]], **settings)
    with pytest.raises(ValueError, match="no text"):
        add_ngrams(small_model(length="ctc"), [], **settings)
    with pytest.raises(ValueError, match="order=1 and least=1"):
        add_ngrams(small_model(length="ctc"), [[8]], **{**settings, "order": 1})

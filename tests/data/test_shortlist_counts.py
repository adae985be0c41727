from collections import defaultdict

import numpy
import pytest

from hf_deqnar.data.shortlist_counts import EM_ITERATIONS, add_shortlist, learn_companions

from ..conftest import VOCABULARY, random_sentences, small_model


def brute_force(sources: list[list[int]], targets: list[list[int]]) -> dict[int, dict[int, float]]:
    """IBM model 1 on sets, one pair and one token at a time: p[s][t]."""
    probability = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(EM_ITERATIONS):
        count = defaultdict(lambda: defaultdict(float))
        for source, target in zip(sources, targets, strict=True):
            for target_token in set(target):
                total = sum(probability[source_token][target_token] for source_token in set(source))
                for source_token in set(source):
                    count[source_token][target_token] += probability[source_token][target_token] / total
        probability = {
            source_token: {target_token: part / sum(parts.values()) for target_token, part in parts.items()}
            for source_token, parts in count.items()
        }
    return probability


def test_companions_equal_brute_force():
    sources, targets = random_sentences(60, seed=1), random_sentences(60, seed=2)
    table, expected = learn_companions(sources, targets, VOCABULARY, 5), brute_force(sources, targets)
    for source_token in range(VOCABULARY):
        assert table[source_token, 0] == source_token
        probabilities = {
            target_token: value
            for target_token, value in expected.get(source_token, {}).items()
            if target_token != source_token
        }
        highest = sorted(probabilities.values(), reverse=True)[:4]
        found = [
            probabilities[target_token] for target_token in table[source_token, 1:] if target_token != source_token
        ]
        numpy.testing.assert_allclose(found, highest[: len(found)])
        assert len(found) == min(4, len(probabilities))


def test_tokens_that_always_occur_together_are_companions():
    """Every source token occurs with the target token that is greater by 20."""
    sources = [[6 + (first + step * step) % 20 for step in range(4)] for first in range(20)] * 3
    targets = [[token + 20 for token in reversed(source)] for source in sources]
    table = learn_companions(sources, targets, VOCABULARY, 2)
    assert all(table[token, 1] == token + 20 for token in range(6, 26))
    assert table[40].tolist() == [40, 40], "a token that is in no source has only itself as companion"


def test_common_tokens_are_the_most_frequent_and_the_special_ones():
    model = small_model(length="ctc")
    add_shortlist(model, [[8, 9], [8]], [[10, 10, 11], [12]], size=2, common=4)
    config = model.config
    assert set(model.model.shortlist.common.tolist()) >= {config.blank_token_id, config.eos_token_id, 10}
    assert (config.shortlist_size, config.shortlist_common) == (2, 4)


def test_invalid_arguments_are_refused():
    model = small_model()
    with pytest.raises(ValueError, match=f"between 1 and the {VOCABULARY} tokens"):
        add_shortlist(model, [[8]], [[9]], size=0, common=1)
    with pytest.raises(ValueError, match=f"between 1 and the {VOCABULARY} tokens"):
        add_shortlist(model, [[8]], [[9]], size=1, common=VOCABULARY + 1)
    with pytest.raises(ValueError, match="no pair of sentences"):
        add_shortlist(model, [], [], size=1, common=1)
    with pytest.raises(ValueError, match="common=1 is less than the number of special tokens, 2"):
        add_shortlist(model, [[8]], [[9]], size=1, common=1)
    assert model.model.shortlist is None
    assert model.config.shortlist_size == 0

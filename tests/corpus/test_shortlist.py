from collections import defaultdict

import numpy
import pytest

from hf_deqnar.corpus.shortlist import ROUNDS, add_shortlist, learn_companions

from ..conftest import VOCABULARY, random_sentences, small_model


def brute_force(sources: list[list[int]], targets: list[list[int]]) -> dict[int, dict[int, float]]:
    """IBM model 1 on sets, one pair and one token at a time: p[s][t]."""
    probability = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(ROUNDS):
        count = defaultdict(lambda: defaultdict(float))
        for source, target in zip(sources, targets, strict=True):
            for heard in set(target):
                total = sum(probability[said][heard] for said in set(source))
                for said in set(source):
                    count[said][heard] += probability[said][heard] / total
        probability = {
            said: {heard: part / sum(parts.values()) for heard, part in parts.items()} for said, parts in count.items()
        }
    return probability


def test_companions_are_the_likeliest_by_brute_force():
    sources, targets = random_sentences(60, seed=1), random_sentences(60, seed=2)
    table, expected = learn_companions(sources, targets, VOCABULARY, 5), brute_force(sources, targets)
    for said in range(VOCABULARY):
        assert table[said, 0] == said
        chances = {heard: chance for heard, chance in expected.get(said, {}).items() if heard != said}
        highest = sorted(chances.values(), reverse=True)[:4]
        found = [chances[heard] for heard in table[said, 1:] if heard != said]
        numpy.testing.assert_allclose(found, highest[: len(found)])
        assert len(found) == min(4, len(chances))


def test_words_that_always_go_together_find_each_other():
    """Each number goes with the number 20 above it, in sentences of several."""
    sources = [[6 + (first + step * step) % 20 for step in range(4)] for first in range(20)] * 3
    targets = [[token + 20 for token in reversed(source)] for source in sources]
    table = learn_companions(sources, targets, VOCABULARY, 2)
    assert all(table[token, 1] == token + 20 for token in range(6, 26))
    assert table[40].tolist() == [40, 40], "a token that is in no source has no companion but itself"


def test_common_tokens_are_the_most_frequent_and_what_every_text_needs():
    model = small_model(length="ctc")
    add_shortlist(model, [[8, 9], [8]], [[10, 10, 11], [12]], size=2, common=4)
    config = model.config
    assert set(model.model.shortlist.common.tolist()) >= {config.blank_token_id, config.eos_token_id, 10}
    assert (config.shortlist_size, config.shortlist_common) == (2, 4)


def test_what_cannot_be_learned_is_refused():
    model = small_model()
    with pytest.raises(ValueError, match=f"between 1 and the {VOCABULARY} tokens"):
        add_shortlist(model, [[8]], [[9]], size=0, common=1)
    with pytest.raises(ValueError, match=f"between 1 and the {VOCABULARY} tokens"):
        add_shortlist(model, [[8]], [[9]], size=1, common=VOCABULARY + 1)
    with pytest.raises(ValueError, match="no pair of sentences"):
        add_shortlist(model, [], [], size=1, common=1)
    with pytest.raises(ValueError, match="common=1 leaves no room for the 2 special tokens"):
        add_shortlist(model, [[8]], [[9]], size=1, common=1)
    assert model.model.shortlist is None
    assert model.config.shortlist_size == 0

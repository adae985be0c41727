import os
import subprocess
import sys

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.word_augmentation import find_counterparts, translated_words, vary_words

NUMBERS = {"two": "zwei", "three": "drei", "four": "vier"}
FAMILY = {"brother": "Bruder", "father": "Vater"}
YEARS = [
    Pair(f"My {kin} has been here for {number} years.", [f"Mein {verwandt} ist seit {zahl} Jahren hier."])
    for kin, verwandt in FAMILY.items()
    for number, zahl in NUMBERS.items()
]
# Enough other pairs that these words are neither too rare nor too frequent.
OTHERS = [Pair(f"a{index} b{index}", [f"c{index} d{index}"]) for index in range(400)]
CORPUS = [*YEARS * 3, *OTHERS]


def test_words_that_occur_in_the_same_pairs_are_counterparts():
    counterparts = find_counterparts(CORPUS)
    assert {word: counterparts.get(word) for word in NUMBERS} == NUMBERS
    assert {word: counterparts.get(word) for word in ("a1", "b2")} == {"a1": None, "b2": None}, "too rare"


def test_frequent_words_and_names_have_no_counterpart():
    common = [*CORPUS, *(Pair(f"and e{index}", [f"und f{index}"]) for index in range(20))]
    assert "and" not in find_counterparts(common)
    names = [*CORPUS, *[Pair("in Los Angeles", ["aus Los Angeles"])] * 6]
    assert {"Los", "Angeles"}.isdisjoint(find_counterparts(names))


def test_counterparts_share_at_least_half_of_their_pairs():
    shared = [Pair(f"old{index} bank", ["Bank" if index < 5 else f"Ufer{index}"]) for index in range(10)]
    assert find_counterparts([*OTHERS * 2, *shared]).get("bank") == "Bank", "half of its pairs are enough"
    shared.append(Pair("old bank", ["Ufer"]))
    assert "bank" not in find_counterparts([*OTHERS * 2, *shared])


def test_occurrences_have_their_neighbours_and_exclude_first_words():
    counterparts = {"Three": "Drei", "three": "drei", "years": "Jahre", "dog": "Hund"}
    pair = Pair("Three dogs slept three long years.", ["Drei Hunde schliefen lange drei Jahre."])
    three, years = translated_words(pair, counterparts)
    assert (three.words, three.neighbours) == (("three", "drei"), ("slept", "long", "lange", "jahre"))
    assert (years.words, years.neighbours) == (("years", "Jahre"), ("long", "", "drei", ""))
    assert [pair.source[slice(*occurrence.spans[0])] for occurrence in (three, years)] == ["three", "years"]
    assert [pair.references[0][slice(*occurrence.spans[1])] for occurrence in (three, years)] == ["drei", "Jahre"]
    assert translated_words(Pair("A dog bit a dog.", ["Ein Hund biss Hasso."]), counterparts) == [], "occurs twice"


def test_a_word_is_replaced_together_with_its_counterpart():
    translations = {pair.source: pair.references for pair in YEARS}
    varied = vary_words(CORPUS, share=1.0, seed=1)
    for old, new in zip(CORPUS[: len(YEARS)], varied, strict=False):
        assert new.source != old.source
        assert new.references == translations[new.source]
        assert sum(a != b for a, b in zip(old.source.split(), new.source.split(), strict=True)) == 1
    assert varied[-len(OTHERS) :] == OTHERS


def test_a_share_of_the_pairs_is_changed_and_the_seed_determines_which():
    half = vary_words(CORPUS, share=0.5, seed=1)
    assert half == vary_words(CORPUS, share=0.5, seed=1)
    assert half != vary_words(CORPUS, share=0.5, seed=2)
    assert 0 < sum(old != new for old, new in zip(CORPUS, half, strict=True)) < 3 * len(YEARS)
    assert vary_words(CORPUS, share=0.0, seed=1) == CORPUS


def test_a_corpus_without_words_is_unchanged():
    assert vary_words([Pair("?", ["!"])], share=1.0, seed=1) == [Pair("?", ["!"])]


def test_ties_are_broken_the_same_way_in_every_process():
    program = """
from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.word_augmentation import find_counterparts
words = [f"w{index}" for index in range(12)]
pairs = [Pair(" ".join(words), [" ".join(words).upper()])] * 5
pairs += [Pair(f"a{index}", [f"b{index}"]) for index in range(400)]
print(sorted(find_counterparts(pairs).items()))
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert "w3" in outputs.pop()

import random
import re

import pytest

from hf_deqnar.data.number_augmentation import RUN, replace_numbers, vary_numbers
from hf_deqnar.data.parallel_text import Pair


def numbers(text):
    return sorted(RUN.findall(text))


@pytest.mark.parametrize(
    ("source", "target", "pattern"),
    [
        ("The train leaves at 7:45.", "Der Zug fährt um 7.45 Uhr ab.", r"at (1?\d):[0-5]\d\."),
        (
            "I was born on May 31st, 1940.",
            "Ich bin am 31. Mai 1940 geboren.",
            r"May [1-3]?\d(st|nd|rd|th), (1[7-9]|20)\d\d",
        ),
        ("She has 3,500 books.", "Sie hat 3.500 Bücher.", r"has \d{1,2},\d{3} books"),
        ("Platform 12, please.", "Bitte Gleis 12.", r"Platform \d{1,2},"),
    ],
)
def test_numbers_are_replaced_by_others_of_their_kind_on_both_sides(source, target, pattern):
    generator = random.Random(0)
    found = [replace_numbers(Pair(source, [target]), generator) for _ in range(200)]
    found = [pair for pair in found if pair is not None]
    assert len({pair.source for pair in found}) > 50
    for pair in found:
        assert re.search(pattern, pair.source), pair.source
        assert numbers(pair.source) == numbers(pair.references[0])
        assert RUN.sub("0", pair.references[0]) == RUN.sub("0", target)


@pytest.mark.parametrize(
    ("number", "ordinal"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (11, "11th"), (22, "22nd"), (30, "30th")]
)
def test_ordinals_get_the_ending_of_their_number(number, ordinal):
    class Fixed(random.Random):
        def choice(self, allowed):
            return number

    pair = replace_numbers(Pair("the 4th of May", ["der 4. Mai"]), Fixed())
    assert pair == Pair(f"the {ordinal} of May", [f"der {number}. Mai"])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("I have tea.", "Ich habe Tee."),
        ("Wake me up at 6.", "Wecke mich um sechs."),
        ("It is 1 apple.", "Es ist 1 Apfel."),
    ],
)
def test_pairs_without_equal_numbers_or_with_a_singular_are_not_changed(source, target):
    assert replace_numbers(Pair(source, [target]), random.Random(0)) is None


def test_copies_follow_the_corpus_and_the_seed_determines_them():
    pairs = [Pair("I have tea.", ["Ich habe Tee."]), Pair("It costs 300 dollars.", ["Es kostet 300 Dollar."])]
    varied = vary_numbers(pairs, copies=5, seed=1)
    assert varied[:2] == pairs
    assert len(varied) == 7
    assert all(re.fullmatch(r"It costs [1-9]\d\d dollars\.", pair.source) for pair in varied[2:])
    assert varied == vary_numbers(pairs, copies=5, seed=1)
    assert varied != vary_numbers(pairs, copies=5, seed=2)

import itertools
import random

import pytest

from hf_deqnar.models.deqnar.sentence_splitting import Segment, is_copied, split_long, split_sentences


def sentences(text):
    return [text[one.start : one.end] for one in split_sentences(text)]


@pytest.mark.parametrize(
    "expected",
    [
        ["Mr. Smith left at 7.45 p.m. from platform 3.", '"Really?" she asked.'],
        ["I came.", "I saw!", "Did I conquer?", "Yes... maybe.", "Well... I see."],
        ['"Stop!" Tom said.', "He left.", "“Stop.”", "He stopped."],
        ['He said, "I came. I saw."', "Then he left.", "(This is it. Really.)", "Yes."],
        ["J. K. Rowling wrote it.", "See http://example.org/b.c?d=e.f for more.", "Next."],
        ["Am 3. Oktober feiern wir.", "Er ist z. B. groß.", "Das ist Nr. 5."],
        [
            "I work for the U.S. Government.",
            "I live in the U.S.",
            "He does not.",
            "We met at 5 p.m.",
            "The train left.",
        ],
        ["Version 2.0 is out.", "It has 3.5 kg.", "12 people came.", "It costs $5.", "He is 30.", "Tom is 25."],
        ["Oh no!!", "Why?!?", "Because.", "¿Qué?", "«Non.»", "Oui."],
        ["The cat sat.", "Tom enjoys the sun.", "Birds sing."],
        ["HELLO MR. SMITH.", "HOW ARE YOU?", "FINE."],
        ["hello there.", "how are you?", "i am fine, e.g. today."],
        ["Thanks!", "😀 ❤️", "See you.", "🎉"],
        ["I have two things, etc. and more, vs. less.", "Dr. No is No. 1."],
    ],
)
def test_sentences_are_found(expected):
    assert sentences(" ".join(expected)) == expected


def test_a_line_break_ends_a_sentence():
    assert sentences(" A title\n\nA text. More\r\nEnd\u2028x ") == ["A title", "A text.", "More", "End", "x"]
    assert sentences(" \n ") == sentences("") == []


def test_sentences_of_languages_without_spaces_are_found():
    assert sentences("你好。我很好！") == ["你好。", "我很好！"]


def test_a_quotation_that_is_never_closed_or_very_long_is_split():
    assert sentences('He said: "It rains. We stay.') == ['He said: "It rains.', "We stay."]
    assert len(sentences('"' + "It rains today. " * 30 + '"')) >= 30


@pytest.mark.parametrize("seed", range(20))
def test_segments_cover_all_but_white_space_of_any_text(seed):
    draw = random.Random(seed)
    text = "".join(draw.choices('aB1.!?…"“”„()。 \n\t\r😀\u200d\ufe0f,;:-', k=300))
    found = [part for segment in split_sentences(text) for part in split_long(text, segment, lambda one: len(one) < 20)]
    assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(found))
    assert all(text[one.start : one.end] == text[one.start : one.end].strip() != "" for one in found)
    gaps = zip([0, *(one.end for one in found)], [*(one.start for one in found), len(text)], strict=True)
    assert all(not text[start:end].strip() for start, end in gaps)
    assert all(one.end - one.start < 20 or len(text[one.start : one.end]) < 2 for one in found)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("When it rains, we stay; when it does not, we go.", ["When it rains, we stay;", "when it does not, we go."]),
        ("When it rains a lot, we stay at home", ["When it rains a lot,", "we stay at home"]),
        ("one two three four five six", ["one two three", "four five six"]),
        ("x" * 40, ["x" * 20, "x" * 20]),
        ("short", ["short"]),
    ],
)
def test_long_sentences_are_cut_at_clauses_then_words_then_characters(text, parts):
    found = split_long(text, Segment(0, len(text)), lambda part: len(part) < 26)
    assert [text[one.start : one.end] for one in found] == parts


def test_an_emoji_of_several_characters_is_not_cut():
    family = "👨\u200d👩\u200d👧"
    found = split_long(family * 4, Segment(0, len(family) * 4), lambda part: len(part) <= 10)
    assert "".join((family * 4)[one.start : one.end] for one in found) == family * 4
    assert all(one.start % len(family) == 0 for one in found)


def test_numbers_emoji_and_addresses_are_copied():
    assert all(map(is_copied, ("", "12:45", "3,5 %", "😀", "https://example.org/a", "a.b@example.org", "...")))
    assert not any(map(is_copied, ("No. 5", "a", "See https://example.org", "ß", "日本")))


def test_a_text_of_combining_characters_is_divided_in_halves():
    text = "e" + "\u0301" * 5000
    parts = split_long(text, Segment(0, len(text)), lambda part: len(part) < 100)
    assert "".join(text[part.start : part.end] for part in parts) == text
    assert max(part.end - part.start for part in parts) < 100

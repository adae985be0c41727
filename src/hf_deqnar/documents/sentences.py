"""Splitting a paragraph into sentences. Documents and the server split text with `split` only."""

import re
from collections.abc import Callable

# A full stop after one of these words does not end a sentence.
ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "sr",
        "jr",
        "vs",
        "etc",
        "e.g",
        "i.e",
        "no",
        "fig",
        "vol",
        "approx",
        "inc",
        "ltd",
        "co",
        "u.s",
        "u.k",
        "a.m",
        "p.m",
        "jan",
        "feb",
        "aug",
        "sept",
        "oct",
        "nov",
        "dec",
        "bzw",
        "usw",
        "z.b",
        "d.h",
        "ca",
        "nr",
        "str",
    ]
)
ENDING = re.compile(r"""([.!?…]+["'”’»)\]\ue000-\uf8ff]*)(\s+)(?=["'“‘«(\[¿¡\ue000-\uf8ff]*[^\W_a-z])""")
IDEOGRAPHIC = re.compile(r"([。！？]+[」』”’]*)(\s*)(?=\S)")
CLAUSE = re.compile(r"(?<=[,;:])\s+|\s+(?=[–—(])")


def split(text: str) -> list[tuple[str, str]]:
    """Sentences, each with the white space that follows it; together they are the text.

    >>> split("It is 5 p.m. now. Dr. Smith left!  Why?")
    [('It is 5 p.m. now.', ' '), ('Dr. Smith left!', '  '), ('Why?', '')]
    """
    ends = [match for match in ENDING.finditer(text) if not is_abbreviation(text[: match.end(1)])]
    ends = sorted([*ends, *IDEOGRAPHIC.finditer(text)], key=lambda match: match.start())
    parts, start = [], 0
    for match in ends:
        parts.append((text[start : match.end(1)], match[2]))
        start = match.end()
    return [*parts, (text[start:], "")] if start < len(text) else parts


def is_abbreviation(text: str) -> bool:
    """Whether the full stop at the end of a text belongs to an abbreviation or to the initial of a name."""
    if not text.endswith("."):
        return False
    word = re.split(r"[\s(\[\"'“‘«]", text[:-1])[-1]
    return word.lower() in ABBREVIATIONS or (len(word) == 1 and word.isupper() and word != "I")


def shorten(text: str, fits: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Parts of a sentence that each fit, divided at the clause, or else the space, that is nearest to the middle.

    >>> shorten("I came, I saw, I won", lambda text: len(text) <= 14)
    [('I came,', ' '), ('I saw, I won', '')]
    """
    if fits(text):
        return [(text, "")]
    for pattern in (CLAUSE, re.compile(r"(?<=\S)\s+(?=\S)"), re.compile(r"(?<=.)(?=.)")):
        places = list(pattern.finditer(text))
        if places:
            middle = min(places, key=lambda match: abs(match.start() - len(text) / 2))
            *first, (last, _) = shorten(text[: middle.start()], fits)
            return [*first, (last, middle[0]), *shorten(text[middle.end() :], fits)]
    return [(text, "")]  # one character

"""Sentences of a paragraph with marks, together with the white space between them."""

import re
from collections.abc import Callable, Iterable

from ..models.deqnar.sentence_splitting import Segment, split_long, split_sentences
from .marks import MARK


def split(text: str) -> list[tuple[str, str]]:
    """Sentences, each with the white space that follows it; together they are the text.

    Marks count as quotation marks. Unlike in plain text, line breaks do not end a sentence: documents wrap lines.

    >>> split("It is 5 p.m. now. Dr. Smith left!  Why?")
    [('It is 5 p.m. now.', ' '), ('Dr. Smith left!', '  '), ('Why?', '')]
    """
    plain = re.sub(r"\s", " ", MARK.sub("'", text))
    return with_gaps(text, split_sentences(plain))


def shorten(text: str, fits: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Parts of a sentence that each fit, cut at clauses, else between words.

    >>> shorten("I came, I saw, I won", lambda text: len(text) <= 14)
    [('I came,', ' '), ('I saw, I won', '')]
    """
    return with_gaps(text, split_long(text, Segment(0, len(text)), fits))


def with_gaps(text: str, segments: Iterable[Segment]) -> list[tuple[str, str]]:
    """The segments of a text, each with what lies between it and the next; a text before the first is a gap, too."""
    parts: list[tuple[str, str]] = []
    position = 0
    for segment in segments:
        if segment.start > position:
            before = parts.pop()[0] if parts else ""
            parts.append((before, text[position : segment.start]))
        parts.append((text[segment.start : segment.end], ""))
        position = segment.end
    if position < len(text):
        before = parts.pop()[0] if parts else ""
        parts.append((before, text[position:]))
    return parts

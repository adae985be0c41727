"""Splitting a text into sentences, and long sentences into clauses, by rules for languages in Latin script.

A segment is a part of the text, by its offsets. What lies between two segments is white space, which is kept.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass


def words(text: str) -> frozenset[str]:
    """The words of a table."""
    return frozenset(text.split())


# Abbreviations that are followed by the rest of the sentence, in lower case and without the final full stop.
TITLES = words(
    """
    mr mrs ms mx dr prof st sgt capt col gen lt cmdr hon rev fr sr jr messrs mme mlle ph vs viz cf approx resp e.g
    i.e z.b d.h u.a o.ä bzw ca ggf evtl inkl exkl sog vgl hr fr dipl ing geb gest zzgl v.a m.e i.d.r p.ex av sra
    srta dña sig dott avv ecc
    """
)
# Abbreviations that are followed by the rest of the sentence if that is a number.
BEFORE_NUMBERS = words(
    """
    no nos nr nrn vol vols p pp fig figs ch chap sec art para abs kap bd s n° tel tab
    """
)
# Abbreviations that may also end a sentence; they do if a word follows that usually starts one.
MAY_END = words(
    """
    etc usw al inc ltd co corp bros dept min a.m p.m u.s u.k u.s.a d.c u.n e.u b.c a.d st ave blvd rd jan feb apr
    jun jul aug sep sept oct nov dec mon tue thu fri usf u.s.w n.chr v.chr str mio mrd
    """
)
STARTERS = words(
    """
    the a an i i'm i've i'll he she it we they you this that these those there here what when where who why how but
    and so my your his her its our their if in on at then he's she's it's we're they're you're is are was were do
    does did der die das ein eine ich er sie es wir ihr du dies diese dieser dann aber und wenn was wo wer wie warum
    mein dein le la les un une je il elle nous vous ils elles ce el los las yo él ella nosotros pero y
    """
)
# Words after a German ordinal number such as "3. Oktober".
AFTER_ORDINALS = words(
    """
    januar februar märz april mai juni juli august september oktober november dezember jahrhundert jahrhunderts
    klasse stock etage platz mal tag woche weltkrieg geburtstag
    """
)
SPEECH = words(
    """
    said asked replied cried shouted answered whispered thought told added exclaimed yelled
    """
)

OPENING, CLOSING = "\"'“‘„‚«»‹›([{¿¡—–-", "\"'”’“‘»«›‹)]}"
# A run of terminators, closing quotes or brackets, and the white space after them.
BOUNDARY = re.compile(
    rf"(?P<end>(?<![.!?…])[.!?…]++|[。！？])(?P<close>[{re.escape(CLOSING)}]*)(?:(?P<space>\s+)|(?<=[。！？])(?=\S))"
)
# Quotations and brackets, inside which a sentence is not split if they are not too long.
ENCLOSED = re.compile(r'"[^"\n]{1,200}"|“[^”\n]{1,200}”|„[^“”\n]{1,200}[“”]|«[^»\n]{1,200}»|\([^()\n]{1,200}\)')
EMOJI = "[\\u2190-\\u2bff\\U0001f000-\\U0001faff][\\u200d\\ufe0e\\ufe0f\\U0001f3fb-\\U0001f3ff]*"
LEADING_EMOJI, EMOJI_RUN = re.compile(rf"(?:\s*+{EMOJI})*+"), re.compile(rf"(?:{EMOJI}\s*+)++")
LINE_BREAK = re.compile(r"(?<!\s)\s*(?:\r\n|[\n\r\v\f\x85\u2028\u2029])\s*")
NEXT_WORDS = re.compile(rf"[{re.escape(OPENING)}]*(\S+)(?:\s+(\S+))?")
ORDINAL_OR_LIST = re.compile(r"\(?\d{1,2}")

# Places at which a sentence that is too long is cut, best first: before the end of each match.
CUTS = tuple(map(re.compile, (r"[;:—–…]['\")\]”’]*\s+", r",['\")\]”’]*\s+", r"[)\]”»]\s+", r"\s+")))
JOINED_CHARACTERS = re.compile(r"[\u0300-\u036f\u200d\ufe0e\ufe0f\U0001f3fb-\U0001f3ff]")

# URLs and e-mail addresses.
ADDRESS = re.compile(r"(?:https?://|www\.)\S+|(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+", re.IGNORECASE)


@dataclass(frozen=True)
class Segment:
    """`text[start:end]`, without white space around it."""

    start: int
    end: int


def split_sentences(text: str) -> list[Segment]:
    """The sentences of a text; a line break always ends one.

    >>> text = 'Mr. Smith left at 7.45 p.m. from platform 3. "Really?" she asked.'
    >>> [text[one.start : one.end] for one in split_sentences(text)]
    ['Mr. Smith left at 7.45 p.m. from platform 3.', '"Really?" she asked.']
    """
    cased = any(character.isupper() for character in text)
    segments, first = [], 0
    for gap in (*LINE_BREAK.finditer(text), None):
        last = len(text) if gap is None else gap.start()
        segments += split_line(text, first, last, cased)
        first = last if gap is None else gap.end()
    return segments


def split_line(text: str, first: int, last: int, cased: bool) -> Iterator[Segment]:
    """The sentences of `text[first:last]`.

    Args:
        cased: whether the text has upper-case letters; else a sentence may start in lower case.
    """
    line = text[first:last]
    enclosed = iter([match.span() for match in ENCLOSED.finditer(line)])
    left, right = next(enclosed, (len(line), len(line)))
    start = 0
    for match in BOUNDARY.finditer(line):
        while right <= match.end("close") and right < len(line):
            left, right = next(enclosed, (len(line), len(line)))
        inside = left < match.start() and match.end("close") < right
        if not inside and ends_sentence(line[start : match.start()], match, line, cased):
            yield from without_emoji(text, first + start, first + match.end("close"))
            start = match.end()
    yield from without_emoji(text, first + start, last)


def without_emoji(text: str, start: int, end: int) -> Iterator[Segment]:
    """A sentence, and the emoji before and after it as segments of their own, which need no translation."""
    leading = LEADING_EMOJI.match(text, start, end)
    assert leading is not None  # it matches the empty text
    runs = [run.span() for run in EMOJI_RUN.finditer(text, leading.end(), end)]
    after = runs[-1][0] if runs and runs[-1][1] == end else end
    for first, last in ((start, leading.end()), (leading.end(), after), (after, end)):
        yield from stripped(text, first, last)


def stripped(text: str, start: int, end: int) -> Iterator[Segment]:
    """The segment without white space around it, unless nothing is left."""
    part = text[start:end]
    if part.strip():
        yield Segment(start + len(part) - len(part.lstrip()), end - len(part) + len(part.rstrip()))


def ends_sentence(before: str, match: re.Match, line: str, cased: bool) -> bool:
    """Whether a terminator in a line ends the sentence that begins with the text before it."""
    if match["end"] in "。！？" and not match["close"]:
        return True
    following = NEXT_WORDS.match(line, match.end())
    if following is None:
        return True
    word, second = following[1].strip(",.;:!?…" + CLOSING), (following[2] or "").strip(",.;:!?…" + CLOSING)
    starter = word.replace("’", "'").casefold() in STARTERS
    if match["end"] != "." and match["close"]:
        return not (word[:1].islower() and cased) and second.casefold() not in SPEECH
    if match["end"] in ("...", "…", "…."):
        return not (word[:1].islower() or word.split("'")[0].split("’")[0] == "I")
    if match["end"] != ".":
        return True
    if word[:1].islower() and cased:
        return False
    ends_with_word = before and not before[-1].isspace()
    last = before.rsplit(maxsplit=1)[-1].lstrip(OPENING) if ends_with_word else ""
    plain = last.casefold()
    if plain in BEFORE_NUMBERS and word[:1].isdigit():
        return False
    if plain in TITLES:
        return False
    if ORDINAL_OR_LIST.fullmatch(last):
        return word.casefold() not in AFTER_ORDINALS and last != before.strip()
    initial = len(last) == 1 and last.isalpha()
    initials = bool(re.fullmatch(r"(?:\w\.)+\w", last))
    return starter if initial or initials or plain in MAY_END else True


def split_long(text: str, segment: Segment, fits: Callable[[str], bool]) -> list[Segment]:
    """Parts of a segment that fit, cut at clauses, else between words, else within a word.

    Args:
        fits: whether a text is short enough for the model.

    >>> text = "When it rains, we stay at home; when it does not, we go out."
    >>> [text[one.start : one.end] for one in split_long(text, Segment(0, len(text)), lambda part: len(part) < 40)]
    ['When it rains, we stay at home;', 'when it does not, we go out.']
    """
    part = text[segment.start : segment.end]
    if fits(part) or len(part) < 2:
        return [segment]
    cut = best_cut(part)
    halves = [*stripped(text, segment.start, segment.start + cut), *stripped(text, segment.start + cut, segment.end)]
    return [piece for half in halves for piece in split_long(text, half, fits)]


def best_cut(part: str) -> int:
    """The place nearest the middle of the best kind that is in the middle three fifths."""
    middle = len(part) / 2
    for kind in CUTS:
        places = [match.end() for match in kind.finditer(part)]
        nearest = min(places, key=lambda place: abs(place - middle), default=0)
        if abs(nearest - middle) <= 0.3 * len(part):
            return nearest
    half = max(1, round(middle))
    latest = round(0.8 * len(part))
    cuts = (cut for cut in range(half, latest) if not JOINED_CHARACTERS.match(part[cut]) and part[cut - 1] != "\u200d")
    return next(cuts, half)  # not within an emoji or before an accent, unless there is nothing else


def is_copied(segment: str) -> bool:
    """Whether there is nothing to translate: no letters outside URLs and addresses, as in numbers, emoji and URLs."""
    return not any(character.isalpha() for character in ADDRESS.sub(" ", segment))

"""Number augmentation: copies of sentence pairs with other numbers, so that a model learns to copy digits.

Only pairs whose two sides have the same runs of digits are copied: "at 7:45" and "um 7.45 Uhr", but not "at 2:30" and
"um halb drei". A run is replaced by another of the same kind: hours, minutes, days of a month, years, groups of
thousands, and other numbers of as many digits. English ordinals get the ending of the new number.
"""

import random
import re

from .parallel_text import Pair

RUN = re.compile(r"\d+")
ORDINAL = re.compile(r"(\d+)(st|nd|rd|th)\b")
MONTH = r"(?:January|February|March|April|May|June|July|August|September|October|November|December)"
DAY = re.compile(rf"{MONTH} (\d{{1,2}})(?:st|nd|rd|th)?\b(?!:)|\b(\d{{1,2}})(?:st|nd|rd|th)?(?: of)? {MONTH}")
CLOCK = re.compile(r"\b(\d{1,2}):(\d\d)\b")
YEAR = re.compile(r"(?<![\d.,:$€£])(1[5-9]\d\d|20\d\d)(?![\d.,:]\d|%)")


def ordinal_ending(number: int) -> str:
    """The English ending of an ordinal.

    >>> [f"{number}{ordinal_ending(number)}" for number in (1, 12, 22, 103)]
    ['1st', '12th', '22nd', '103rd']
    """
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def range_of(run: re.Match[str], text: str) -> range:
    """The numbers that may replace a run of digits of an English text; an empty range if none may.

    Args:
        run: a match of `RUN` in the text.
        text: the source.
    """
    start, digits = run.start(), run.group()
    for clock in CLOCK.finditer(text):
        if start == clock.start(1):
            return range(1, 13)
        if start == clock.start(2):
            return range(0, 60)
    for day in DAY.finditer(text):
        if start in (day.start(1), day.start(2)):
            return range(1, 32)
    for year in YEAR.finditer(text):
        if start == year.start():
            return range(1700, 2050)
    if digits.startswith("0") or text[start - 1 : start] in (",", "."):  # a group of thousands, or decimals
        return range(10 ** len(digits))
    if int(digits) < 2:  # one apple, but two apples
        return range(0)
    return range(2, 100) if len(digits) < 3 else range(10 ** (len(digits) - 1), 10 ** len(digits))


def replace_numbers(pair: Pair, generator: random.Random) -> Pair | None:
    """The pair with other numbers; None if its sides have different ones, or none that may be replaced.

    Args:
        pair: only its first reference is used.
        generator: of the random choices.

    >>> pair = Pair("The train leaves at 7:45.", ["Der Zug fährt um 7.45 Uhr."])
    >>> replace_numbers(pair, random.Random(1)).references
    ['Der Zug fährt um 3.36 Uhr.']
    """
    source, target = pair.source, pair.references[0]
    if not RUN.search(source) or sorted(RUN.findall(source)) != sorted(RUN.findall(target)):
        return None
    replacements: dict[str, str] = {}
    for run in RUN.finditer(source):
        digits, allowed = run.group(), range_of(run, source)
        if not allowed:
            return None
        number = generator.choice(allowed)
        padded = digits.startswith("0") or text_before(source, run) in ":,."
        replacements.setdefault(digits, f"{number:0{len(digits)}d}" if padded else str(number))
    if len(set(replacements.values())) < len(replacements):
        return None
    source, target = (RUN.sub(lambda run: replacements[run.group()], text) for text in (source, target))
    source = ORDINAL.sub(lambda found: f"{found.group(1)}{ordinal_ending(int(found.group(1)))}", source)
    return Pair(source, [target])


def text_before(text: str, run: re.Match[str]) -> str:
    """The character before a run of digits; a space at the start of the text."""
    return text[run.start() - 1] if run.start() else " "


def vary_numbers(pairs: list[Pair], copies: int, seed: int) -> list[Pair]:
    """The pairs, followed by `copies` copies of every pair with replaceable numbers, each with other numbers.

    Args:
        pairs: the corpus.
        copies: of every such pair.
        seed: of the random choices.
    """
    generator = random.Random(seed)
    varied = [replace_numbers(pair, generator) for pair in pairs for _ in range(copies)]
    return [*pairs, *(pair for pair in varied if pair is not None)]

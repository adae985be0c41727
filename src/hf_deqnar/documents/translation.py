"""Translating a document sentence by sentence, with its placeholders, markup and glossary terms.

`translate_parts` is a generator of rounds: it yields all texts that can be translated together and is sent their
translations. So one implementation serves the command line and the server, which batches the texts of its requests.
`translate_alternatives` gives several translations of a document.
"""

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from functools import cache

from .glossary import NO_GLOSSARY, Glossary
from .marks import MARK, Document, Mark, MarkedText, split_at_marks
from .sentences import shorten, split


@dataclass(frozen=True)
class Request:
    """A text to translate.

    Attributes:
        text: without markup.
        required: texts that its translation must contain, as often as they are listed.
        alternatives: number of further translations that are wanted.
        auxiliary: whether its translation is only searched in that of a sentence; it needs no alternatives.
    """

    text: str
    required: tuple[str, ...] = ()
    alternatives: int = 0
    auxiliary: bool = False


Fits = Callable[[str], bool]
Rounds = Generator[list[Request], list[str], str]
RoundsOfSeveral = Generator[list[Request], list[list[str]], list[str]]


def translate_document(
    document: Document,
    translate: Callable[[list[Request]], list[str]],
    glossary: Glossary = NO_GLOSSARY,
    fits: Fits = lambda text: True,
) -> str:
    """The document with its text translated.

    Args:
        translate: requests → translations; a required text that is missing is handled here.
        fits: whether a text is short enough for the model.
    """
    rounds = translate_parts(document, glossary, fits)
    try:
        requests = next(rounds)
        while True:
            requests = rounds.send(translate(requests))
    except StopIteration as finished:
        return finished.value


def translate_parts(document: Document, glossary: Glossary = NO_GLOSSARY, fits: Fits = lambda text: True) -> Rounds:
    """Rounds of requests; returns the translated document."""
    kept = {index: part for index, part in enumerate(document) if isinstance(part, str)}
    paragraphs = [part for part in document if isinstance(part, MarkedText)]
    texts = yield from together(translate_paragraph(part, glossary, fits) for part in paragraphs)
    translated = iter(part.write(text) for part, text in zip(paragraphs, texts, strict=True))
    return "".join(kept[index] if index in kept else next(translated) for index in range(len(document)))


def translate_alternatives(
    document: Document, alternatives: int, glossary: Glossary = NO_GLOSSARY, fits: Fits = lambda text: True
) -> RoundsOfSeveral:
    """Rounds of requests, each of which is sent its translations, the best first; returns those of the document.

    The n-th translation of a document consists of the n-th translations of its sentences, or of the last of a sentence
    with fewer. Equal ones are returned once, so there may be fewer than wanted.
    """
    known: dict[Request, list[str]] = {}
    fits = cache(fits)
    found: dict[str, None] = {}  # in order
    for rank in range(alternatives + 1):
        rounds = translate_parts(document, glossary, fits)
        try:
            requests = next(rounds)
            while True:
                unknown = [request for request in requests if request not in known]
                if unknown:
                    wanted = [one if one.auxiliary else replace(one, alternatives=alternatives) for one in unknown]
                    answers = yield wanted
                    for request, texts in zip(unknown, answers, strict=True):
                        known[request] = with_required(texts, request.required)
                requests = rounds.send([at_rank(known[request], rank) for request in requests])
        except StopIteration as finished:
            found[finished.value] = None
    return list(found)


def at_rank(texts: list[str], rank: int) -> str:
    """The text of this rank, or the last one."""
    return texts[min(rank, len(texts) - 1)]


def with_required(texts: list[str], required: tuple[str, ...]) -> list[str]:
    """The best text, and those of the others that contain what is required."""
    return [*texts[:1], *(text for text in texts[1:] if has_required(text, required))]


def has_required(text: str, required: tuple[str, ...]) -> bool:
    """Whether a text contains the required ones as often as they are listed."""
    return all(len(re.findall(word_pattern(one), text)) >= required.count(one) for one in required)


def together(all_rounds: Iterable[Rounds]) -> Generator[list[Request], list[str], list[str]]:
    """Advance several generators of rounds at once, so that their requests share batches; returns their results."""
    running = dict(enumerate(all_rounds))
    results: dict[int, str] = {}
    answers: dict[int, list[str] | None] = dict.fromkeys(running)
    while running:
        requests: dict[int, list[Request]] = {}
        for index, rounds in list(running.items()):
            try:
                requests[index] = rounds.send(answers[index])  # type: ignore[arg-type]  # None starts a generator
            except StopIteration as finished:
                results[index] = finished.value
                del running[index]
        if requests:
            translations = iter((yield [request for batch in requests.values() for request in batch]))
            answers = {index: [next(translations) for _ in batch] for index, batch in requests.items()}
    return [results[index] for index in sorted(results)]


def translate_paragraph(paragraph: MarkedText, glossary: Glossary, fits: Fits) -> Rounds:
    """The translation of marked text, with marks. The white space between sentences is kept."""
    sentences = sentences_of(paragraph, fits)
    texts = yield from together(translate_sentence(text, paragraph.marks, glossary) for text, _ in sentences)
    return "".join(text + space for text, (_, space) in zip(texts, sentences, strict=True))


def sentences_of(paragraph: MarkedText, fits: Fits) -> list[tuple[str, str]]:
    """The sentences of marked text, or their parts if they do not fit, each with the white space that follows it."""
    return [part for sentence, space in split(paragraph.text) for part in with_space(shorten(sentence, fits), space)]


def with_space(parts: list[tuple[str, str]], space: str) -> list[tuple[str, str]]:
    """The parts of a sentence, the last one followed by the space after the sentence."""
    return [*parts[:-1], (parts[-1][0], parts[-1][1] + space)]


def translate_sentence(text: str, marks: dict[str, Mark], glossary: Glossary) -> Rounds:
    """The translation of a sentence with marks.

    The sentence is translated as a whole, without markup. Placeholders are replaced by numbers, which the translation
    must contain; the target of a glossary term must be in it too (`with_terms`). Text inside tags is also translated
    alone, and the tags are placed around it where it occurs once in the translation. If anything is missing, the
    sentence is divided at its marks and terms, and the texts between are translated separately.
    """
    before, text, after = outer_marks(text, marks)
    if not any(character.isalpha() for character in MARK.sub("", text)):
        return before + text + after
    spans = inner_spans(text, marks)
    if spans is not None:
        stand_ins = choose_stand_ins(text, marks)
        wholes = [without_markup(part, marks) for part in (text, *(text[first:last] for first, last in spans))]
        whole, *inside = (prepare(part, stand_ins, glossary) for part in wholes)
        requests = [whole, *(replace(part, auxiliary=True) for part in inside)]
        places = glossary.occurrences(wholes[0])
        alone = [wholes[0][first:last] for first, last, _ in places]
        terms = [replace(prepare(part, stand_ins, NO_GLOSSARY), auxiliary=True) for part in alone]
        free = [prepare(wholes[0], stand_ins, NO_GLOSSARY), *terms] if places else []
        answers = yield [*requests, *free]
        if places:
            targets = [target for _, _, target in places]
            freely, *words = answers[len(requests) :]
            answers = [with_terms(answers[0], freely, words, targets), *answers[1 : len(requests)]]
        answers = [punctuated_like(whole, answer) for whole, answer in zip(wholes, answers, strict=True)]
        found = assemble(answers, requests, stand_ins, [(text[first - 1], text[last]) for first, last in spans])
        if found is not None:
            return before + found + after
    pieces = divide(text, glossary)
    requests = [Request(piece.strip()) for piece, fixed in pieces if not fixed]
    found_pieces = iter((yield requests) if requests else [])
    parts = [piece if fixed else spaced_like(piece, next(found_pieces)) for piece, fixed in pieces]
    return before + "".join(parts) + after


def outer_marks(text: str, marks: dict[str, Mark]) -> tuple[str, str, str]:
    """White space and markup before and after the text; a tag whose partner stays inside stays too."""
    first, last = 0, len(text)

    def is_outside(character: str) -> bool:
        return character.isspace() or (character in marks and marks[character].kind != "placeholder")

    while first < last and is_outside(text[first]):
        first += 1
    while last > first and is_outside(text[last - 1]):
        last -= 1

    while first > 0 and any(partner_within(character, marks, text[first:last]) for character in text[:first]):
        first -= 1
    while last < len(text) and any(partner_within(character, marks, text[first:last]) for character in text[last:]):
        last += 1
    return text[:first], text[first:last], text[last:]


def partner_within(character: str, marks: dict[str, Mark], text: str) -> bool:
    partner = marks[character].partner if character in marks else None
    return partner is not None and partner in text


def inner_spans(text: str, marks: dict[str, Mark]) -> list[tuple[int, int]] | None:
    """Where the texts inside tags begin and end; None if tags are nested, empty or without partner."""
    spans, start = [], None
    for index, character in enumerate(text):
        mark = marks.get(character)
        if mark is None or mark.kind == "placeholder":
            continue
        if mark.kind == "opening" and start is None and mark.partner is not None:
            start = index + 1
        elif mark.kind == "closing" and start is not None and mark.partner == text[start - 1]:
            if not text[start:index].strip():
                return None
            spans.append((start, index))
            start = None
        else:
            return None
    return spans if start is None else None


def without_markup(text: str, marks: dict[str, Mark]) -> str:
    """The text with placeholders but without tags."""
    tags = {character for character in text if character in marks and marks[character].kind != "placeholder"}
    return "".join(character for character in text if character not in tags)


def choose_stand_ins(text: str, marks: dict[str, Mark]) -> dict[str, str]:
    """Placeholder → a number that does not occur in the sentence. Numbers are what models copy most reliably."""
    placeholders = [character for character in text if character in marks and marks[character].kind == "placeholder"]
    numbers = (str(number) for number in range(17, 100) if number % 10 and not re.search(str(number), text))
    return dict(zip(placeholders, numbers, strict=False))


def with_terms(forced: str, free: str, alone: list[str], targets: list[str]) -> str:
    """The translation of a sentence with its terms.

    A free translation in which the terms occur, or the translations of the terms alone, is preferred, because a forced
    term may stand beside the word that it replaces: where that word occurs once, it is replaced.

    Args:
        forced: translation with required terms.
        free: translation without.
        alone: translation of each source term alone.
        targets: required translation of each.

    >>> with_terms("Wo ist der Bahnhof Hauptbahnhof?", "Wo ist der Bahnhof?", ["Bahnhof."], ["Hauptbahnhof"])
    'Wo ist der Hauptbahnhof?'
    """
    text = free
    for word, target in zip(alone, targets, strict=True):
        if len(re.findall(word_pattern(target), text)) >= targets.count(target):
            continue
        word = word.strip().rstrip(".!?;,:")
        places = list(re.finditer(word_pattern(word), text, re.IGNORECASE)) if word else []
        if len(places) != 1 or target.lower() in word.lower():
            return forced
        text = text[: places[0].start()] + target + text[places[0].end() :]
    return text


def prepare(text: str, stand_ins: dict[str, str], glossary: Glossary) -> Request:
    """The request of a text: numbers in place of placeholders, and the texts that its translation must contain."""
    terms = [target for _, _, target in glossary.occurrences(text)]
    numbers = [stand_ins[character] for character in text if character in stand_ins]
    for character, number in stand_ins.items():
        text = text.replace(character, number)
    return Request(" ".join(text.split()), (*numbers, *terms))


def assemble(
    answers: list[str], requests: list[Request], stand_ins: dict[str, str], tags: list[tuple[str, str]]
) -> str | None:
    """The translation with its tags and placeholders; None if anything is missing or occurs more than once."""
    whole, *parts = answers
    if any(MARK.search(answer) for answer in answers) or any(MARK.search(request.text) for request in requests):
        return None  # more placeholders than numbers, or a model that writes private-use characters
    counts = {text: requests[0].required.count(text) for text in requests[0].required}
    for text, count in counts.items():
        found = len(re.findall(word_pattern(text), whole))
        if found < count or (text in stand_ins.values() and found > count):
            return None
    for part, (opening, closing) in zip(parts, tags, strict=True):
        part = part.strip().rstrip(".!?;,:")
        places = list(re.finditer(word_pattern(part), whole, re.IGNORECASE)) if part else []
        if len(places) != 1 or MARK.search(places[0][0]):
            return None
        first, last = places[0].span()
        whole = f"{whole[:first]}{opening}{whole[first:last]}{closing}{whole[last:]}"
    return with_placeholders(whole, stand_ins)


def with_placeholders(text: str, stand_ins: dict[str, str]) -> str:
    """A translation with placeholders in place of the numbers that stood for them."""
    for character, number in stand_ins.items():
        text = re.sub(word_pattern(number), character, text)
    return text


def word_pattern(text: str) -> str:
    """A pattern of a text that is not part of a longer word."""
    return rf"(?<!\w){re.escape(text)}(?!\w)"


def divide(text: str, glossary: Glossary) -> list[tuple[str, bool]]:
    """Pieces of a sentence, and whether they are final: marks, targets of terms, and text without words."""
    pieces: list[tuple[str, bool]] = []
    for part in split_at_marks(text):
        start = 0
        for first, last, target in [] if MARK.fullmatch(part) else glossary.occurrences(part):
            pieces += [(part[start:first], False), (target, True)]
            start = last
        pieces.append((part[start:], bool(MARK.fullmatch(part))))
    return [part for piece, fixed in pieces if piece for part in ([(piece, True)] if fixed else words_of(piece))]


def words_of(piece: str) -> list[tuple[str, bool]]:
    """A piece without the punctuation that it begins with, which is final; all of it if it has no words."""
    start = next((index for index, character in enumerate(piece) if character.isalnum()), len(piece))
    if not any(character.isalpha() for character in piece):
        return [(piece, True)]
    return [*([(piece[:start], True)] if start else []), (piece[start:], False)]


def spaced_like(piece: str, translation: str) -> str:
    """A translation with the white space before and after its source, and a full stop only if the source has one."""
    before = piece[: len(piece) - len(piece.lstrip())]
    after = piece[len(piece.rstrip()) :]
    return f"{before}{punctuated_like(piece, translation).strip()}{after}"


def punctuated_like(source: str, translation: str) -> str:
    """A translation without the full stop that models add to phrases and headings.

    >>> punctuated_like("My house", "Mein Haus."), punctuated_like("It is late.", "Es ist spät.")
    ('Mein Haus', 'Es ist spät.')
    """
    return translation.rstrip().removesuffix(".") if source.rstrip()[-1:].isalnum() else translation

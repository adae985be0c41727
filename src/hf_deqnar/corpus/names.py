"""Names in other places: a corpus that speaks of Tom in Boston teaches little about Anna in Berlin.

A name is a word that is left unchanged more often than it is translated, with a capital where no sentence begins, and
never without one. It may stand wherever another name was seen behind the same words: behind "in" and its translation
"in" stand cities, at the beginning of both sentences mostly people. Sense is not looked at: who reads "Afghanistan has
gone home." learns that names stay as they are.
"""

import random
import re
from collections import Counter, defaultdict

from .places import Choice, Place, exchanged, vary
from .reading import Pair

WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
START = ""  # what stands before the first word
SHORTEST = 3  # letters; with fewer, abbreviations are found

Neighbours = tuple[str, str]  # the words before a name, in the source and in the target


def shared_words(pair: Pair) -> list[Place]:
    """Words with a capital that stand once on either side of a pair, in the order of the source."""
    sides = [list(WORD.finditer(text)) for text in (pair.source, pair.references[0])]
    found: list[dict[str, list[int]]] = []
    for words in sides:
        by_word: dict[str, list[int]] = defaultdict(list)
        for index, word in enumerate(words):
            by_word[word.group()].append(index)
        found.append(by_word)
    places = []
    for word, indices in found[0].items():
        if word[0].isupper() and len(word) >= SHORTEST and len(indices) == 1 and len(found[1].get(word, ())) == 1:
            both = (indices[0], found[1][word][0])
            before = tuple(
                words[index - 1].group().lower() if index else START for words, index in zip(sides, both, strict=True)
            )
            spans = tuple(words[index].span() for words, index in zip(sides, both, strict=True))
            places.append(Place((word, word), before, spans))
    return places


def find_names(pairs: list[Pair]) -> dict[Neighbours, list[str]]:
    """All names of a corpus, sorted, by the neighbours that they were seen with."""
    written = Counter(word for pair in pairs for word in set(WORD.findall(pair.source)))
    kept: Counter[str] = Counter()
    inside: set[str] = set()
    seen: dict[Neighbours, set[str]] = defaultdict(set)
    for pair in pairs:
        for place in shared_words(pair):
            name = place.words[0]
            kept[name] += 1
            seen[place.neighbours].add(name)
            if START not in place.neighbours:
                inside.add(name)
    names = {word for word in inside if 2 * kept[word] > written[word] and word.lower() not in written}
    return {neighbours: sorted(words & names) for neighbours, words in seen.items()}


def exchangeable(pair: Pair, names: dict[Neighbours, list[str]]) -> list[Choice]:
    """Where names stand in a pair, and which others might stand there."""
    found, there = [], set(WORD.findall(pair.source))
    for place in shared_words(pair):
        known = names.get(place.neighbours, [])
        others = [(name, name) for name in known if name not in there] if place.words[0] in known else []
        if others:
            found.append((place, others))
    return found


def vary_names(pairs: list[Pair], share: float, seed: int) -> list[Pair]:
    """The pairs, but for a share of those with names, in which one of them is another.

    >>> pairs = [Pair(f"He lives in {city}.", [f"Er lebt in {city}."]) for city in ("Boston", "Berlin")]
    >>> [pair.references for pair in vary_names(pairs, share=1.0, seed=1)]
    [['Er lebt in Berlin.'], ['Er lebt in Boston.']]
    """
    names = find_names(pairs)
    return vary(pairs, lambda pair: exchangeable(pair, names), share, seed)


def with_other_names(pairs: list[Pair], corpus: list[Pair], seed: int) -> tuple[list[Pair], list[str]]:
    """Those of the pairs that have a name of a corpus, each with another of its names instead, and these."""
    names, generator, found = find_names(corpus), random.Random(seed), []
    for pair in pairs:
        for place, others in exchangeable(pair, names)[:1]:
            words = generator.choice(others)
            found.append((exchanged(pair, place, words), words[1]))
    return [pair for pair, _ in found], [name for _, name in found]


def share_kept(texts: list[str], names: list[str]) -> float:
    """How many of the texts have the name that belongs to them."""
    return sum(name in WORD.findall(text) for text, name in zip(texts, names, strict=True)) / len(names)

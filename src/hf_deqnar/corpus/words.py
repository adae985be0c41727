"""Words in other places: who reads of ten years in London learns to speak of three years in Berlin.

Two words are counterparts if each is the other's best companion, and mostly its company: brother and Bruder, three and
drei. They may stand wherever other counterparts were seen between the same words, before and behind, on both sides:
"My brother has" and "Mein Bruder lebt" may speak of a father instead. Who stands between the same words mostly has the
same gender, number and case. First words stay, because what a sentence begins with decides what kind of sentence it is.
Sense is not looked at, and sometimes lost.
"""

import re
from collections import Counter, defaultdict

import numpy
from scipy.sparse import csr_matrix

from .places import Choice, Place, Words, vary
from .reading import Pair

WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
EDGE = ""  # what stands before the first word and behind the last
RAREST = 5  # pairs that a word stands in; fewer say little about its counterpart
COMMONEST = 0.02  # share of the pairs that a word stands in; it, he, is and and hold sentences together
COMPANY = 0.5  # share of the pairs of a word that its counterpart stands in, for both


def find_counterparts(pairs: list[Pair]) -> dict[str, str]:
    """The words of the source that have a counterpart which is another word, and what it is.

    How well s and t go together is 2·n(s, t) / (n(s) + n(t)) (Dice), where n counts pairs.
    """
    source_words, source = _incidence([pair.source for pair in pairs])
    target_words, target = _incidence([pair.references[0] for pair in pairs])
    together = (source.T @ target).tocoo()
    n_source, n_target = (
        numpy.asarray(side.sum(axis=0)).ravel()[index]
        for side, index in ((source, together.row), (target, together.col))
    )
    both = together.data
    dice = 2 * both / (n_source + n_target)
    # Names keep their spelling. They come first among equals: Los goes with Los, not with Angeles.
    links = zip(together.row, together.col, strict=True)
    same = numpy.array([source_words[s] == target_words[t] for s, t in links], dtype=bool)
    score = dice + 1e-9 * same
    best_of_source, best_of_target = numpy.zeros(len(source_words)), numpy.zeros(len(target_words))
    numpy.maximum.at(best_of_source, together.row, score)
    numpy.maximum.at(best_of_target, together.col, score)
    mutual = (score == best_of_source[together.row]) & (score == best_of_target[together.col])
    fewest, most = numpy.minimum(n_source, n_target), numpy.maximum(n_source, n_target)
    close = (both >= COMPANY * most) & (fewest >= RAREST) & (most <= max(RAREST, COMMONEST * len(pairs)))
    chosen = numpy.flatnonzero(mutual & close & ~same)
    return {source_words[together.row[link]]: target_words[together.col[link]] for link in chosen}


def _incidence(texts: list[str]) -> tuple[list[str], csr_matrix]:
    """The words of some texts, and a matrix of texts × words with a 1 where a word stands in a text."""
    index: dict[str, int] = {}
    starts, columns = [0], []
    for text in texts:
        # In their order, which a set would leave to chance: where counterparts tie, the last one counts.
        columns.extend(index.setdefault(word, len(index)) for word in dict.fromkeys(WORD.findall(text)))
        starts.append(len(columns))
    ones = numpy.ones(len(columns), dtype=numpy.int32)
    return list(index), csr_matrix((ones, columns, starts), shape=(len(texts), len(index)))


def translated_words(pair: Pair, counterparts: dict[str, str]) -> list[Place]:
    """Words that stand once in a pair, as their counterparts do, in the order of the source; not the first ones."""
    sides = [list(WORD.finditer(text)) for text in (pair.source, pair.references[0])]
    texts = [[word.group() for word in words] for words in sides]
    often = [Counter(words) for words in texts]
    places = []
    for index, word in enumerate(texts[0]):
        counterpart = counterparts.get(word)
        if counterpart is not None and often[0][word] == 1 and often[1][counterpart] == 1:
            both = (index, texts[1].index(counterpart))
            if 0 in both:
                continue
            around = [(EDGE, *words, EDGE) for words in texts]
            neighbours = tuple(
                words[at + step].lower() for words, at in zip(around, both, strict=True) for step in (0, 2)
            )
            spans = tuple(words[at].span() for words, at in zip(sides, both, strict=True))
            places.append(Place((word, counterpart), neighbours, spans))
    return places


def vary_words(pairs: list[Pair], share: float, seed: int) -> list[Pair]:
    """The pairs, but for a share of those with words that might be others, in which one of them is another."""
    counterparts = find_counterparts(pairs)
    seen: dict[tuple[str, ...], set[Words]] = defaultdict(set)
    for pair in pairs:
        for place in translated_words(pair, counterparts):
            seen[place.neighbours].add(place.words)
    known = {neighbours: sorted(words) for neighbours, words in seen.items() if len(words) > 1}

    def choices(pair: Pair) -> list[Choice]:
        there, found = set(WORD.findall(pair.source)), []
        for place in translated_words(pair, counterparts):
            others = [words for words in known.get(place.neighbours, []) if words[0] not in there]
            if others:
                found.append((place, others))
        return found

    return vary(pairs, choices, share, seed)

"""Word augmentation: replaces words together with their translations in sentence pairs.

Two words are counterparts if each is the other's best match by the Dice coefficient and they occur together in at least
half of the pairs of each: brother and Bruder, three and drei. A pair of counterparts may be replaced by any other that
occurs in the corpus between the same words, before and after, in the source and in the target. These mostly agree in
gender, number and case. First words are not replaced, because they determine the type of the sentence. The meaning of
the sentence is not considered.
"""

import re
from collections import Counter, defaultdict

import numpy
from scipy.sparse import csr_matrix

from .augmentation import Choice, Occurrence, WordPair, vary_pairs
from .parallel_text import Pair

WORD = re.compile(r"[^\W_]+(?:-[^\W_]+)*")
EDGE = ""  # neighbour of the first word and of the last
MIN_PAIRS = 5  # number of pairs in which a word must occur; fewer say little about its counterpart
MAX_SHARE = 0.02  # largest share of the pairs in which a word may occur; excludes function words
MIN_OVERLAP = 0.5  # share of the pairs of a word in which its counterpart must occur, for both


def find_counterparts(pairs: list[Pair]) -> dict[str, str]:
    """Counterparts of source words, except those that are spelled the same in both languages.

    The association of s and t is the Dice coefficient 2·n(s, t) / (n(s) + n(t)), where n counts sentence pairs.
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
    # Of equal scores, that of identical words wins: in "Los Angeles", Los is the counterpart of Los, not of Angeles.
    links = zip(together.row, together.col, strict=True)
    same = numpy.array([source_words[s] == target_words[t] for s, t in links], dtype=bool)
    score = dice + 1e-9 * same
    best_of_source, best_of_target = numpy.zeros(len(source_words)), numpy.zeros(len(target_words))
    numpy.maximum.at(best_of_source, together.row, score)
    numpy.maximum.at(best_of_target, together.col, score)
    mutual = (score == best_of_source[together.row]) & (score == best_of_target[together.col])
    fewest, most = numpy.minimum(n_source, n_target), numpy.maximum(n_source, n_target)
    frequent = (fewest >= MIN_PAIRS) & (most <= max(MIN_PAIRS, MAX_SHARE * len(pairs)))
    chosen = numpy.flatnonzero(mutual & frequent & (both >= MIN_OVERLAP * most) & ~same)
    return {source_words[together.row[link]]: target_words[together.col[link]] for link in chosen}


def _incidence(texts: list[str]) -> tuple[list[str], csr_matrix]:
    """The words of some texts, and a matrix of texts × words with a 1 where a text contains a word."""
    index: dict[str, int] = {}
    starts: list[int] = [0]
    columns: list[int] = []
    for text in texts:
        # A dict retains the order, so that ties between counterparts are broken the same way in every process.
        columns.extend(index.setdefault(word, len(index)) for word in dict.fromkeys(WORD.findall(text)))
        starts.append(len(columns))
    ones = numpy.ones(len(columns), dtype=numpy.int32)
    return list(index), csr_matrix((ones, columns, starts), shape=(len(texts), len(index)))


def translated_words(pair: Pair, counterparts: dict[str, str]) -> list[Occurrence]:
    """Words that occur once in the source, with counterparts that occur once in the target; first words excluded.

    Args:
        pair: the sentence pair.
        counterparts: from `find_counterparts`.
    """
    sides = [list(WORD.finditer(text)) for text in (pair.source, pair.references[0])]
    texts = [[word.group() for word in words] for words in sides]
    counts = [Counter(words) for words in texts]
    occurrences = []
    for index, word in enumerate(texts[0]):
        counterpart = counterparts.get(word)
        if counterpart is not None and counts[0][word] == 1 and counts[1][counterpart] == 1:
            both = (index, texts[1].index(counterpart))
            if 0 in both:
                continue
            padded = [(EDGE, *words, EDGE) for words in texts]
            neighbours = tuple(
                words[position + step].lower() for words, position in zip(padded, both, strict=True) for step in (0, 2)
            )
            spans = (sides[0][both[0]].span(), sides[1][both[1]].span())
            occurrences.append(Occurrence((word, counterpart), neighbours, spans))
    return occurrences


def vary_words(pairs: list[Pair], share: float, seed: int) -> list[Pair]:
    """Replace one word and its counterpart in a random share of the pairs that have replaceable ones.

    Args:
        pairs: the corpus, which is also where the counterparts come from.
        share, seed: as for `vary_pairs`.
    """
    counterparts = find_counterparts(pairs)
    by_neighbours: dict[tuple[str, ...], set[WordPair]] = defaultdict(set)
    for pair in pairs:
        for occurrence in translated_words(pair, counterparts):
            by_neighbours[occurrence.neighbours].add(occurrence.words)
    known = {neighbours: sorted(words) for neighbours, words in by_neighbours.items() if len(words) > 1}

    def choices(pair: Pair) -> list[Choice]:
        found, present = [], set(WORD.findall(pair.source))
        for occurrence in translated_words(pair, counterparts):
            others = [words for words in known.get(occurrence.neighbours, []) if words[0] not in present]
            if others:
                found.append((occurrence, others))
        return found

    return vary_pairs(pairs, choices, share, seed)

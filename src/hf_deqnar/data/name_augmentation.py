"""Name augmentation: replaces names in sentence pairs, so that a model learns to copy names that are rare in a corpus.

A name is a capitalised word that the corpus copies to the target more often than it translates it, that occurs inside a
sentence, and that never occurs in lower case. A name may be replaced by any other that occurs in the corpus after the
same two words, one before it in the source and one in the target. This mostly replaces cities by cities and people by
people. A name of the list `names.tsv` may also be replaced by any other of its kind there (given names, surnames,
places), which brings names that the corpus does not have. The meaning of the sentence is not considered.
"""

import random
import re
from collections import Counter, defaultdict
from functools import cache
from importlib import resources

from .augmentation import Choice, Occurrence, WordPair, replace_words, vary_pairs
from .parallel_text import Pair

WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
START = ""  # neighbour of the first word
MIN_LETTERS = 3  # shorter capitalised words are mostly abbreviations

Neighbours = tuple[str, ...]  # the words before a name, in the source and in the target


@cache
def listed_names() -> dict[str, list[WordPair]]:
    """The names of `names.tsv`: for every English name, all names of its kind in English and German."""
    text = resources.files(__package__).joinpath("names.tsv").read_text(encoding="utf-8")
    kinds: dict[str, list[WordPair]] = defaultdict(list)
    for line in text.splitlines():
        if not line.startswith("#"):
            kind, english, german = line.split("\t")
            kinds[kind].append((english, german))
    return {english: names for names in kinds.values() for english, _ in names}


def copied_words(pair: Pair) -> list[Occurrence]:
    """Capitalised words that occur exactly once in the source and once in the target, in source order."""
    sides = [list(WORD.finditer(text)) for text in (pair.source, pair.references[0])]
    indices_by_word: list[dict[str, list[int]]] = []
    for words in sides:
        by_word: dict[str, list[int]] = defaultdict(list)
        for index, match in enumerate(words):
            by_word[match.group()].append(index)
        indices_by_word.append(by_word)
    in_source, in_target = indices_by_word
    occurrences = []
    for word, indices in in_source.items():
        if word[0].isupper() and len(word) >= MIN_LETTERS and len(indices) == 1 and len(in_target.get(word, ())) == 1:
            both = (indices[0], in_target[word][0])
            before = tuple(
                words[index - 1].group().lower() if index else START for words, index in zip(sides, both, strict=True)
            )
            spans = (sides[0][both[0]].span(), sides[1][both[1]].span())
            occurrences.append(Occurrence((word, word), before, spans))
    return occurrences


def find_names(pairs: list[Pair]) -> dict[Neighbours, list[str]]:
    """Sorted names of a corpus, by the neighbours that they occur with."""
    source_counts = Counter(word for pair in pairs for word in set(WORD.findall(pair.source)))
    copy_counts: Counter[str] = Counter()
    inside: set[str] = set()  # words that occur inside a sentence
    by_neighbours: dict[Neighbours, set[str]] = defaultdict(set)
    for pair in pairs:
        for occurrence in copied_words(pair):
            name = occurrence.words[0]
            copy_counts[name] += 1
            by_neighbours[occurrence.neighbours].add(name)
            if START not in occurrence.neighbours:
                inside.add(name)
    names = {
        word for word in inside if 2 * copy_counts[word] > source_counts[word] and word.lower() not in source_counts
    }
    return {neighbours: sorted(words & names) for neighbours, words in by_neighbours.items()}


def replaceable_names(
    pair: Pair, names: dict[Neighbours, list[str]], listed: dict[str, list[WordPair]] | None = None
) -> list[Choice]:
    """The names of a sentence pair, each with those that may replace it.

    Args:
        pair: the sentence pair.
        names: of a corpus, from `find_names`.
        listed: further names that may replace a name, from `listed_names`.
    """
    choices, present = [], set(WORD.findall(pair.source))
    for occurrence in copied_words(pair):
        name, known = occurrence.words[0], names.get(occurrence.neighbours, [])
        if name not in known:
            continue
        found = [(other, other) for other in known] + ([] if listed is None else listed.get(name, []))
        others = [words for words in found if words[0] not in present]
        if others:
            choices.append((occurrence, others))
    return choices


def vary_names(pairs: list[Pair], share: float, seed: int, *, list_share: float = 0.0) -> list[Pair]:
    """Replace one name in a random share of the pairs that have a replaceable one.

    Args:
        pairs: the corpus, which is also where the names come from.
        share, seed: as for `vary_pairs`.
        list_share: share of the pairs, chosen independently of the first, in which a name is replaced by one of the
            corpus or of `names.tsv`, which are English and German.

    >>> pairs = [Pair(f"He lives in {city}.", [f"Er lebt in {city}."]) for city in ("Boston", "Berlin")]
    >>> [pair.references for pair in vary_names(pairs, share=1.0, seed=1)]
    [['Er lebt in Berlin.'], ['Er lebt in Boston.']]
    """
    names = find_names(pairs)
    varied = vary_pairs(pairs, lambda pair: replaceable_names(pair, names), share, seed)
    if not list_share:
        return varied
    return vary_pairs(varied, lambda pair: replaceable_names(pair, names, listed_names()), list_share, seed + 1)


def replace_names(pairs: list[Pair], corpus: list[Pair], seed: int) -> tuple[list[Pair], list[str]]:
    """The pairs that have a replaceable name, with their first one replaced, and the new name of each.

    Args:
        pairs: of a test set.
        corpus: where the names come from.
        seed: of the random choices.
    """
    names, generator, replaced = find_names(corpus), random.Random(seed), []
    for pair in pairs:
        for occurrence, others in replaceable_names(pair, names)[:1]:
            words = generator.choice(others)
            replaced.append((replace_words(pair, occurrence, words), words[1]))
    return [pair for pair, _ in replaced], [name for _, name in replaced]


def share_copied(texts: list[str], names: list[str]) -> float:
    """Share of the texts that contain their name.

    Args:
        texts: translations.
        names: the name that each translation should contain.
    """
    return sum(name in WORD.findall(text) for text, name in zip(texts, names, strict=True)) / len(names)

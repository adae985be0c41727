"""Replacing aligned words on both sides of a sentence pair, to augment training data."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .parallel_text import Pair

WordPair = tuple[str, str]  # a source word and its translation
Span = tuple[int, int]


@dataclass
class Occurrence:
    """One occurrence of a word pair in a sentence pair."""

    words: WordPair
    neighbours: tuple[str, ...]  # the adjacent words, of the source and then of the target
    spans: tuple[Span, Span]  # characters in the source and in the target


Choice = tuple[Occurrence, list[WordPair]]  # an occurrence and the word pairs that may replace it


def replace_words(pair: Pair, occurrence: Occurrence, words: WordPair) -> Pair:
    """The sentence pair with other words at an occurrence; only the first reference is retained.

    Args:
        pair: the sentence pair.
        occurrence: what to replace.
        words: the replacement.
    """
    texts = (pair.source, pair.references[0])
    source, target = (
        f"{text[:start]}{word}{text[end:]}"
        for text, (start, end), word in zip(texts, occurrence.spans, words, strict=True)
    )
    return Pair(source, [target])


def vary_pairs(pairs: list[Pair], choices: Callable[[Pair], list[Choice]], share: float, seed: int) -> list[Pair]:
    """Replace one word pair in a random share of the sentence pairs that have a replaceable one.

    Args:
        pairs: all sentence pairs; the result has as many, in the same order.
        choices: gives the replaceable occurrences of a pair.
        share: probability from 0 to 1 that such a pair is changed.
        seed: of the random choices.
    """
    generator, varied = random.Random(seed), []
    for pair in pairs:
        options = choices(pair)
        if options and generator.random() < share:
            occurrence, replacements = generator.choice(options)
            pair = replace_words(pair, occurrence, generator.choice(replacements))
        varied.append(pair)
    return varied

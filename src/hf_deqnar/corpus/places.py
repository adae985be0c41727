"""Words that may stand in the place of others, on both sides of a pair at once."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from .reading import Pair

Words = tuple[str, str]  # a word of the source and its counterpart in the target
Span = tuple[int, int]


@dataclass
class Place:
    """Where a word and its counterpart stand in a pair."""

    words: Words
    neighbours: tuple[str, ...]  # the words next to it, on both sides
    spans: tuple[Span, Span]  # characters in the source and in the target


Choice = tuple[Place, list[Words]]  # a place, and what else might stand there


def exchanged(pair: Pair, place: Place, words: Words) -> Pair:
    """The pair with other words in a place; its first reference alone, which is the target."""
    texts = (pair.source, pair.references[0])
    source, target = (
        f"{text[:start]}{word}{text[end:]}" for text, (start, end), word in zip(texts, place.spans, words, strict=True)
    )
    return Pair(source, [target])


def vary(pairs: list[Pair], choices: Callable[[Pair], list[Choice]], share: float, seed: int) -> list[Pair]:
    """The pairs, but for a share of those with a choice, in which one place has other words."""
    generator, varied = random.Random(seed), []
    for pair in pairs:
        places = choices(pair)
        if places and generator.random() < share:
            place, others = generator.choice(places)
            pair = exchanged(pair, place, generator.choice(others))
        varied.append(pair)
    return varied

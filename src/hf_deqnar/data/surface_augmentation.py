"""Surface augmentation: upper case, lower case, missing punctuation, typographic characters and joined sentences."""

import random
from collections.abc import Callable

from .parallel_text import Pair

FINAL = ".!?…"
TYPOGRAPHIC = str.maketrans({"'": "’", "–": "-", "…": "..."})
MAX_JOINED = 3


def upper_case(source: str, target: str) -> tuple[str, str]:
    """Both sides in capitals; ß becomes SS.

    >>> upper_case("Good luck!", "Viel Spaß!")
    ('GOOD LUCK!', 'VIEL SPASS!')
    """
    return source.upper(), target.upper()


def lower_case(source: str, target: str) -> tuple[str, str]:
    """A source in small letters, as people type it; the target is as it was."""
    return source.lower(), target


def without_final_punctuation(source: str, target: str) -> tuple[str, str]:
    """Both sides without the punctuation at their end.

    >>> without_final_punctuation("I like tea.", "Ich mag Tee.")
    ('I like tea', 'Ich mag Tee')
    """
    return source.rstrip(FINAL) or source, target.rstrip(FINAL) or target


def typographic(source: str, target: str) -> tuple[str, str]:
    """A source with the apostrophes and quotation marks of word processors.

    >>> typographic('I\\'m "here".', "Ich bin „hier“.")
    ('I’m “here”.', 'Ich bin „hier“.')
    """
    parts = source.translate(TYPOGRAPHIC).split('"')
    return "".join(part if place == 0 else "“”"[(place - 1) % 2] + part for place, part in enumerate(parts)), target


SURFACES: tuple[Callable[[str, str], tuple[str, str]], ...] = (
    upper_case,
    lower_case,
    without_final_punctuation,
    typographic,
)


def vary_surface(pairs: list[Pair], share: float, seed: int) -> list[Pair]:
    """Change the surface of a random share of the pairs, each in one of the ways of `SURFACES`.

    Args:
        pairs: the corpus; the result has as many pairs, in the same order.
        share: probability from 0 to 1 that a pair is changed.
        seed: of the random choices.
    """
    generator, varied = random.Random(seed), []
    for pair in pairs:
        if generator.random() < share:
            source, target = generator.choice(SURFACES)(pair.source, pair.references[0])
            pair = Pair(source, [target])
        varied.append(pair)
    return varied


def join_pairs(pairs: list[Pair], share: float, seed: int) -> list[Pair]:
    """Append one or two random others to a share of the pairs, so that several sentences and long inputs occur.

    Args:
        pairs: the corpus; the result has as many pairs, in the same order.
        share: probability from 0 to 1 that a pair is extended.
        seed: of the random choices.

    >>> join_pairs([Pair("Hello.", ["Hallo."])], share=1.0, seed=0)
    [Pair(source='Hello. Hello. Hello.', references=['Hallo. Hallo. Hallo.'])]
    """
    generator, joined = random.Random(seed), []
    for pair in pairs:
        if generator.random() < share:
            parts = [pair, *generator.choices(pairs, k=generator.randint(1, MAX_JOINED - 1))]
            pair = Pair(" ".join(part.source for part in parts), [" ".join(part.references[0] for part in parts)])
        joined.append(pair)
    return joined

import pytest

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.surface_augmentation import join_pairs, typographic, vary_surface, without_final_punctuation

PAIRS = [Pair(f"Don't say {word}!", [f"Sag nicht {word}!"]) for word in ("yes", "no", "so")] * 100


def test_every_kind_of_surface_occurs_and_others_are_unchanged():
    varied = vary_surface(PAIRS, share=0.5, seed=3)
    assert len(varied) == len(PAIRS)
    changed = [(old, new) for old, new in zip(PAIRS, varied, strict=True) if old != new]
    assert 100 < len(changed) < 200
    kinds = {
        "upper": lambda old, new: new == Pair(old.source.upper(), [old.references[0].upper()]),
        "lower": lambda old, new: new == Pair(old.source.lower(), old.references),
        "bare": lambda old, new: new == Pair(old.source[:-1], [old.references[0][:-1]]),
        "typographic": lambda old, new: new == Pair(old.source.replace("'", "’"), old.references),
    }
    counts = {name: sum(matches(*both) for both in changed) for name, matches in kinds.items()}
    assert sum(counts.values()) == len(changed)
    assert min(counts.values()) > 20
    assert varied == vary_surface(PAIRS, share=0.5, seed=3)


def test_a_text_of_punctuation_alone_is_not_emptied():
    assert without_final_punctuation("...", "?!") == ("...", "?!")


def test_quotation_marks_open_and_close():
    assert typographic('"A" and "B"', "x")[0] == "“A” and “B”"


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_joined_pairs_are_concatenations_of_both_sides(share):
    joined = join_pairs(PAIRS, share, seed=5)
    assert len(joined) == len(PAIRS)
    lengthened = 0
    for old, new in zip(PAIRS, joined, strict=True):
        assert new.source.startswith(old.source)
        sources, targets = new.source.count("Don't"), new.references[0].count("Sag")
        assert sources == targets <= 3
        lengthened += sources > 1
    assert share - 0.1 <= lengthened / len(PAIRS) <= share + 0.1

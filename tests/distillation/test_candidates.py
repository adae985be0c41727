import itertools
import json

import pytest

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.distillation.candidates import pairwise_bleu, read_candidates, tokenize_candidates, tune_gamma

from ..conftest import SENTENCES

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

PAIRS = [Pair(source, [target]) for source, target in SENTENCES]
CANDIDATES = [[target.lower(), " ".join(target.split()[:3]), target] for _, target in SENTENCES]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_file_of_candidates_is_read(tmp_path):
    rows = [
        {"en": pair.source, "de": pair.references[0], "candidates": several}
        for pair, several in zip(PAIRS, CANDIDATES, strict=True)
    ]
    assert read_candidates(write(tmp_path / "c.jsonl", rows), "en", "de") == (PAIRS, CANDIDATES)
    rows[2]["candidates"] = ["one"]
    with pytest.raises(ValueError, match="c.jsonl: pair 3 has 1 candidates but the first has 3"):
        read_candidates(write(tmp_path / "c.jsonl", rows), "en", "de")
    plain = write(tmp_path / "plain.jsonl", [{"en": "a", "de": "b"}])
    with pytest.raises(ValueError, match="plain.jsonl has no candidates for Dynamic KD .*no column candidates"):
        read_candidates(plain, "en", "de")


def test_pairwise_bleu_equals_sacrebleus_with_the_row_as_reference():
    from sacrebleu.metrics import BLEU

    bleu = BLEU(effective_order=True)
    texts = ["Ein Mann reitet auf einem Pferd.", "Ein Mann reitet.", "Pferd", "Ein Mann reitet."]
    found = pairwise_bleu(texts)
    for i, j in itertools.product(range(4), range(4)):
        assert found[i][j] == bleu.sentence_score(texts[j], [texts[i]]).score
    assert found[0][1] != found[1][0]
    assert all(found[i][i] == pytest.approx(100) for i in range(4))


def test_candidates_become_token_ids_with_their_similarities(tokenizer, tmp_path):
    found = tokenize_candidates(PAIRS, CANDIDATES, tokenizer, max_length=60, cache=tmp_path)
    assert found.replaced == 0
    assert set(found.dataset.column_names) == {"input_ids", "labels", "number", "candidates", "similarity"}
    for row, pair, several in zip(found.dataset, PAIRS, CANDIDATES, strict=True):
        assert row["input_ids"] == tokenizer(pair.source)["input_ids"]
        assert row["labels"] == tokenizer(pair.references[0])["input_ids"]
        assert row["candidates"] == [tokenizer(text)["input_ids"] for text in several]
        assert row["similarity"] == pairwise_bleu(several)
    shared = tokenize_candidates(PAIRS, CANDIDATES, tokenizer, max_length=59, cache=tmp_path, processes=2)
    assert shared.dataset[:] == found.dataset[:]


def test_a_second_call_uses_the_cached_similarities(tokenizer, tmp_path, monkeypatch):
    from hf_deqnar.distillation import candidates

    first = tokenize_candidates(PAIRS, CANDIDATES, tokenizer, max_length=60, cache=tmp_path)
    monkeypatch.setattr(candidates, "pairwise_bleu", None)
    again = tokenize_candidates(PAIRS, CANDIDATES, tokenizer, max_length=60, cache=tmp_path)
    assert again.dataset[:] == first.dataset[:]
    monkeypatch.undo()
    moved = [[first, *rest] for (first, *_), (_, *rest) in zip(CANDIDATES[::-1], CANDIDATES, strict=True)]
    changed = tokenize_candidates(PAIRS, moved, tokenizer, max_length=60, cache=tmp_path)
    assert changed.fingerprint != first.fingerprint
    assert changed.dataset["candidates"][0] != first.dataset["candidates"][0]


def test_an_invalid_candidate_is_replaced_by_the_raw_target_and_an_invalid_raw_target_drops_the_pair(
    tokenizer, tmp_path
):
    pairs = [PAIRS[0], PAIRS[1], Pair("A horse.", ["Pferd " * 40]), Pair("A", ["Ein Mann und ein Pferd"]), PAIRS[2]]
    candidates = [
        ["", "Pferd " * 40, PAIRS[0].references[0]],
        ["a" * 39, PAIRS[1].references[0].lower(), PAIRS[1].references[0]],
        ["Pferd", "ein Pferd", "Pferd " * 40],
        ["Mann", "Mann", "Ein Mann und ein Pferd"],
        CANDIDATES[2],
    ]
    found = tokenize_candidates(pairs, candidates, tokenizer, max_length=40, canvas=2, cache=tmp_path)
    assert found.dropped == {"too long": 1, "longer than its canvas": 1}
    assert found.dataset["number"][:] == [0, 1, 4]
    first, second, last = found.dataset
    assert first["candidates"] == [first["labels"]] * 3
    assert first["similarity"] == [[pytest.approx(100)] * 3] * 3
    assert second["candidates"][0] == second["labels"] == second["candidates"][2]  # does not fit on the canvas
    assert second["candidates"][1] != second["labels"]
    assert last["candidates"] == [tokenizer(text)["input_ids"] for text in CANDIDATES[2]]
    assert found.replaced == 3


REAL = [
    ("ein Mann reitet", "ein Mann auf dem Pferd", "Mann Pferd", ["ein Mann auf einem Pferd", "der Mann auf dem Pferd"]),
    ("zwei Hunde spielen hier", "Hunde im Schnee", "zwei Hunde", ["Hunde spielen im Schnee", "Hunde sind im Schnee"]),
    (
        "wo ist der Zug",
        "wo ist der Bahnhof",
        "Bahnhof wo ist der",
        ["wo ist denn der Bahnhof", "der Bahnhof wo ist er"],
    ),
    ("eine Tasse Kaffee bitte", "ich will Kaffee", "gern eine Tasse", ["eine Tasse Kaffee bitte sehr", "Kaffee bitte"]),
    ("sie liest viel", "sie liest", "liest sie ein Buch", ["liest sie ein gutes Buch", "sie liest ein Buch"]),
]


def real_distortion(gamma) -> float:
    """The formula of appendix F, without vectorisation."""
    total = 0.0
    for *several, references in REAL:
        similarity = pairwise_bleu(several)
        sums = [sum(gamma[i] * similarity[i][j] for i in range(3)) for j in range(3)]
        chosen = several[sums.index(max(sums))]
        total -= sum(pairwise_bleu([text, chosen])[0][1] for text in references) / len(references)
    return total / len(REAL)


def test_tuned_gamma_is_as_good_as_exhaustive_search():
    grid = (0.4, 0.7, 1.0, 1.3, 1.6)
    candidates, references = [row[:3] for row in REAL], [[*row[3], row[2]] for row in REAL]
    found = tune_gamma([list(row) for row in candidates], references, grid)
    every = {gamma: real_distortion(gamma) for gamma in itertools.product(grid, repeat=3)}
    assert found.distortion == pytest.approx(min(every.values()))
    assert found.distortion == pytest.approx(every[found.gamma])
    assert found.distortion_of_equal_weights == pytest.approx(every[1.0, 1.0, 1.0])
    assert found.distortion < found.distortion_of_equal_weights
    assert found.sentences == 5


def test_references_equal_to_the_raw_target_are_ignored():
    with pytest.raises(ValueError, match="No sentence has a reference besides its raw target"):
        tune_gamma([["a", "b"]], [["b"]])
    assert tune_gamma([["a", "b"], ["c", "d"]], [["b"], ["d", "c"]]).sentences == 1

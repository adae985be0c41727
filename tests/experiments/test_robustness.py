"""The test sets for numbers, names and surfaces, and their scores."""

import json
import re

import pytest
from robustness import ROWS, SURFACES, judge, main, make_rows

from hf_deqnar.data.parallel_text import Pair, read_parallel

from ..conftest import PAIRS_FILE


@pytest.fixture(scope="module")
def rows():
    pairs = [*read_parallel(PAIRS_FILE, "en", "de"), Pair("I have 12 apples.", ["Ich habe 12 Äpfel."])]
    names = ("Tom", "Mary", "John", "Ken", "Bob")
    corpus = [Pair(f"{name} likes {other}.", [f"{name} mag {other}."]) for name in names for other in names[::-1]]
    return make_rows([*pairs, Pair("Tom likes Mary.", ["Tom mag Mary."])], corpus * 3)


def test_every_kind_has_rows_and_the_seed_fixes_them(rows):
    kinds = {row.kind for row in rows}
    assert {"times", "dates", "amounts", "numbers of the corpus", "names", "plain", *SURFACES} < kinds
    assert {"2 sentences", "4 sentences"} < kinds
    assert sum(row.kind == "times" for row in rows) == ROWS
    pairs = read_parallel(PAIRS_FILE, "en", "de")
    assert make_rows(pairs, pairs) == make_rows(pairs, pairs) != make_rows(pairs, pairs, seed=1)
    assert all(bool(row.needed) != bool(row.references) for row in rows)
    assert all(needed in row.source for row in rows for needed in row.needed)
    assert all(row.source == row.source.upper() for row in rows if row.kind == "capitals")


def test_references_are_perfect_and_wrong_digits_are_not(rows):
    perfect = [row.references[0] if row.references else row.source for row in rows]
    assert all(score == pytest.approx(100) for _, score in judge(rows, perfect).values())
    damaged = [re.sub(r"\d", "", text) if row.needed else "x" for row, text in zip(rows, perfect, strict=True)]
    figures = judge(rows, damaged)
    assert figures["times"] == (ROWS, 0)
    assert figures["numbers of the corpus"][1] == 0
    assert figures["plain"][1] < 10


def test_a_model_is_scored(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("robustness.ROWS", 4)
    output = tmp_path / "rows.jsonl"
    columns = ["--corpus", str(PAIRS_FILE), "--source", "en", "--target", "de", "--output", str(output)]
    main([str(saved["ctc"]), "--data", str(PAIRS_FILE), *columns])
    printed = capsys.readouterr().out
    assert "| times | % right | 4 |" in printed
    assert re.search(r"\| 4 sentences \| chrF \| 1 \| \d+\.\d \|", printed)
    written = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert all(isinstance(row[str(saved["ctc"])], str) for row in written)

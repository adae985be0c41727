"""Tables on a terminal, and the same text as ever elsewhere."""

import contextlib
import io
import re
from importlib.util import find_spec

import pytest

from hf_deqnar.benchmarks.common import markdown_table
from hf_deqnar.cli.terminal_tables import print_results

ROWS = [["a [bold]model[/bold], tol=0.1", "45.25", ""], ["| :tea: |", "3.00 (p = 0.001)", "1"]]
TEXT = f"A head\n\n{markdown_table(['system', 'BLEU', 'seconds'], ROWS)}\n\nBLEU |nrefs:1\n6 sentences"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(output: io.StringIO) -> str:
    with contextlib.redirect_stdout(output):
        print_results(TEXT)
    return output.getvalue()


def without_styles(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_elsewhere_the_text_is_printed_as_it_is(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert printed(io.StringIO()) == f"{TEXT}\n"


def test_on_a_terminal_a_table_is_drawn_with_all_cells(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    shown = without_styles(printed(Terminal()))
    assert "|--" not in shown
    for text in ("A head\n\n", "\n\nBLEU |nrefs:1\n6 sentences\n", *(cell for row in ROWS for cell in row)):
        assert text in shown
    monkeypatch.setenv("COLUMNS", "30")
    lines = without_styles(printed(Terminal())).split("\n")
    assert max(map(len, lines)) <= 30
    assert sum(line.count("b") for line in lines) == TEXT.count("b")  # nothing is cut off


def test_evaluate_and_bench_draw_their_tables_on_a_terminal(run_on_terminal, saved, columns, monkeypatch):
    pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    shown = run_on_terminal("stdout", "evaluate", saved["ctc"], *columns, "--limit", "2")
    assert "\x1b[1m" in shown  # the headers
    assert "|--" not in shown
    assert re.search(r"system +BLEU +chrF +NFE ", without_styles(shown))
    assert re.search(rf"{saved['ctc']} +\d+\.\d\d +\d+\.\d\d ", without_styles(shown))
    assert "\n2 sentences\n" in shown
    if find_spec("torchdeq") is not None:  # part of the test extra
        small = ["--rows", "2", "--longest", "6", "--repeats", "1"]
        shown = run_on_terminal("stdout", "bench", "solver", *small)
        assert "|--" not in shown
        assert "hf_deqnar picard" in shown

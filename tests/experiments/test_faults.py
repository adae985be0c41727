"""The quick form of `experiments/faults.py`; docs/reliability.md has the results of the long one."""

import random
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from faults import Operation, Reference, measure, table

SCRIPT = Path(__file__).parents[2] / "experiments" / "faults.py"


@pytest.mark.slow
def test_operations_survive_faults():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("| ").split("|")] for line in done.stdout.splitlines()[2:]]
    assert [(row[0], row[1]) for row in rows] == faults.QUICK
    for _, _, rounds, _, lost, duplicated, same, refused in rows:
        assert (lost, duplicated) == ("0", "0")
        assert int(same) + int(refused) == int(rounds) == 1
    assert sum(int(row[3]) for row in rows) > len(rows) // 2  # a fault after the end of an operation has no effect


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (["a", "b", "c"], (0, 0, 1)),
        (["a", "c"], (1, 0, 0)),
        (["a", "b", "b", "c"], (0, 1, 0)),
        (["b", "a", "c"], (0, 0, 0)),
    ],
)
def test_losses_and_duplicates_are_counted(tmp_path, monkeypatch, found, counts):
    monkeypatch.setitem(faults.OPERATIONS, "test", Operation(lambda models, folder: [], lambda folder: list(found)))
    monkeypatch.setitem(faults.FAULTS, "none", lambda attempt: 1)
    outcome = measure("test", "none", 1, None, tmp_path, Reference(["a", "b", "c"], 1.0))
    assert (outcome.lost, outcome.duplicated, outcome.correct) == counts
    assert bool(outcome.problems) == (counts[2] == 0)
    assert "| test | none | 1 | 1 |" in table({("test", "none"): outcome})


def test_a_traceback_is_not_a_readable_error(tmp_path):
    attempt = faults.Round(Operation(lambda *_: [], list), None, tmp_path, [], 1.0, random.Random(0))
    for status, said in [(1, "hf-deqnar: x"), (2, "Traceback\nhf-deqnar: x"), (2, "x"), (2, ""), (2, "hf-deqnar: y")]:
        (tmp_path / "log").write_text(said)
        with pytest.raises(faults.Broken):
            attempt.refused(faults.Process(0, tmp_path / "log", status), "x")
    (tmp_path / "log").write_text("progress\nhf-deqnar: x is damaged")
    attempt.refused(faults.Process(0, tmp_path / "log", 2), "x")

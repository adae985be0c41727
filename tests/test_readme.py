"""The README's Python blocks run as they stand, one after the other, in an empty folder, and its ladders are real."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_deqnar.cli.main import main

HOUSE = Path(__file__).parents[1]
README = (HOUSE / "README.md").read_text(encoding="utf-8")


def objectives_of_the_table() -> list[str]:
    """Every objective that the README promises, from the first column of its table."""
    table = README.split("| `--objective` |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_every_block_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 5
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    environment = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "translation_text" in done.stdout


@pytest.mark.parametrize(
    ("page", "name"), [("README.md", "multi30k"), ("README.md", "tatoeba"), ("ladders/tatoeba/README.md", "tatoeba")]
)
def test_tables_of_ladders_are_what_the_command_beside_them_prints(page, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(HOUSE)
    text = (HOUSE / page).read_text(encoding="utf-8")
    (flags,) = re.findall(rf"(?:ladder|ladder.py) ladders/{name}.yaml (.* --table.*)", text)
    flags = flags.replace(f"data/{name}", str(tmp_path)).replace("--plot docs/settling.png", "").split()
    assert main(["ladder", f"ladders/{name}.yaml", *flags]) == 0
    assert capsys.readouterr().out.strip() in text

"""The README: Python blocks run, links exist, and the table of results is what the command beside it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_objectives() -> list[str]:
    """The objectives in the first column of the table in the documentation."""
    page = (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    table = page.split("| `--objective` |", 1)[1].split("\n\n", 1)[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_readme_has_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_python_blocks_of_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert blocks
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks))
    environment = {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "translation_text" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_exist(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_table_of_results_is_printed_by_the_command_beside_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (flags,) = re.findall(r"experiments/run.py experiments/tatoeba.yaml (.* --table.*)", README)
    assert main(["experiments/tatoeba.yaml", *flags.replace("data/tatoeba", str(tmp_path)).split()]) == 0
    assert capsys.readouterr().out.strip() in README

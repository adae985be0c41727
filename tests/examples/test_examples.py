"""Every file of examples/ runs, at reduced size."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from hf_deqnar.cli.main import main
from hf_deqnar.models.deqnar.configuration_deqnar import CHOICES
from hf_deqnar.models.deqnar.solvers import SOLVERS
from hf_deqnar.models.deqnar.transition_deqnar import TRANSITIONS

from .. import test_documents
from ..cli import test_push
from ..conftest import PAIRS_FILE
from ..test_documents import Block, commands_of, run_block

EXAMPLES = Path(__file__).parents[2] / "examples"
models, page_folder, hub = test_documents.models, test_documents.page_folder, test_push.hub


def load(name: str) -> dict:
    return runpy.run_path(str(EXAMPLES / name), run_name="example")


def test_the_list_of_examples_is_complete():
    listed = set(re.findall(r"^\| \[(.+?)\]", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {path.name for path in EXAMPLES.iterdir()} - {"README.md", "__pycache__"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({path.name for path in EXAMPLES.glob("*.sh")} - {"publish.sh"}))
def test_shell_examples(name, page_folder):
    folder = page_folder(Path("engine.md"))  # with a teacher
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    run_block(Block(EXAMPLES / name, 1, "bash", text, None), {})
    assert list(folder.glob("runs/*/model.safetensors"))


def test_publishing(hub, saved, tmp_path, monkeypatch):
    """With a folder in place of the Hub; the published model has its tokenizer, code and card."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(saved["ctc"], "runs/student")
    text = (EXAMPLES / "publish.sh").read_text(encoding="utf-8")
    (words,) = commands_of(Block(EXAMPLES / "publish.sh", 1, "bash", text, None))
    assert main(words[1:]) == 0
    for name in ("model.safetensors", "tokenizer.json", "modeling_deqnar.py", "constraints.py", "README.md"):
        assert (hub.folder / name).is_file()


def test_the_notebook():
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    namespace = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec("".join(cell["source"]), namespace)
    assert namespace["out"].converged.tolist() == [True]


def test_fixed_points_outside_translation():
    figures = load("fixed_point_outside_translation.py")["main"](["--pages", "50", "--steps", "80"])
    assert max(figures[name] for name in ("picard", "anderson", "broyden")) < 1e-3
    assert figures["damping"] == pytest.approx(0.85, abs=0.02)


def test_a_custom_solver_and_transition(monkeypatch):
    for table in (SOLVERS, TRANSITIONS, CHOICES):  # restored after the test
        for name in list(table):
            monkeypatch.setitem(table, name, table[name])
    monkeypatch.setitem(SOLVERS, "half_anderson", None)
    monkeypatch.setitem(TRANSITIONS, "bounded", None)
    figures = load("custom_solver_and_transition.py")["main"]()
    assert figures["solver_calls"] > 0
    assert figures["converged"] == [True, True]
    assert 1 < max(figures["evaluations"]) < 50


@pytest.mark.slow
def test_lora(tmp_path):
    flags = ["--data", str(PAIRS_FILE), "--output_dir", str(tmp_path), "--steps", "4", "--batch_size", "2"]
    losses = load("lora.py")["main"](flags)
    assert len(losses) == 4
    assert (tmp_path / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "model.safetensors").exists()

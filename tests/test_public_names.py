"""`import hf_deqnar`: its names, its registrations and its cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_deqnar
from hf_deqnar import registration

SOURCE = Path(hf_deqnar.__file__)


def run_python(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", hf_deqnar.__all__)
def test_every_public_name_can_be_imported(name):
    assert getattr(hf_deqnar, name) is not None
    assert name in dir(hf_deqnar)


def test_type_checkers_see_the_names_that_are_loaded_lazily():
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    for_checkers = {alias.name: f".{node.module}" for node in block.body for alias in node.names}
    assert for_checkers == hf_deqnar.MODULES
    assert set(hf_deqnar.__all__) == {*hf_deqnar.MODULES, "METRICS", "PRETRAINED"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hf_deqnar' has no attribute 'Transformer'"):
        hf_deqnar.Transformer  # noqa: B018


def test_missing_package_is_reported_with_its_extra():
    code = """
import sys
sys.modules["accelerate"] = None
import hf_deqnar
try:
    hf_deqnar.DeqNarTrainer
except ImportError as error:
    print(error)
"""
    assert "pip install 'hf_deqnar[train]'" in run_python(code)


def test_importing_the_package_imports_neither_torch_nor_transformers():
    assert run_python("import hf_deqnar, sys; print({'torch', 'transformers'} & set(sys.modules))") == "set()\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import hf_deqnar; from transformers import AutoModelForSeq2SeqLM, pipeline",
        "from transformers import AutoModelForSeq2SeqLM, pipeline; import hf_deqnar",
        "from hf_deqnar import DeqNarModel; from transformers import AutoModelForSeq2SeqLM, pipeline",
        "from hf_deqnar import DeqNarTrainer; from transformers import AutoModelForSeq2SeqLM, pipeline",
    ],
)
def test_models_and_pipeline_are_registered_with_any_import_order(imports):
    code = f"""
{imports}
import hf_deqnar
print(type(AutoModelForSeq2SeqLM.from_pretrained(hf_deqnar.PRETRAINED)).__name__)
print(pipeline("translation", model=hf_deqnar.PRETRAINED)("Where is the train station?")[0]["translation_text"])
"""
    assert run_python(code).splitlines() == ["DeqNarForConditionalGeneration", "Wo ist der Bahnhof?"]


@pytest.mark.parametrize("module", registration.model_parts())
def test_every_module_of_the_models_can_be_imported_first(module):
    code = f"""
import {module}
from transformers import AutoModelForSeq2SeqLM
import hf_deqnar
print(type(AutoModelForSeq2SeqLM.from_pretrained(hf_deqnar.PRETRAINED)).__name__)
"""
    assert run_python(code) == "DeqNarForConditionalGeneration\n"


def test_configurations_are_registered_before_a_model_is_imported(tmp_path):
    hf_deqnar.DeqNarConfig().save_pretrained(tmp_path / "deqnar")
    hf_deqnar.RecurrentConfig().save_pretrained(tmp_path / "recurrent")
    code = f"""
import hf_deqnar
from transformers import AutoConfig
for folder in ("deqnar", "recurrent"):
    print(type(AutoConfig.from_pretrained({str(tmp_path)!r} + "/" + folder)).__name__)
"""
    assert run_python(code).split() == ["DeqNarConfig", "RecurrentConfig"]


def test_a_model_saved_without_the_auto_classes_carries_its_code(tmp_path):
    code = f"""
from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
DeqNarForConditionalGeneration(DeqNarConfig.preset("tiny", vocab_size=50)).save_pretrained({str(tmp_path)!r})
"""
    run_python(code)
    assert {"modeling_deqnar.py", "configuration_deqnar.py", "pipeline_deqnar.py"} <= set(
        file.name for file in tmp_path.iterdir()
    )

import subprocess
import sys

import pytest

from hf_deqnar.registration import MODELS, PIPELINE, model_parts

CODE = """
import importlib, sys
importlib.import_module(sys.argv[1])
from transformers import AutoModelForSeq2SeqLM
from hf_deqnar import DeqNarConfig
assert DeqNarConfig in AutoModelForSeq2SeqLM._model_mapping.keys()
"""


def test_all_modules_of_the_models_are_known():
    assert {*MODELS, "hf_deqnar.models.deqnar.layers_deqnar", "hf_deqnar.models.deqnar.text"} <= set(model_parts())


@pytest.mark.parametrize("module", ["hf_deqnar.models.deqnar.layers_deqnar", "hf_deqnar.models.deqnar.text", PIPELINE])
def test_models_are_registered_whichever_module_is_imported_first(module):
    done = subprocess.run([sys.executable, "-c", CODE, module], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

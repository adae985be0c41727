"""Saving and loading does not change a model, with the package and, in a process without it, with trust_remote_code."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration, DeqNarModel

from ..conftest import REFINEMENTS, padded, random_sentences, small_model

WITHOUT_THE_PACKAGE = """
import json, sys
sys.modules["hf_deqnar"] = None          # any import of the package fails from here on
import torch
from transformers import AutoModelForSeq2SeqLM
folder = sys.argv[1]
model = AutoModelForSeq2SeqLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float64)
assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
tokens = torch.tensor(json.loads(sys.argv[2]))
with torch.no_grad():
    out = model(input_ids=tokens)
texts = model.generate(input_ids=tokens, **json.loads(sys.argv[3]))
print(json.dumps({"logits": out.logits.tolist(), "nfe": out.nfe.tolist(), "texts": texts.tolist()}))
"""


@pytest.mark.parametrize("weight_norm", ["none", "weight", "spectral"])
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_save_and_load_does_not_change_outputs(tmp_path, refinement, weight_norm):
    model = small_model(refinement=refinement, weight_norm=weight_norm, latent="vae", length="ctc")
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    assert (tmp_path / "model.safetensors").exists()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert type(loaded) is DeqNarForConditionalGeneration
    tokens = padded(random_sentences(4))
    with torch.no_grad():
        before, with_file_alignment = model(input_ids=tokens), loaded.eval()(input_ids=tokens)
        # Loaded weights have the memory alignment of the file, on which the rounding of products depends on some
        # processors. Copies have the default alignment, and must give bitwise equal results.
        for tensor in (*loaded.parameters(), *loaded.buffers()):
            tensor.data = tensor.data.clone()
        after = loaded(input_ids=tokens)
    torch.testing.assert_close(before.logits, with_file_alignment.logits, rtol=0, atol=1e-12)
    assert torch.equal(before.logits, after.logits)
    assert torch.equal(before.nfe, after.nfe)
    assert torch.equal(before.nfe, with_file_alignment.nfe)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


def test_configuration_round_trip(tmp_path):
    config = DeqNarConfig.preset(
        "small", refinement="mixed", length="ctc", latent="vae", tol=3e-4, weight_norm="weight"
    )
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == config.to_diff_dict()


def test_base_model_round_trip(tmp_path):
    small_model().save_pretrained(tmp_path)
    assert isinstance(AutoModel.from_pretrained(tmp_path), DeqNarModel)


@pytest.mark.parametrize(
    ("length", "options"),
    [("predict", {"length_beams": 3}), ("ctc", {"ctc_beam_size": 3}), ("dag", {"dag_beam_size": 3})],
    ids=["predict", "ctc", "dag"],
)
def test_process_without_the_package_computes_the_same_outputs(tmp_path, length, options):
    model = small_model(refinement="mixed", weight_norm="spectral", length=length)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForSeq2SeqLM"] == "modeling_deqnar.DeqNarForConditionalGeneration"
    sentences = padded(random_sentences(4))
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(folder), json.dumps(sentences.tolist()), json.dumps(options)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    with torch.no_grad():
        expected = model(input_ids=sentences)
    assert answer["nfe"] == expected.nfe.tolist()
    assert answer["texts"] == model.generate(input_ids=sentences, **options).tolist()
    torch.testing.assert_close(torch.tensor(answer["logits"], dtype=torch.float64), expected.logits)


def test_a_model_loaded_as_remote_code_can_be_saved_and_loaded_again(tmp_path):
    """A repository that was fine-tuned and pushed without the package still contains its code."""
    small_model().save_pretrained(tmp_path / "first")
    script = (
        "import sys; sys.modules['hf_deqnar'] = None\n"
        "from transformers import AutoModelForSeq2SeqLM as Auto\n"
        "Auto.from_pretrained(sys.argv[1], trust_remote_code=True).save_pretrained(sys.argv[2])\n"
        "Auto.from_pretrained(sys.argv[2], trust_remote_code=True)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "first"), str(tmp_path / "second")],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "second" / "fixed_point.py").exists()

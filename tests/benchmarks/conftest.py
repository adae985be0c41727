"""A small model of ours, a teacher and a rival with random weights, on disk with one tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.benchmarks.contenders import our_translate

from ..cli.conftest import _quiet  # noqa: F401  (these tests run the command line as well)
from ..conftest import SENTENCES, small_model
from ..teachers import small_teacher

TEACHER_READS = 24  # tokens; it also writes at most as many, as one with random weights never ends by itself


def our_model(tokenizer, **fields) -> DeqNarForConditionalGeneration:
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    return small_model(torch.float32, length="ctc", vocab_size=len(tokenizer), **layers, **fields)


@pytest.fixture(scope="session")
def models(tokenizer, tmp_path_factory) -> Path:
    """A folder with `ours`, `teacher`, `rival` and `test.jsonl`, whose references are what ours says."""
    folder = tmp_path_factory.mktemp("models")
    ours = our_model(tokenizer)
    sizes = {"vocabulary": len(tokenizer), "max_position_embeddings": TEACHER_READS}
    saved = {"ours": ours, "teacher": small_teacher(**sizes), "rival": small_teacher(**sizes, decoder_layers=1)}
    for name, model in saved.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        for english, _ in SENTENCES:
            said = our_translate(ours, {})([tokenizer(english)["input_ids"]])[0]
            text = tokenizer.decode(said, skip_special_tokens=True).strip()
            file.write(json.dumps({"en": english, "de": text}) + "\n")
    return folder


@pytest.fixture(scope="session")
def arguments(models) -> list[str]:
    """What every run is given."""
    named = {"--model": "ours", "--teacher": "teacher", "--data": "test.jsonl"}
    paths = [part for flag, name in named.items() for part in (flag, str(models / name))]
    return [*paths, "--source", "en", "--target", "de"]


@pytest.fixture(scope="session")
def exported(models, tokenizer, tmp_path_factory) -> Path:
    """The model, exported once."""
    pytest.importorskip("onnxscript", reason="onnxscript is part of the onnx extra")
    pytest.importorskip("onnxruntime", reason="onnxruntime is part of the onnx extra")
    from hf_deqnar.export.graphs import export_model

    folder = tmp_path_factory.mktemp("exported")
    export_model(our_model(tokenizer), tokenizer, folder)
    return folder

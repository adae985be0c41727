"""A small deqnar model, a teacher and a baseline with random weights, on disk with one tokenizer."""

import json
from pathlib import Path

import pytest
import torch

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.benchmarks.systems import model_translate

from ..conftest import SENTENCES, small_model
from ..teachers import small_teacher

TEACHER_READS = 24  # tokens; also the maximum output length, because a model with random weights predicts no end token


def untrained_deqnar(tokenizer, **fields) -> DeqNarForConditionalGeneration:
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    return small_model(torch.float32, length="ctc", vocab_size=len(tokenizer), **layers, **fields)


@pytest.fixture(scope="session")
def models(tokenizer, tmp_path_factory) -> Path:
    """A folder with `model`, `teacher`, `baseline` and `test.jsonl`, whose references are outputs of the model."""
    folder = tmp_path_factory.mktemp("models")
    deqnar = untrained_deqnar(tokenizer)
    sizes = {"vocabulary": len(tokenizer), "max_position_embeddings": TEACHER_READS}
    saved = {"model": deqnar, "teacher": small_teacher(**sizes), "baseline": small_teacher(**sizes, decoder_layers=1)}
    for name, model in saved.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    with (folder / "test.jsonl").open("w", encoding="utf-8") as file:
        for english, _ in SENTENCES:
            output = model_translate(deqnar, {})([tokenizer(english)["input_ids"]])[0]
            text = tokenizer.decode(output, skip_special_tokens=True).strip()
            file.write(json.dumps({"en": english, "de": text}) + "\n")
    return folder


@pytest.fixture(scope="session")
def arguments(models) -> list[str]:
    """Arguments of every run."""
    named = {"--model": "model", "--teacher": "teacher", "--data": "test.jsonl"}
    paths = [part for flag, name in named.items() for part in (flag, str(models / name))]
    return [*paths, "--source", "en", "--target", "de"]


@pytest.fixture(scope="session")
def exported(models, tokenizer, tmp_path_factory) -> Path:
    """The model, exported once."""
    pytest.importorskip("onnxscript", reason="onnxscript is part of the onnx extra")
    pytest.importorskip("onnxruntime", reason="onnxruntime is part of the onnx extra")
    from hf_deqnar.export.graphs import export_model

    folder = tmp_path_factory.mktemp("exported")
    export_model(untrained_deqnar(tokenizer), tokenizer, folder)
    return folder

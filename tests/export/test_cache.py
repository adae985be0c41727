"""Exports that are made when a model is first used with `--runtime onnx`."""

import shutil

import pytest
from huggingface_hub import constants
from transformers import AutoTokenizer

from hf_deqnar.cli.main import main
from hf_deqnar.export import cache
from hf_deqnar.export.cache import cached_export, export_folder

from ..conftest import SENTENCES, small_model


@pytest.fixture
def saved(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    small_model(length="ctc", vocab_size=len(tokenizer), encoder_layers=1, decoder_layers=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_every_model_has_a_folder_of_its_own(saved, tmp_path):
    copied = shutil.copytree(saved, tmp_path / "copied")
    assert export_folder(str(copied)) == export_folder(str(saved))
    generation = copied / "generation_config.json"
    generation.write_text(generation.read_text().replace("{", '{"tol": 0.01,', 1))
    assert export_folder(str(copied)) != export_folder(str(saved))


@pytest.mark.slow
def test_a_model_is_exported_once_and_again_if_it_is_damaged(saved, monkeypatch, capsys):
    made = []
    export = cache.export_model
    monkeypatch.setattr(cache, "export_model", lambda *arguments: (made.append(1), export(*arguments))[1])
    sentence = SENTENCES[0][0]
    translate = ["translate", "--runtime", "onnx", "--threads", "1", "--model", str(saved), sentence]
    assert main(translate) == 0
    first = capsys.readouterr().out
    assert main(translate) == 0
    assert capsys.readouterr().out == first
    assert made == [1]
    tokenizer = AutoTokenizer.from_pretrained(saved)
    folder = cached_export(str(saved), tokenizer)
    weights = folder / "weights.onnx.data"
    content = bytearray(weights.read_bytes())
    content[100] ^= 1
    weights.write_bytes(content)
    assert main(translate) == 0
    assert capsys.readouterr().out == first
    assert made == [1, 1]


def test_a_model_that_cannot_be_exported_is_named(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    small_model(architecture="bilstm", refinement="stacked", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["translate", "--runtime", "onnx", "--model", str(folder), "Hello."]) == 2
    assert "architecture='bilstm' cannot be exported" in capsys.readouterr().err

"""Structure of `bench throughput`. No timings."""

import json
import shutil

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.benchmarks import systems
from hf_deqnar.cli.main import main


def test_sentences_and_tokens_per_second_at_every_batch_size(arguments, exported, tmp_path, capsys, monkeypatch):
    """Without --export, the model is exported; the export is replaced by a copy to save time."""
    monkeypatch.setattr(systems, "export_model", lambda model, tokenizer, output: shutil.copytree(exported, output))
    file = tmp_path / "figures.json"
    few = ["--sentences", "6", "--repeats", "1", "--batches", "2", "6", "--budgets", "1", "--without", "ctranslate2"]
    assert main(["bench", "throughput", *arguments, *few, "--json", str(file)]) == 0, capsys.readouterr().err
    printed, results = capsys.readouterr().out, json.loads(file.read_text())["results"]
    assert [one["system"] for one in results.values()] == 6 * ["model"] + 2 * ["teacher"]
    for one in results.values():
        assert list(one["batches"]) == ["2", "6"]
        for size, figures in one["batches"].items():
            assert len(figures["every_second"][0]) == 6 // int(size)
            rate = figures["tokens_per_second"] / figures["sentences_per_second"]
            assert rate == pytest.approx(figures["target_tokens"] / 6)
    # The translation does not depend on the batch, and the references are outputs of the model.
    for runtime in ("torch fp32", "ONNX fp32"):
        for figures in results[f"model, {runtime}, tol 0.001"]["batches"].values():
            assert figures["bleu"] == pytest.approx(100)
    for column in ("sentences/s at 2", "tokens/s at 2", "sentences/s at 6", "tokens/s at 6", "BLEU"):
        assert column in printed

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_deqnar.cli.main import main
from hf_deqnar.evaluation.metrics import sentence_bleu
from hf_deqnar.evaluation.mple_report import measure_losses
from hf_deqnar.evaluation.translation import labelled_batches
from hf_deqnar.export.manifest import MANIFEST
from hf_deqnar.objectives.objective import parse_objective

from ..conftest import SENTENCES, small_model
from ..models.deqnar.test_generation_deqnar import reranker

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")


@pytest.fixture(scope="module")
def house(tokenizer, tmp_path_factory):
    """Models with different objectives, data with several references, distilled targets and training data."""
    folder = tmp_path_factory.mktemp("report")
    fields = {
        "vanilla": {"objective": "ce"},
        "glat": {"objective": "glat", "seed": 1},
        "predictor": {"objective": "cmlm", "input_predictor": True, "seed": 2},
        "silent": {"seed": 3},
        "ctc": {"objective": "ctc+glat", "length": "ctc"},
    }
    for name, settings in fields.items():
        small_model(torch.float32, vocab_size=len(tokenizer), max_nfe=4, **settings).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "exported").mkdir()
    (folder / "exported" / MANIFEST).write_text("{}")
    reranker(len(tokenizer)).save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")

    def write(name: str, rows: list[tuple]) -> None:
        lines = [json.dumps({"en": english, "de": german}, ensure_ascii=False) for english, german in rows]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")

    write("dev.jsonl", [(english, [german, f"Nun: {german}", "Nein."]) for english, german in SENTENCES])
    write("single.jsonl", SENTENCES)
    write("distilled.jsonl", [(english, german.lower()) for english, german in SENTENCES])
    write("train.jsonl", SENTENCES * 4)
    write("shuffled.jsonl", SENTENCES[::-1])
    return folder


def columns(house, data="dev.jsonl") -> list[str]:
    return ["--data", str(house / data), "--source", "en", "--target", "de"]


def test_three_models_as_a_table_figures_and_a_plot(run, house, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is the plot extra")
    models = [house / "vanilla", f"{house / 'glat'},targets={house / 'distilled.jsonl'}", house / "predictor"]
    files = ["--json", tmp_path / "figures.json", "--plot", tmp_path / "plot.png"]
    done = run("report", *models, *columns(house), "--train-data", house / "train.jsonl", *files, "--samples", "2")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    vanilla, glat, cmlm = figures["models"].values()
    assert list(figures["models"]) == list(map(str, models))
    assert [found["objective"] for found in (vanilla, glat, cmlm)] == ["ce", "glat", "cmlm"]
    assert vanilla["input"] == 0
    assert vanilla["bleu"] == vanilla["sampled_bleu"]
    assert glat["fit"]["sentences"] == 24
    assert glat["fit"]["after"] < glat["fit"]["before"] == pytest.approx(math.log(2))
    assert "fit" not in cmlm  # it has a predictor
    for found in (vanilla, glat, cmlm):
        assert found["mple"] == pytest.approx(found["nat"] + found["input"] + found["target"])
    assert figures["references"] == 3
    assert set(figures["pearson"]) == {"bleu", "sampled_bleu"}
    assert "| glat,targets=" in done.stdout
    assert "| L_NAT | L_input | L_target | L_MPLE | BLEU " in done.stdout
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_losses_are_those_of_the_library(house, tokenizer, tmp_path, capsys):
    """Raw targets are compared with the other references, distilled ones with all of them."""
    raw, distilled = str(house / "vanilla"), f"{house / 'silent'},objective=ce,targets={house / 'distilled.jsonl'}"
    file = tmp_path / "figures.json"
    assert main(["report", raw, distilled, *columns(house), "--json", str(file), "--beta", "0.5"]) == 0
    figures = json.loads(file.read_text())["models"]
    texts = [german for _, german in SENTENCES]
    references = [[german, f"Nun: {german}", "Nein."] for german in texts]
    for name, output, real in [
        (raw, texts, [several[1:] for several in references]),
        (distilled, [text.lower() for text in texts], references),
    ]:
        similar = sentence_bleu(output, real)
        expected = -0.5 * sum(sum(row) / len(row) for row in similar) / len(similar)
        assert figures[name]["target"] == pytest.approx(expected)
        model = AutoModelForSeq2SeqLM.from_pretrained(name.split(",")[0])
        pairs = [(english, text) for (english, _), text in zip(SENTENCES, output, strict=True)]
        batches, order = labelled_batches(model, tokenizer, pairs, 2)
        losses = measure_losses(model, parse_objective("ce"), batches)
        assert figures[name]["nat"] == pytest.approx(losses.nat, rel=1e-4)
        decoded = tokenizer.batch_decode(losses.targets, skip_special_tokens=True)
        assert decoded == [output[index] for index in order]
    assert "r needs three models that differ" in capsys.readouterr().out


def test_a_fitted_model_is_saved_and_a_vanilla_model_gives_the_token_probabilities(house, tmp_path, capsys):
    kept = tmp_path / "kept"
    models = [f"{house / 'ctc'},train={house / 'single.jsonl'},save={kept}"]
    assert main(["report", *models, *columns(house, "single.jsonl"), "--limit", "4", "--fit-steps", "5"]) == 0
    output = capsys.readouterr().out
    assert "4 sentences, 1.0 references each" in output
    assert "With one reference, the distance of a raw target from it is 0" in output
    loaded = AutoModelForSeq2SeqLM.from_pretrained(kept)
    assert loaded.config.input_predictor
    assert loaded.model.input_head.bias.abs() > 0
    own, other = str(house / "predictor"), f"{house / 'predictor'},vanilla={house / 'vanilla'}"
    file = tmp_path / "figures.json"
    assert main(["report", own, other, *columns(house), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["models"]
    assert figures[own]["nat"] == figures[other]["nat"]
    assert figures[own]["input"] != figures[other]["input"]


def test_the_total_correlation_of_a_corpus(house, tmp_path, capsys):
    file = tmp_path / "figures.json"
    pair = [str(house / "vanilla"), str(house / "teacher")]
    assert main(["report", *columns(house), "--total-correlation", *pair, "--json", str(file)]) == 0
    found = json.loads(file.read_text())["total_correlation"]
    assert found["bits"] == pytest.approx(found["parallel"] - found["autoregressive"])
    assert f"C = {found['bits']:.3f} bits per token" in capsys.readouterr().out


def test_errors_are_one_readable_line(house, tmp_path, capsys, monkeypatch):
    vanilla, glat, data = str(house / "vanilla"), str(house / "glat"), columns(house)
    for arguments, message in [
        (data, "There is nothing to report; name models"),
        ([vanilla, vanilla, *data], "named twice"),
        ([f"{vanilla},beams=3", *data], "'beams' in"),
        ([str(house / "silent"), *data], "has no objective in its config; name it, as in"),
        ([glat, *data], "has no input predictor, which objective 'glat' needs; give --train_data to fit one"),
        ([f"{vanilla},objective=ctc", *data], "objective 'ctc' needs config.length = 'ctc'"),
        ([f"{vanilla},objective=glatt", *data], "'glatt' is unknown"),
        ([f"{vanilla},targets={house / 'train.jsonl'}", *data], "has 24 targets but"),
        ([f"{vanilla},targets={house / 'shuffled.jsonl'}", *data], "pair 1: its source differs from that in"),
        ([f"{vanilla},save={tmp_path / 'no' / 'where'}", *data], "There is no folder"),
        ([str(house / "exported"), *data], "is an ONNX export, which torch cannot run; name the model itself"),
        ([str(house / "teacher"), *data], "is of type marian, not deqnar; only deqnar models are reported"),
        ([vanilla, *data, "--json", str(tmp_path / "no" / "file")], "There is no folder"),
        ([vanilla, *data, "--plot", str(tmp_path / "plot.doc")], "should end in .png, .svg or .pdf"),
        ([vanilla, *data, "--samples", "0"], "--samples must be at least 1, not 0"),
        ([vanilla, *data, "--beta", "-1"], "--beta must not be negative"),
        ([*data, "--total-correlation", str(house / "ctc"), str(house / "teacher")], "Total correlation needs a model"),
        ([*data, "--total-correlation", vanilla, vanilla], "is not autoregressive"),
    ]:
        assert main(["report", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error, (arguments, error)
        assert len(error.strip().splitlines()) == 1, error
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["report", vanilla, *data, "--plot", str(tmp_path / "plot.png")]) == 2
    assert "pip install 'hf_deqnar[plot]'" in capsys.readouterr().err

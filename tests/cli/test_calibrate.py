"""`hf-deqnar calibrate`; what it fits is tested in tests/evaluation."""

import json
import re
import shutil

import pytest

from hf_deqnar.cli.main import main

from ..conftest import PAIRS_FILE
from ..models.deqnar.test_generation_deqnar import reranker

COLUMNS = ["--data", str(PAIRS_FILE), "--source", "en", "--target", "de"]


def test_the_estimate_is_added_to_the_model_and_used(run, saved, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(saved["ctc"], model)
    refused = run("translate", "--model", model, "--quality", "Hello.")
    assert refused.returncode == 2
    assert "model has no quality estimate; fit one with hf-deqnar calibrate." in refused.stderr
    plain = run("translate", "--model", model, "A man is riding a horse. 123")
    done = run("calibrate", "--model", model, *COLUMNS, "--train_data", PAIRS_FILE, "--limit", "30")
    assert done.returncode == 0, done.stderr
    assert "| quality" in done.stdout
    assert "mean chrF" in done.stdout
    assert "Rank correlation of quality and chrF:" in done.stdout
    before, after = (json.loads((one / "generation_config.json").read_text()) for one in (saved["ctc"], model))
    assert after.pop("quality")["word"]
    before.pop("quality", None)
    assert after == before
    for file in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (model / file).read_bytes() == (saved["ctc"] / file).read_bytes()
    quality, text = run("translate", "--model", model, "--quality", "A man is riding a horse. 123").stdout.split("\t")
    assert text == plain.stdout
    assert 0 <= float(quality) < 1
    rows = run("translate", "--model", model, "--quality", "--nbest", "2", "A man is riding a horse.").stdout
    assert [row.split("\t")[:2] for row in rows.splitlines()] == [["1", "1"], ["1", "2"]]
    watched = run("translate", "--model", model, "--quality", "--watch", "A man is riding a horse.").stdout
    assert re.search(r"quality 0\.\d\d", watched)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "absent"], "absent is not a directory; save the model in one."),
        (["--model", "{ctc}", "--limit", "5"], "5 pairs are too few; give at least 20."),
        (["--model", "{ctc}", "--batch_size", "0"], "--batch_size must be at least 1, not 0."),
        (["--model", "{teacher}"], "is of type marian; only deqnar models have quality estimates."),
    ],
)
def test_errors_are_one_readable_line(saved, tokenizer, tmp_path, capsys, flags, message):
    reranker(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    flags = [flag.format(ctc=saved["ctc"], teacher=tmp_path) for flag in flags]
    capsys.readouterr()
    assert main(["calibrate", *COLUMNS, *flags]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert len(error.splitlines()) == 1

"""Structure of `bench decoding`. No timings."""

import json

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.benchmarks.decoding import DEFAULT, configured
from hf_deqnar.cli.main import main

from .conftest import untrained_deqnar


@pytest.fixture
def few(models):
    named = ["--model", str(models / "model"), "--data", str(models / "test.jsonl")]
    model = [*named, "--source", "en", "--target", "de"]
    return ["bench", "decoding", *model, "--sentences", "3", "--repeats", "1"]


def test_every_option_is_scored_and_timed_relative_to_the_default(few, tmp_path, capsys):
    file = tmp_path / "figures.json"
    ways = ["max_nfe=1", "tol=0.1,solver=picard", "memory=1"]
    assert main([*few, "--ways", *ways, "--json", str(file)]) == 0, capsys.readouterr().err
    printed, results = capsys.readouterr().out, json.loads(file.read_text())["results"]
    assert list(results) == [DEFAULT, *ways]
    assert results[DEFAULT]["time_ratio"] == 1
    assert results[DEFAULT]["bleu"] == pytest.approx(100)
    assert results["max_nfe=1"]["nfe"] == 1 < results["tol=0.1,solver=picard"]["nfe"] < results[DEFAULT]["nfe"]
    assert results["memory=1"]["nfe"] != results[DEFAULT]["nfe"], "the solver's memory has no effect"
    assert all(f"| {way} " in printed for way in ways)


def test_exports_can_be_measured(few, exported, tmp_path, capsys):
    file = tmp_path / "figures.json"
    few[few.index("--model") + 1] = str(exported / "fp32")
    assert main([*few, "--ways", "max_nfe=2,ctc_beam_size=3", "--json", str(file)]) == 0, capsys.readouterr().err
    results = json.loads(file.read_text())["results"]
    assert results["max_nfe=2,ctc_beam_size=3"]["nfe"] == 2
    assert results[DEFAULT]["bleu"] == pytest.approx(100)


def test_solver_settings_are_restored(tokenizer):
    model = untrained_deqnar(tokenizer)
    before = model.config.memory
    with configured(model, {"memory": before + 1}):
        assert model.config.memory == before + 1
    assert model.config.memory == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "tol"], "'tol' in 'tol' is not of the form option=value"),
        (["--ways", "tol=1", "tol=1"], "--ways contains a duplicate"),
        (["--ways", "toll=1"], "toll is not an option of generate; did you mean tol?"),
        (["--sentences", "0"], "--sentences must be at least 1"),
        (["--sentences", "1000000"], "which is less than --sentences"),
    ],
)
def test_invalid_options_are_refused(few, arguments, message, capsys):
    assert main([*few, *arguments]) == 2
    assert message in capsys.readouterr().err

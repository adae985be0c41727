"""`hf-deqnar train` as a user runs it; what it trains is tested in tests/training."""

import gzip
import json

import pytest

from ..conftest import SENTENCES


@pytest.fixture
def data(tmp_path):
    rows = [json.dumps({"en": source, "de": target}) for source, target in SENTENCES * 4]
    file = tmp_path / "train.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as opened:
        opened.write("\n".join([*rows, json.dumps({"en": "", "de": "leer"})]) + "\n")
    return file


@pytest.fixture
def settings(tmp_path, data):
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"train_data: {data}\nvalidation_data: {data}\nvalidation_limit: 4\nsource: en\ntarget: de\nvocab_size: 400\n"
        "config: {length: ctc, d_model: 32, encoder_layers: 1, max_nfe: 4}\nobjective: ctc+glat\nmax_tokens: 200\n"
        "learning_rate: 1e-3\nwarmup_steps: 2\nmax_steps: 4\neval_strategy: steps\neval_steps: 2\nsave_steps: 2\n"
        f"logging_steps: 2\nuse_cpu: true\ncache_dir: {tmp_path / 'cache'}\n"
    )
    return file


def test_a_trained_model_translates_and_a_finished_run_is_not_repeated(run_process, tmp_path, settings, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    output = tmp_path / "first"
    done = run_process("train", settings, "--output_dir", output, "--report_to", "trackio", "--project", "test")
    assert done.returncode == 0, done.stderr
    assert "24 of 25 pairs are used (dropped: 1 empty); 400 tokens, " in done.stderr
    assert "'nfe'" in done.stdout + done.stderr
    assert any(b"nfe" in file.read_bytes() for file in (tmp_path / "trackio").rglob("*") if file.is_file())
    again = run_process("train", settings, "--output_dir", output, "--report_to", "none")
    assert again.returncode == 0, again.stderr
    assert f"{output} contains a finished run; nothing to do." in again.stderr
    translated = run_process("translate", "--model", output, "A man is riding a horse.")
    assert translated.returncode == 0, translated.stderr
    changed = run_process("train", settings, "--output_dir", output, "--learning_rate", "0.5")
    assert changed.returncode == 2
    expected = f"hf-deqnar train: {output} holds a run with learning_rate=0.001, but now it is 0.5; choose another"
    assert changed.stderr.strip().splitlines()[-1].startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["train", "teacher"])
def test_a_bare_command_learns_until_it_stops_improving(verb, tmp_path, data, run, caplog):
    """No schedule, no length model: only data, and what makes it small."""
    small = ["--config", "d_model=32", "encoder_layers=1", "decoder_layers=1", "--vocab_size", "400", "--use_cpu"]
    small += ["--learning_rate", "5e-3", "--max_tokens", "200", "--report_to", "none", "--disable_tqdm", "true"]
    small += ["--objective", "ctc+glat"] if verb == "train" else []
    corpus = ["--train_data", data, "--validation_data", data, "--validation_limit", "4", "--source", "en"]
    output = tmp_path / verb
    done = run(verb, *corpus, "--target", "de", "--output_dir", output, *small, "--logging_steps", "1")
    assert done.returncode == 0, done.stderr
    assert "too short" not in caplog.text
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    evaluations = [entry["eval_bleu"] for entry in history if "eval_bleu" in entry]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    rates = [entry["learning_rate"] for entry in history if "learning_rate" in entry]
    epochs = history[-1]["epoch"]
    assert len(evaluations) == epochs <= 100
    assert epochs < 100 or max(evaluations) > max(evaluations[:-10])
    assert losses[-1] < losses[0] / 3
    assert max(evaluations) > 50
    assert max(rates) == pytest.approx(5e-3, rel=0.05)
    if verb == "train":
        assert json.loads((output / "config.json").read_text())["length"] == "ctc"


def test_schedules_that_cannot_train_a_new_model_are_named(run, tmp_path, settings, caplog):
    quiet = ["--report_to", "none", "--disable_tqdm", "true", "--eval_steps", "9"]
    done = run("train", settings, "--output_dir", tmp_path / "a", *quiet, "--warmup_steps", "9")
    assert done.returncode == 0, done.stderr
    assert "The warm-up of 9 updates is longer than the run of 4" in caplog.text
    assert "This run is too short for a new model: 4 updates, " in caplog.text
    caplog.clear()
    lines = [line for line in settings.read_text().splitlines() if "config" not in line and "vocab_size" not in line]
    settings.write_text("\n".join(lines) + "\n")
    done = run("train", settings, "--output_dir", tmp_path / "b", *quiet, "--model", tmp_path / "a")
    assert done.returncode == 0, done.stderr
    assert "too short" not in caplog.text
    assert "warm-up" not in caplog.text


def test_samples_per_second_are_those_of_the_trained_pairs(run, tmp_path, settings):
    output = tmp_path / "run"
    done = run("train", settings, "--output_dir", output, "--max_steps", "-1", "--num_train_epochs", "3")
    assert done.returncode == 0, done.stderr
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    (entry,) = [entry for entry in history if "train_runtime" in entry]
    assert entry["train_samples_per_second"] * entry["train_runtime"] == pytest.approx(3 * 24, rel=0.05)
    evaluated = next(entry for entry in history if "eval_runtime" in entry)
    assert evaluated["eval_samples_per_second"] * evaluated["eval_runtime"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--objective", "ctc+glatt"], "'glatt' is unknown"),
        (["--config", "length=ctc", "d_model=1e2"], "Field 'd_model' expected int, got float"),
        (["--resume_from_checkpoint", "x"], "resume_from_checkpoint=x has no effect: training resumes automatically"),
        (["--objective", "glat"], "objective 'glat' needs config.length = 'predict'"),
        (["--max_length", "900"], "max_length=900, but the model takes 512 tokens; lower it."),
        (["--tokenizer", "x"], "vocab_size=400 is for new tokenizers, but x is used"),
        (["--model", "absent-folder"], "absent-folder has no tokenizer that can be loaded"),
        (["--train_data", "absent.jsonl"], "There is neither a file absent.jsonl nor a pair"),
        (["--target", "fr"], "line 1: no column fr; there are en, de."),
        (["--max_tokens", "10"], "tokens does not fit into max_tokens=10; raise the budget"),
        (["--eval_strategy", "no"], "is unused; set --eval_strategy steps or epoch"),
    ],
)
def test_bad_settings_are_one_readable_line(tmp_path, settings, flags, message, capsys):
    from hf_deqnar.cli.main import main

    status = main(["train", str(settings), "--output_dir", str(tmp_path / "bad"), "--report_to", "none", *flags])
    assert status == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("hf-deqnar train: ")
    assert message in last


def test_help_lists_the_flags_of_all_three_dataclasses(capsys):
    from hf_deqnar.cli.main import main

    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--preset", "--train_data", "--objective", "--learning_rate"))

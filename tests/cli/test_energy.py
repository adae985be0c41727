"""`hf-deqnar energy` as a user runs it; what it trains is tested in tests/training."""

import json

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from hf_deqnar.cli.main import main
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.training.energy_trainer import EnergyTrainer
from hf_deqnar.utils.locks import try_lock

from ..conftest import SENTENCES
from ..teachers import small_teacher


@pytest.fixture
def teacher(tmp_path, tokenizer):
    folder = tmp_path / "teacher"
    small_teacher(vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path, saved, teacher):
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"en": source, "de": target}) for source, target in SENTENCES * 4) + "\n")
    file = tmp_path / "settings.yaml"
    file.write_text(
        f"student: {saved['predict']}\nteacher: {teacher}\ntrain_data: {data}\nvalidation_data: {data}\n"
        "validation_limit: 6\nsource: en\ntarget: de\nmax_length: 60\nmax_tokens: 400\nlearning_rate: 1e-3\n"
        "max_nfe: 3\nmax_steps: 4\neval_strategy: steps\neval_steps: 2\nsave_strategy: steps\nsave_steps: 2\n"
        f"use_cpu: true\ndisable_tqdm: true\nreport_to: none\ncache_dir: {tmp_path / 'cache'}\n"
    )
    return file


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [cell.strip() for cell in line.strip("| ").split("|")]


def test_a_run_reports_its_improvement_and_is_resumed(run, tmp_path, settings, tokenizer, capsys):
    output = tmp_path / "energy"
    flags = ["energy", settings, "--output_dir", output, "--json", tmp_path / "figures.json"]
    done = run(*flags)
    assert done.returncode == 0, done.stderr
    assert "24 of 24 pairs are used (dropped: none)." in done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["result"]["discrete_energy"] < figures["student"]["discrete_energy"]
    for name, found in figures.items():
        assert row(done.stdout, name)[1] == f"{found['discrete_energy']:.2f}"
        assert row(done.stdout, name)[4] == f"{found['bleu']:.2f}"
    assert (output / "model.safetensors").is_file()
    assert (output / "tokenizer.json").is_file()

    assert main([*map(str, flags)]) == 0
    assert f"{output} contains a finished run; nothing to do." in capsys.readouterr().err
    again = json.loads((tmp_path / "figures.json").read_text())
    for name, found in figures.items():  # floating-point sums may differ between processes
        assert again[name] == pytest.approx(found, rel=1e-6)
    assert main([*map(str, flags), "--target_operator", "SX"]) == 2
    assert "holds a run with target_operator=ST, but now it is SX" in capsys.readouterr().err
    assert main([*map(str, flags), "--validation_limit", "5"]) == 2
    assert "holds a run with validation=" in capsys.readouterr().err
    model = small_teacher(vocabulary=len(tokenizer))
    model.final_logits_bias += 1
    model.save_pretrained(tmp_path / "teacher")
    assert main([*map(str, flags)]) == 2
    assert "holds a run with teacher_weights=" in capsys.readouterr().err


@pytest.mark.slow
def test_the_grid_has_the_layout_of_table_2_and_trains_only_what_is_missing(tmp_path, settings, capsys, monkeypatch):
    ignored = ("max_steps", "eval_strategy", "save_strategy")
    lines = [line for line in settings.read_text().splitlines() if not line.startswith(ignored)]
    settings.write_text("\n".join(lines))
    flags = ["energy", str(settings), "--operator_grid", "--grid_steps", "1", "--output_dir", str(tmp_path / "grid")]
    for flag, value in [("max_steps", "4"), ("num_train_epochs", "2.0"), ("target_operator", "SX")]:
        assert main([*flags, f"--{flag}", value]) == 2
        assert f"{flag}={value} has no effect on the operator grid: every pair" in capsys.readouterr().err
    trained, train = [], EnergyTrainer.train

    def cut_off_at_the_third(self, *rest, **options):
        trained.append((self.args.decoder_input_operator, self.args.target_operator))
        if len(trained) == 3:
            raise FloatingPointError("cut off")
        return train(self, *rest, **options)

    monkeypatch.setattr(EnergyTrainer, "train", cut_off_at_the_third)
    (tmp_path / "grid").mkdir()
    with try_lock(tmp_path / "grid" / "run.lock"):
        assert main(flags) == 2
    assert f"Another run is writing to {tmp_path / 'grid'};" in capsys.readouterr().err
    assert not trained
    assert main(flags) == 2
    assert trained == [("SX", "SX"), ("SX", "STL"), ("SX", "SG")]
    assert main([*flags, "--json", str(tmp_path / "figures.json")]) == 0
    assert len(trained) == 26
    assert trained[3] == trained[2]
    text = capsys.readouterr().out
    assert row(text, "O₁ \\ O₂") == ["O₁ \\ O₂", "SX", "STL", "SG", "ST", "GX"]
    cells = json.loads((tmp_path / "figures.json").read_text())["cells"]
    assert len(cells) == 25
    for fed in ("SX", "STL", "SG", "ST", "GX"):
        found = cells[f"{fed} ST"]
        assert row(text, fed)[4] == f"{found['discrete_energy']:.1f} ({found['reference_length_bleu']:.1f})"
    assert len({found["discrete_energy"] for found in cells.values()}) > 5
    assert main([*flags[:-3], "2", *flags[-2:]]) == 2
    assert "holds a run with max_steps=1, but now it is 2" in capsys.readouterr().err
    (tmp_path / "grid" / "grid.json").write_text("{}")
    assert main(flags) == 2
    assert f"{tmp_path / 'grid' / 'grid.json'} is damaged (" in capsys.readouterr().err


def test_bad_settings_are_one_readable_line(tmp_path, settings, saved, teacher, tokenizer, capsys):
    decoder_only, other, absent = tmp_path / "gpt", tmp_path / "other", tmp_path / "absent"
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=len(tokenizer))).save_pretrained(decoder_only)
    small_teacher(vocabulary=300).save_pretrained(other)
    train_tokenizer([text for pair in SENTENCES for text in pair], vocab_size=300).save_pretrained(other)
    cases = [
        (["--teacher", decoder_only], "gpt contains a gpt2 model, which cannot translate; name a seq2seq model."),
        (["--teacher", other], f"(300 tokens) differs from the model's ({len(tokenizer)}): '"),
        (["--teacher", absent], "absent is neither a model directory nor a model on the Hub."),
        (["--teacher", saved["predict"]], "a DeqNarForConditionalGeneration, does not accept decoder_inputs_embeds"),
        (["--student", teacher], "is a marian model; the student must be a deqnar model."),
        (["--student", saved["ctc"]], "needs config.length = 'predict', but this model has 'ctc'"),
        (["--target_operator", "STT"], "target_operator='STT' is unknown; choose one of SX, STL, SG, ST, GX."),
        (["--max_length", "100"], "max_length=100, but the teacher supports 64 tokens; lower it."),
        (["--grid_steps", "0"], "grid_steps must be at least 1, not 0."),
        (["--grid_steps", "5"], "grid_steps=5 has no effect without --operator-grid."),
        (["--pair_size", "big"], "pair_size=big has no effect without --student bilstm --teacher lstm."),
        (["--train_limit", "0"], "train_limit must be at least 1, not 0."),
        (["--validation_limit", "0"], "validation_limit must be at least 1, not 0."),
        (["--output_dir", settings], f"output_dir={settings} cannot be made (File exists); choose another."),
        (["--json", tmp_path], f"{tmp_path} is a folder; name a file."),
        (["--json", "absent-folder/file.json"], "There is no folder absent-folder to write file.json into."),
    ]
    for flags, message in cases:
        status = main(["energy", str(settings), "--output_dir", str(tmp_path / "bad"), *map(str, flags)])
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert (status, message in last, last[:18]) == (2, True, "hf-deqnar energy: "), last
    text = settings.read_text()
    settings.write_text("\n".join(line for line in text.splitlines() if not line.startswith("validation_")))
    assert main(["energy", str(settings), "--output_dir", str(tmp_path / "bad")]) == 2
    assert "Give --validation_data: the energy on it selects" in capsys.readouterr().err


def test_help_lists_the_flags_of_all_three_dataclasses(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["energy", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--student", "--operator_grid", "--train_data", "--target_operator"))


@pytest.mark.slow
def test_the_recurrent_pair_is_trained_from_the_texts(tmp_path, capsys):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"en": source, "de": target}) for source, target in SENTENCES * 4))
    flags = ["energy", "--student", "bilstm", "--teacher", "lstm", "--pair_steps", 4, "--pair_vocab_size", 400]
    flags += ["--train_data", file, "--validation_data", file, "--validation_limit", 4, "--source", "en"]
    flags += ["--target", "de", "--max_tokens", 200, "--max_steps", 2, "--use_cpu", "--report_to", "none"]
    flags += ["--disable_tqdm", "true", "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]
    assert main([str(part) for part in flags]) == 0
    assert row(capsys.readouterr().out, "result")
    kinds = {name: json.loads((tmp_path / "run" / name / "config.json").read_text()) for name in ("student", "teacher")}
    assert kinds["student"]["architecture"] == "bilstm"
    assert kinds["teacher"]["model_type"] == "deqnar_recurrent"
    assert main([str(part) for part in ["energy", "--student", "bilstm", "--teacher", tmp_path, *flags[5:]]]) == 2
    assert "The recurrent models are trained together" in capsys.readouterr().err
    assert main([str(part) for part in [*flags, "--optimizer", "muon"]]) == 2
    assert "optimizer=muon does not support LSTMs" in capsys.readouterr().err

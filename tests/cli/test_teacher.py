"""`hf-deqnar teacher`: a small run, repeated, whose result other tools load."""

import json

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, ByT5Tokenizer

from hf_deqnar.cli.main import main
from hf_deqnar.utils.locks import try_lock

from ..conftest import SENTENCES


@pytest.fixture
def arguments(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"en": source, "de": target}) for source, target in SENTENCES * 4))
    found = ["teacher", "--train_data", file, "--validation_data", file, "--validation_limit", 4, "--source", "en"]
    found += ["--target", "de", "--vocab_size", 400, "--size", "tiny", "--config", "d_model=32", "decoder_layers=1"]
    found += ["--max_tokens", 200, "--warmup_steps", 2, "--max_steps", 4, "--eval_strategy", "steps", "--eval_steps", 2]
    found += ["--save_steps", 2, "--use_cpu", "--report_to", "none", "--cache_dir", tmp_path / "cache"]
    return [str(part) for part in [*found, "--output_dir", tmp_path / "teacher"]]


def test_a_teacher_is_trained_and_can_be_loaded_by_transformers(arguments, tmp_path, capsys):
    assert main(arguments) == 0
    assert "24 of 24 pairs are used (dropped: none); 400 tokens" in capsys.readouterr().err
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher")
    assert (model.config.model_type, model.config.d_model, model.config.decoder_layers) == ("marian", 32, 1)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "teacher")) == 400
    assert main(arguments) == 0
    assert f"{tmp_path / 'teacher'} contains a finished run; nothing to do." in capsys.readouterr().err
    assert main([*arguments, "--vocab_size", "300"]) == 2
    assert "tokenizer was trained on other texts or for another vocab_size" in capsys.readouterr().err


def test_training_continues_from_a_trained_teacher(arguments, saved, tmp_path, capsys):
    assert main(arguments) == 0
    first = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher")
    rest = [part for part in arguments if part not in ("--config", "d_model=32", "decoder_layers=1", "--size", "tiny")]
    rest = [*rest[:-1], str(tmp_path / "on"), "--learning_rate", "1e-9", "--average_best", "1"]
    rest = [part for part in rest if part not in ("--vocab_size", "400")]
    capsys.readouterr()
    assert main([*rest, "--model", str(tmp_path / "teacher")]) == 0, capsys.readouterr().err
    second = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "on")
    assert second.config.d_model == 32
    for name, weight in first.named_parameters():
        torch.testing.assert_close(second.get_parameter(name), weight, atol=1e-6, rtol=0)
    shallow = [*rest[:-5], str(tmp_path / "shallow"), *rest[-4:], "--model", str(tmp_path / "teacher")]
    assert main([*shallow, "--config", "encoder_layers=1", "dropout=0.3"]) == 0, capsys.readouterr().err
    third = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "shallow")
    assert (third.config.encoder_layers, third.config.dropout) == (1, 0.3)
    for name, weight in third.named_parameters():
        torch.testing.assert_close(first.get_parameter(name), weight, atol=1e-6, rtol=0)
    BartConfig().save_pretrained(tmp_path / "bart")
    AutoTokenizer.from_pretrained(tmp_path / "teacher").save_pretrained(tmp_path / "bart")
    for more, message in [
        (["--model", str(tmp_path / "teacher"), "--size", "tiny"], "has a size of its own; leave out --size"),
        (["--model", str(tmp_path / "teacher"), "--config", "d_model=16"], "has a d_model of its own; --config can"),
        (
            ["--model", str(tmp_path / "teacher"), "--config", "decoder_layers=2"],
            "decoder_layers=2 is not possible",
        ),
        (["--model", str(saved["ctc"]), "--config", "decoder_layers=0"], "decoder_layers=0 is not possible with"),
        (["--model", str(tmp_path / "bart")], "is a bart model; training of a teacher can start from a marian model"),
    ]:
        capsys.readouterr()
        assert main([*rest[:-5], str(tmp_path / "other"), *rest[-4:], *more]) == 2
        assert message in capsys.readouterr().err


def test_a_teacher_is_initialised_from_a_parallel_model(arguments, saved, tmp_path, capsys):
    left_out = ("--config", "d_model=32", "decoder_layers=1", "--size", "tiny", "--vocab_size", "400")
    rest = [part for part in arguments if part not in left_out]
    assert main([*rest, "--model", str(saved["ctc"]), "--config", "decoder_layers=2"]) == 0, capsys.readouterr().err
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "teacher")
    student = AutoModelForSeq2SeqLM.from_pretrained(saved["ctc"])
    assert (model.config.model_type, model.config.decoder_layers) == ("marian", 2)
    assert model.config.d_model == student.config.d_model


def test_a_finished_model_is_not_overwritten_and_two_runs_do_not_share_a_folder(arguments, tmp_path, capsys):
    assert main([*arguments, "--save_strategy", "no"]) == 0
    weights = (tmp_path / "teacher" / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert main([*arguments, "--save_strategy", "no", "--seed", "7"]) == 2
    assert "holds a run with seed=42, but now it is 7" in capsys.readouterr().err
    assert (tmp_path / "teacher" / "model.safetensors").read_bytes() == weights
    with try_lock(tmp_path / "teacher" / "run.lock") as acquired:
        assert acquired
        assert main(arguments) == 2
    assert f"Another run is writing to {tmp_path / 'teacher'}" in capsys.readouterr().err
    lock = tmp_path / "teacher" / "run.lock"
    lock.write_text("{}")
    assert main(arguments) == 2
    assert f"or, if there is none, remove {lock}." in capsys.readouterr().err
    lock.unlink()
    for content in ("", '{"settings": {', "{}"):
        (tmp_path / "teacher" / "run.json").write_text(content)
        assert main(arguments) == 2
        assert f"{tmp_path / 'teacher' / 'run.json'} is damaged (" in capsys.readouterr().err
    (tmp_path / "teacher" / "run.json").unlink()
    assert main(arguments) == 2
    assert "contains a model or checkpoints of another run" in capsys.readouterr().err


def test_few_positions_are_enough_for_validation(arguments):
    assert main([*arguments, "--config", "d_model=32", "max_position_embeddings=32", "--max_length", "30"]) == 0


def test_a_slow_tokenizer_is_one_readable_line(arguments, tmp_path, capsys):
    slow = ByT5Tokenizer(bos_token="<s>", extra_special_tokens=["<mask>", "<blank>"])
    slow.save_pretrained(tmp_path / "slow")
    place = arguments.index("--vocab_size")
    arguments[place : place + 2] = ["--tokenizer", str(tmp_path / "slow")]
    for verb in ("teacher", "train"):
        flags = [flag for flag in arguments[1:] if verb == "teacher" or flag not in ("--size", "tiny")]
        assert main([verb, *flags]) == 2
        assert "Training needs a fast tokenizer, and ByT5Tokenizer is a slow one" in capsys.readouterr().err


def test_bad_settings_are_one_readable_line(arguments, capsys):
    assert main([*arguments, "--size", "huge"]) == 2
    assert capsys.readouterr().err.strip() == (
        "hf-deqnar teacher: size 'huge' is unknown; choose one of tiny, small, base, big."
    )

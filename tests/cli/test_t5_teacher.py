"""A T5 teacher on the command line: its layers cannot be converted, but distillation and energy training work."""

import json

import pytest

from hf_deqnar.cli.main import main
from hf_deqnar.data.parallel_text import read_parallel

from ..conftest import SENTENCES
from ..teachers import small_teacher

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

PREFIX = "translate English to German: "


@pytest.fixture
def teacher(tmp_path, tokenizer):
    folder = tmp_path / "t5"
    small_teacher("t5", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"en": source, "de": target}) + "\n" for source, target in SENTENCES * 2))
    return str(path)


def test_t5_teacher_can_be_distilled(teacher, data, tmp_path):
    output = str(tmp_path / "distilled.jsonl.gz")
    columns = ["--data", data, "--source", "en", "--target", "de", "--output", output]
    options = ["--num_beams", "2", "--max_length", "60", "--source_prefix", PREFIX]
    assert main(["distill", "--teacher", teacher, *columns, *options]) == 0
    pairs = read_parallel(output, "en", "de")
    assert [pair.source for pair in pairs] == [source for source, _ in SENTENCES * 2]
    assert all(pair.references[0] for pair in pairs)


def test_student_trains_with_the_energy_of_a_t5_teacher(saved, teacher, data, tmp_path):
    output, figures = tmp_path / "energy", tmp_path / "figures.json"
    names = ["--student", str(saved["predict"]), "--teacher", teacher, "--output_dir", str(output)]
    texts = ["--train_data", data, "--validation_data", data, "--source", "en", "--target", "de", "--max_length", "60"]
    steps = ["--max_steps", "4", "--eval_strategy", "steps", "--eval_steps", "2", "--save_strategy", "no"]
    options = ["--learning_rate", "1e-3", "--max_tokens", "400", "--max_nfe", "3", "--use_cpu", "true"]
    quiet = ["--disable_tqdm", "true", "--report_to", "none", "--json", str(figures)]
    assert main(["energy", *names, *texts, *steps, *options, *quiet]) == 0
    found = json.loads(figures.read_text())
    assert found["result"]["discrete_energy"] < found["student"]["discrete_energy"]
    assert (output / "model.safetensors").is_file()


def test_starting_from_a_t5_teacher_is_refused_in_one_line(teacher, data, tmp_path, capsys):
    flags = ["--teacher", teacher, "--train_data", data, "--source", "en", "--target", "de"]
    assert main(["train", *flags, "--output_dir", str(tmp_path / "run"), "--max_steps", "1", "--use_cpu", "true"]) == 2
    message = [line for line in capsys.readouterr().err.splitlines() if "from_teacher" in line]
    assert len(message) == 1
    assert "converts marian and bart models" in message[0]
    assert "hf-deqnar distill --teacher" in message[0]

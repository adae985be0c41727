"""`hf-deqnar distill`, and `hf-deqnar train` on its output."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from hf_deqnar.cli.main import main
from hf_deqnar.data.parallel_text import read_parallel

from ..conftest import SENTENCES
from ..distillation.conftest import make_teacher

sentence_chrf = pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra").sentence_chrf

SCRIPT = Path(__file__).parents[2] / "scripts" / "distill.py"
QUICK = ["--num_beams", "2", "--max_length", "20", "--shard_sentences", "5"]


@pytest.fixture(scope="module")
def folder(tokenizer, tmp_path_factory):
    """Two teachers and a corpus, in which every third sentence has a second reference."""
    folder = tmp_path_factory.mktemp("distill")
    for name, size in (("tiny", 0.6), ("big", 1.0)):
        teacher = make_teacher(tokenizer, name, size)
        teacher.model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    rows = [
        {"en": f"{source} {number}", "de": [target, f"Nun: {target}"] if number % 3 == 0 else target}
        for number, (source, target) in enumerate(SENTENCES * 4)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def columns(folder) -> list[str]:
    return ["--data", str(folder / "data.jsonl"), "--source", "en", "--target", "de"]


def last_line(capsys) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.mark.slow
def test_two_processes_of_the_script_share_the_work(folder, tmp_path):
    output = tmp_path / "distilled.jsonl.gz"
    command = [sys.executable, SCRIPT, "--teacher", folder / "tiny", *columns(folder), *QUICK, "--output", output]
    running = [
        subprocess.Popen(
            list(map(str, command)),
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert b"24 sentences" in outputs[0][0]
    assert outputs[1][0] == b""
    sources = [pair.source for pair in read_parallel(output, "en", "de")]
    assert sources == [pair.source for pair in read_parallel(folder / "data.jsonl", "en", "de")]
    single = tmp_path / "alone.jsonl.gz"
    command = ["distill", "--teacher", folder / "tiny", *columns(folder), *QUICK, "--output", single]
    assert main(list(map(str, command))) == 0
    assert single.read_bytes() == output.read_bytes()


def test_a_repeated_source_is_translated_once(folder, tmp_path):
    rows = [{"en": english, "de": german} for english, german in SENTENCES]
    data, output = tmp_path / "data.jsonl", tmp_path / "distilled.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *reversed(rows)]))
    command = [
        "distill",
        "--teacher",
        str(folder / "tiny"),
        "--data",
        str(data),
        str(data),
        "--source",
        "en",
        "--target",
        "de",
    ]  # also in several files
    assert main([*command, *QUICK, "--unique", "--output", str(output)]) == 0
    assert [pair.source for pair in read_parallel(output, "en", "de")] == [english for english, _ in SENTENCES]


def test_the_share_of_wrong_targets_is_reported(folder, tmp_path, capsys):
    output = tmp_path / "distilled.jsonl"
    command = ["distill", "--teacher", str(folder / "tiny"), *columns(folder), *QUICK, "--output", str(output)]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert re.search(r"tiny: chrF against the references \d+\.\d on average; \d+\.\d\d% of the transl", printed.out)
    assert re.search(r"WARNING: \d+\.\d% of the targets of .*tiny are below 30 chrF .* --min_chrf 30", printed.err)
    assert main([*command, "--min_chrf", "30", "--reference_share", "0.1"]) == 0
    printed = capsys.readouterr()
    assert "are replaced by the reference for that" in printed.out
    assert "WARNING" not in printed.err
    pairs = read_parallel(folder / "data.jsonl", "en", "de")
    assert all(
        max(sentence_chrf(one.references[0], [text]).score for text in pair.references) >= 30
        for one, pair in zip(read_parallel(output, "en", "de"), pairs, strict=True)
    )


def test_several_teachers_gamma_and_training_on_their_candidates(folder, tmp_path, capsys):
    output = tmp_path / "candidates.jsonl"
    teachers = ["--teacher", str(folder / "tiny"), str(folder / "big")]
    assert main(["distill", *teachers, *columns(folder), *QUICK, "--output", str(output)]) == 0
    assert f"written to {output}" in capsys.readouterr().out
    assert (tmp_path / "candidates.big.jsonl.statistics.json").is_file()
    first = json.loads(output.read_text().splitlines()[0])
    assert first["de"] == first["candidates"][-1] == SENTENCES[0][1]
    assert len(first["candidates"]) == 3

    tune = ["distill", "--tune-gamma", str(output), "--source", "en", "--target", "de"]
    assert main([*tune, "--references", str(folder / "data.jsonl")]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("--gamma ")
    assert len(printed.out.split()) == 4
    assert "8 of 24 sentences have some" in printed.err

    train = ["train", "--train_data", str(output), "--source", "en", "--target", "de", "--vocab_size", "400"]
    train += ["--validation_data", str(folder / "data.jsonl"), "--validation_limit", "4", "--eval_strategy", "steps"]
    train += ["--config", "length=ctc", "d_model=32", "encoder_layers=1", "max_nfe=4", "--use_cpu", "--eval_steps", "2"]
    train += ["--objective", "dynamic_kd+ctc+glat", "--max_tokens", "400", "--max_steps", "2", "--warmup_steps", "1"]
    train += ["--cache_dir", str(tmp_path / "cache"), "--report_to", "none", "--max_length", "100"]
    assert main([*train, "--output_dir", str(tmp_path / "run")]) == 0
    assert "gamma is 1 1 1; " in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").is_file()
    assert main([*train, "--output_dir", str(tmp_path / "other"), "--gamma", "1", "2"]) == 2
    assert "gamma has 2 weights but the data 3 candidates per sentence" in last_line(capsys)
    train[2] = str(folder / "data.jsonl")
    assert main([*train, "--output_dir", str(tmp_path / "other")]) == 2
    assert "has no candidates for Dynamic KD" in last_line(capsys)


def test_errors_are_one_readable_line(folder, tokenizer, tmp_path, capsys):
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=400)).save_pretrained(folder / "gpt")
    make_teacher(tokenizer).model.save_pretrained(folder / "mute")
    names = ["--source", "en", "--target", "de"]
    full = ["--teacher", str(folder / "tiny"), *columns(folder), "--output", str(tmp_path / "out.jsonl")]
    for arguments, message in [
        (names, "--teacher, --data and --output are required"),
        ([*full, "--teacher", "a", "a"], "A teacher is named twice"),
        ([*full, "--teacher", str(tmp_path / "absent")], "is neither a model directory nor a model"),
        ([*full, "--teacher", str(folder / "tiny"), str(tmp_path / "absent")], "is neither a model directory nor a"),
        ([*full, "--teacher", str(folder / "tiny"), str(folder / "gpt")], "contains a gpt2 model, which cannot"),
        ([*full, "--teacher", str(folder / "tiny"), str(folder / "mute")], "mute has no tokenizer that can be loaded"),
        ([*full, "--output", str(tmp_path / "no" / "out.jsonl")], "There is no folder"),
        ([*full, "--output", str(tmp_path / "out.txt")], "should end in .jsonl.gz or .jsonl"),
        ([*full, "--forced_bos_token", "deu_Latn"], "tiny has no token 'deu_Latn' to begin translations with"),
        ([*full, "--min_chrf", "0"], "min_chrf must be above 0"),
        ([*full, "--reference_share", "2"], "reference_share must be from 0 to 1"),
        ([*names, "--tune_gamma", "c.jsonl", "--min_chrf", "9"], "min_chrf has no effect with tune_gamma"),
        ([*full, "--limit", "0"], "limit must be at least 1"),
        ([*full, "--process", "2", "--processes", "2"], "process 2 is not one of 2"),
        ([*full, "--beams", "2"], "'--beams' is not understood"),
        ([*full, "--references", "r.jsonl"], "references has no effect without tune_gamma"),
        ([*names, "--tune_gamma", "c.jsonl", "--process", "0"], "process has no effect with tune_gamma"),
        ([*names, "--tune_gamma", "c.jsonl", "--num_beams", "2"], "num_beams has no effect with tune_gamma"),
        ([*names, "--tune_gamma", "c.jsonl"], "--tune_gamma needs --references"),
    ]:
        assert main(["distill", *arguments]) == 2, arguments
        line = last_line(capsys)
        assert line.startswith("hf-deqnar distill: ")
        assert message in line
    assert not list(tmp_path.iterdir())


def test_a_rank_that_is_no_number_is_one_readable_line(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "first")
    assert main(["distill", "--source", "en", "--target", "de"]) == 2
    assert last_line(capsys).startswith("hf-deqnar distill: RANK='first' in the environment is not a number;")


def test_gamma_is_tuned_only_on_the_sentences_the_candidates_were_made_for(folder, tmp_path, capsys):
    other = tmp_path / "candidates.jsonl"
    other.write_text(json.dumps({"en": "Other.", "de": "Anders.", "candidates": ["a", "Anders."]}) + "\n")
    names = ["--source", "en", "--target", "de", "--references", str(folder / "data.jsonl")]
    assert main(["distill", "--tune_gamma", str(other), *names]) == 2
    assert "do not have the same sentences in order" in last_line(capsys)


def shares(folder, output, *flags) -> list[str]:
    return ["distill", "--teacher", str(folder / "tiny"), *columns(folder), *QUICK, "--output", str(output), *flags]


def test_a_slurm_array_of_torchrun_processes_divides_the_shards(folder, tmp_path, monkeypatch, capsys):
    """Two tasks, numbered from 1, with two processes each."""
    output, alone = f"file://{tmp_path}/out.jsonl", tmp_path / "alone.jsonl"
    assert main(shares(folder, alone)) == 0
    capsys.readouterr()
    for name, value in {"MIN": "1", "MAX": "2", "COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for number, (task, rank) in enumerate([("1", "0"), ("1", "1"), ("2", "0"), ("2", "1")]):
        assert not (tmp_path / "out.jsonl").exists()
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", task)
        monkeypatch.setenv("RANK", rank)
        assert main(shares(folder, output)) == 0
        printed = capsys.readouterr().out
        if number < 3:
            assert f"The shards of process {number} of 4 are finished. " in printed
    assert f"written to {output}" in printed
    assert (tmp_path / "out.jsonl").read_bytes() == alone.read_bytes()
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "9")
    assert main(shares(folder, tmp_path / "other.jsonl", "--shard", "0/1")) == 0
    assert main(shares(folder, output)) == 2
    assert "The Slurm array has gaps (2 tasks from 1 to 9)" in capsys.readouterr().err


def test_shares_are_joined_by_a_later_command(folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl.gz"
    assert main(shares(folder, output, "--shard", "1/2")) == 0
    assert "3 of 5 shards of" in capsys.readouterr().out
    assert main(shares(folder, output, "--join")) == 2
    assert "3 of 5 shards of" in last_line(capsys)
    assert not output.exists()
    assert main(shares(folder, output, "--shard", "0/2")) == 0
    joined = output.read_bytes()
    output.unlink()
    assert main(shares(folder, output, "--join")) == 0
    assert output.read_bytes() == joined


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shard", "2/2"], "--shard 2/2 should be I/N with I from 0 to N − 1"),
        (["--shard", "0/2", "--processes", "2"], "leave out --process and --processes"),
        (["--part_format", "parquet"], "part_format is about an output that is a folder of parts"),
        (["--ray_actors", "3"], "ray_actors has no effect without --ray"),
        (["--ray", "local", "--shard", "0/2"], "--ray translates all shards"),
        (["--join", "--teacher", "a", "b"], "Several teachers are distilled into a local file"),
    ],
)
def test_options_of_shares_without_effect_are_refused(folder, tmp_path, capsys, flags, message):
    assert main(shares(folder, tmp_path / "out.jsonl", *flags)) == 2
    assert message in last_line(capsys)
    assert not list(tmp_path.iterdir())

import json
import re
import shutil
import subprocess
import sys

import pytest
from transformers import BertConfig, BertModel, pipeline

import hf_deqnar
from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.line_translation import Line, generate_settings, show
from hf_deqnar.cli.main import main
from hf_deqnar.cli.translate import TranslationArguments
from hf_deqnar.utils.arguments import parse_arguments

from ..conftest import SENTENCES
from ..models.deqnar.test_generation_deqnar import reranker

ENGLISH = [english for english, _ in SENTENCES]


@pytest.fixture(scope="module")
def expected(saved):
    return [record["translation_text"] for record in pipeline("translation", model=str(saved["ctc"]))(ENGLISH)]


def test_sentences_can_be_arguments(run_process, saved, expected):
    done = run_process("translate", "--model", saved["ctc"], *ENGLISH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join(text.splitlines()) for text in expected]
    assert done.stderr == ""


def test_standard_input_with_either_line_end(run_process, saved, expected):
    for line_end in ("\n", "\r\n"):
        done = run_process("translate", "--model", saved["ctc"], stdin=line_end.join(ENGLISH).encode())
        assert done.stdout.splitlines() == expected


def test_a_byte_order_mark_is_not_translated(run, saved, expected):
    done = run("translate", "--model", saved["ctc"], stdin=b"\xef\xbb\xbf" + "\r\n".join(ENGLISH).encode())
    assert done.stdout.splitlines() == expected
    assert done.stderr == ""


def test_a_model_that_returns_two_sequences_prints_one_a_line(run, saved, tmp_path):
    """The output has one line per input line, for any saved options of the model."""
    model = DeqNarForConditionalGeneration.from_pretrained(saved["ctc"])
    model.generation_config.update(ctc_beam_size=4, num_return_sequences=2)
    shutil.copytree(saved["ctc"], tmp_path / "two")
    model.save_pretrained(tmp_path / "two")
    one = run("translate", "--model", saved["ctc"], "--ctc-beam-size", "4", *ENGLISH)
    two = run("translate", "--model", tmp_path / "two", *ENGLISH)
    assert two.returncode == 0, two.stderr
    assert two.stdout == one.stdout


def test_a_file_in_small_batches_keeps_its_order(run, saved, expected, tmp_path):
    file = tmp_path / "corpus.en"
    file.write_text("\n".join(ENGLISH) + "\n", encoding="utf-8")
    done = run("translate", "--model", saved["ctc"], "--input", file, "--batch-size", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected


def test_an_invalid_line_does_not_affect_the_others(run, saved, expected, tmp_path):
    file = tmp_path / "corpus.en"
    long = "word " * 2000
    lines = [ENGLISH[0].encode(), b"caf\xe9", b"", long.encode(), ENGLISH[1].encode(), b"nul\x00byte", b"  "]
    file.write_bytes(b"\n".join(lines) + b"\n")
    done = run("translate", "--model", saved["ctc"], "--input", file, "--no_split_sentences")
    assert done.returncode == 1
    answers = done.stdout.split("\n")
    assert len(answers) == 8
    assert answers[0] == expected[0]
    assert answers[1:4] == ["", "", ""]
    assert answers[4] == expected[1]
    assert answers[6] == ""
    messages = done.stderr.strip().splitlines()
    assert len(messages) == 2
    assert f"{file}, line 2: not valid UTF-8 at byte 4" in messages[0]
    assert f"{file}, line 4: A text of" in messages[1]
    assert "too long" in messages[1]
    assert "Traceback" not in done.stderr


def test_a_line_of_several_sentences_is_one_line_of_output(run, saved, expected):
    lines = [f"{ENGLISH[0]}  {ENGLISH[1]}", "word " * 200, "123", ENGLISH[2]]
    done = run("translate", "--model", saved["ctc"], stdin="\n".join(lines).encode())
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answers = done.stdout.split("\n")
    assert answers[0] == f"{expected[0]}  {expected[1]}"
    assert answers[1]
    assert answers[2:] == ["123", expected[2], ""]
    watched = run("translate", "--model", saved["ctc"], "--watch", lines[0], "123").stdout
    assert [line for line in watched.split("\n") if line.startswith("  =>  ")] == [
        *(f"  =>  {' '.join(text.split())}" for text in expected[:2]),
        "  =>  123",
    ]


def test_a_line_too_long_for_the_reranker_does_not_affect_the_others(run, saved, tokenizer, tmp_path):
    """The model takes 128 tokens, the reranker 64."""
    reranker(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    lines = [ENGLISH[0], "z" * 80, ENGLISH[1]]
    options = ["--length-beams", "2", "--reranker", tmp_path]
    done = run("translate", "--model", saved["predict"], *options, stdin="\n".join(lines).encode())
    assert done.returncode == 1
    assert "stdin, line 2: A text of" in done.stderr
    assert "too long for the reranker" in done.stderr
    answers = done.stdout.split("\n")
    assert answers[1] == ""
    assert len(answers) == 4


def test_an_argument_that_is_not_unicode_does_not_affect_the_others(saved, expected):
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", "--model", str(saved["ctc"])]
    done = subprocess.run([*command, b"caf\xe9", ENGLISH[0].encode()], capture_output=True, check=False)
    assert done.returncode == 1
    assert b"argument, line 1: A text is not valid Unicode" in done.stderr
    assert done.stdout.decode().split("\n")[:2] == ["", expected[0]]


def test_json_lines_contain_the_figures(run, saved, expected):
    done = run("translate", "--model", saved["ctc"], "--jsonl", stdin=f"{ENGLISH[0]}\n\n".encode() + b"\xff\n")
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert first["source"] == ENGLISH[0]
    assert first["text"] == expected[0]
    assert {"nfe", "residual", "score", "converged"} <= set(first)
    assert second["text"] == ""
    assert third == {"line": 3, "error": "not valid UTF-8 at byte 1"}
    assert done.returncode == 1


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_nbest_prints_line_rank_and_text(run, saved, length):
    done = run("translate", "--model", saved[length], "--nbest", "3", *ENGLISH[:2])
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    for sentence in ("1", "2"):  # a beam may contain fewer different texts
        ranks, texts = zip(*(row[1:3] for row in rows if row[0] == sentence), strict=True)
        assert 1 <= len(ranks) <= 3
        assert list(ranks) == [str(rank) for rank in range(1, len(ranks) + 1)]
        assert len(set(texts)) == len(texts)
    done = run("translate", "--model", saved[length], "--nbest", "3", "--jsonl", ENGLISH[0])
    assert [json.loads(line)["rank"] for line in done.stdout.splitlines()] == [
        int(row[1]) for row in rows if row[0] == "1"
    ]


def test_an_nbest_list_does_not_narrow_the_models_own_beam(saved):
    model = DeqNarForConditionalGeneration.from_pretrained(saved["ctc"])
    model.generation_config.update(ctc_beam_size=7)
    for flags, beams in (([], 7), (["--nbest", "9"], 9), (["--ctc-beam-size", "4"], 4)):
        (options,) = parse_arguments([TranslationArguments], ["--nbest", "3", *flags, "hello"])
        assert generate_settings(options, model)["ctc_beam_size"] == beams


def test_an_nbest_list_does_not_narrow_another_models_search(tokenizer):
    model = reranker(len(tokenizer))
    for own, beams in ((6, 6), (1, 2)):
        model.generation_config.num_beams = own
        (options,) = parse_arguments([TranslationArguments], ["--nbest", "2", "hello"])
        assert generate_settings(options, model) == {"num_beams": beams, "num_return_sequences": 2}


def test_a_duplicate_has_no_score_in_json(capsys):
    (options,) = parse_arguments([TranslationArguments], ["--nbest", "2", "--jsonl", "Hi."])
    texts = [{"translation_text": "Hallo.", "score": score} for score in (-0.5, float("-inf"))]
    show(Line(1, "Hi."), texts, options)
    assert [json.loads(line, parse_constant=pytest.fail)["score"] for line in capsys.readouterr().out.splitlines()] == [
        -0.5,
        None,
    ]


def test_beams_passes_and_a_reranker_can_be_combined(run, saved, tokenizer, tmp_path):
    reranker(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = ["--length-beams", "3", "--passes", "2", "--max-nfe", "7", "--tol", "1e-2", "--reranker", tmp_path]
    done = run("translate", "--model", saved["predict"], *options, "--jsonl", ENGLISH[0])
    assert done.returncode == 0, done.stderr
    assert 2 <= json.loads(done.stdout)["nfe"] <= 14


def test_watch_prints_drafts_and_then_the_translation(run, saved, expected):
    done = run("translate", "--model", saved["ctc"], "--watch", ENGLISH[0], "", ENGLISH[1])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == ENGLISH[0]
    assert lines[1].startswith("   1  ")
    answers = [line for line in lines if line.startswith("  =>  ")]
    assert answers == [f"  =>  {' '.join(text.split())}" for text in expected[:2]]
    figures = lines[lines.index(answers[1]) + 1]
    assert re.fullmatch(
        r"      (converged|stopped) after \d+ evaluations of the decoder, residual \d\.\de-\d\d", figures
    )
    after_the_first = lines.index(answers[0]) + 2
    assert lines[after_the_first : after_the_first + 3] == ["", "", ENGLISH[1]]  # the empty sentence between them


def test_the_bundled_model_is_the_default(saved, expected, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hf_deqnar, "PRETRAINED", str(saved["ctc"]))
    assert main(["translate", *ENGLISH]) == 0
    assert capsys.readouterr().out.splitlines() == [" ".join(text.splitlines()) for text in expected]
    records = pipeline("translation", model=hf_deqnar.PRETRAINED)(ENGLISH)
    assert [record["translation_text"] for record in records] == expected
    monkeypatch.setattr(hf_deqnar, "PRETRAINED", str(tmp_path / "absent"))
    assert main(["translate", "hello"]) == 2
    output = "hf-deqnar translate: This installation has no bundled model; name a model with --model.\n"
    assert capsys.readouterr().err == output


def test_translations_are_printed_while_the_input_is_open(saved, expected):
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", "--model", str(saved["ctc"])]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        for sentence, translation in zip(ENGLISH[:2], expected, strict=False):
            process.stdin.write(f"{sentence}\n".encode())
            process.stdin.flush()
            assert process.stdout.readline().decode().rstrip("\n") == translation
        process.stdin.close()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_a_closed_pipe_is_not_an_error(saved, tmp_path):
    file = tmp_path / "corpus.en"
    file.write_text("\n".join(ENGLISH * 200) + "\n", encoding="utf-8")
    command = f"{sys.executable} -m hf_deqnar.cli.main translate --model {saved['ctc']} --input {file} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1


def test_errors_are_one_readable_line(run, saved, tokenizer, tmp_path):
    bert = tmp_path / "bert"
    BertModel(BertConfig(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)).save_pretrained(
        bert
    )
    other = tmp_path / "other"
    reranker(len(tokenizer) + 5).save_pretrained(other)
    tokenizer.save_pretrained(other)
    bare = tmp_path / "bare"
    reranker(len(tokenizer)).save_pretrained(bare)
    teacher = tmp_path / "teacher"
    reranker(len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved["predict"], damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:1000])
    model = ["--model", saved["predict"]]
    for arguments, message in [
        (["--model", tmp_path / "nothing", "hello"], "neither a model directory nor a model on the Hub"),
        (["--model", tmp_path, "hello"], "is a directory without a config.json"),
        (["--model", bert, "hello"], "contains a bert model, which cannot translate"),
        (["--model", bare, "hello"], "has no tokenizer that can be loaded"),
        (["--model", teacher, "--length-beams", "3", "hello"], "--length_beams needs a deqnar model"),
        ([*model, "--input", tmp_path / "no.txt"], "There is no file"),
        ([*model, "--input", tmp_path / "no.txt", "hello"], "Give sentences or --input, not both"),
        ([*model, "--batch-size", "0", "hello"], "--batch_size must be at least 1"),
        ([*model, "--length-beams", "0", "hello"], "length_beams must be an integer of at least 1"),
        ([*model, "--ctc-beam-size", "3", "hello"], "ctc_beam_size=3 needs config.length='ctc'"),
        ([*model, "--length-beams", "2", "--reranker", other, "hello"], "The reranker has"),
        ([*model, "--device", "nonsense", "hello"], "nonsense"),
        ([*model, "--device", "cuda:7", "hello"], "Device 'cuda:7' cannot be used"),
        ([*model, "--device", "meta", "hello"], "Device 'meta' stores no data"),
        ([*model, "--watch", "--nbest", "2", "hello"], "--watch shows one translation"),
        ([*model, "--nbest", "0", "hello"], "--nbest must be at least 1, not 0."),
        (["--model", damaged, "hello"], "are damaged"),
    ]:
        done = run("translate", *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert message in done.stderr, (arguments, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr

"""A tiny student of Marian, trained by the script, as a contender of the benchmarks."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pymarian", reason="pymarian is part of the marian extra")
pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

import marian_student
from transformers import AutoTokenizer

from hf_deqnar import PRETRAINED
from hf_deqnar.benchmarks import marian
from hf_deqnar.benchmarks.marian import as_tokens, as_words, load_translator
from hf_deqnar.cli.main import main

PAIRS = Path(__file__).parents[1] / "data" / "pairs.jsonl"
SMALL = ["--d_model", "64", "--ffn_dim", "64", "--heads", "2", "--encoder_layers", "1", "--decoder_layers", "1"]
SHORT = ["--max_steps", "6", "--eval_steps", "3", "--warmup_steps", "2", "--workspace", "200"]


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("marian") / "student"
    data = ["--train_data", str(PAIRS), "--validation_data", str(PAIRS), "--source", "en", "--target", "de"]
    arguments = ["--tokenizer", PRETRAINED, *data, "--output_dir", str(folder), *SMALL, *SHORT]
    assert marian_student.main(arguments) == 0
    return folder


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(PRETRAINED)


def test_token_ids_are_the_words_of_marian(tokenizer, tmp_path):
    tokens = tokenizer("Where is the train station?")["input_ids"]
    special = set(tokenizer.all_special_ids)
    assert as_tokens(as_words(tokens, special)) == [token for token in tokens if token not in special]
    assert as_tokens("") == []
    marian.write_vocabulary(tokenizer, tmp_path / "vocabulary.yml")
    lines = (tmp_path / "vocabulary.yml").read_text().splitlines()
    assert len(lines) == len(tokenizer) - len(special) + 2
    assert lines[:2] == ['"</s>": 0', '"<unk>": 1']


@pytest.mark.slow
def test_batches_are_translated_in_their_order(student, tokenizer):
    sentences = ["I like tea.", "Where is the train station?", "She reads."]
    batch = [tokenizer(sentence)["input_ids"] for sentence in sentences]
    special = set(tokenizer.all_special_ids)
    for num_beams, shortlist in ((1, False), (1, True), (2, True)):
        translate = load_translator(student, tokenizer, threads=1, num_beams=num_beams, shortlist=shortlist)
        together = translate(batch)
        assert len(together) == len(batch)
        assert together == translate(batch[::-1])[::-1]
        assert all(0 <= token < len(tokenizer) and token not in special for row in together for token in row)


@pytest.mark.slow
def test_it_is_a_row_of_the_benchmarks(student, tmp_path, capsys):
    file = tmp_path / "figures.json"
    teacher = tmp_path / "teacher"
    untrained_teacher(teacher)
    arguments = ["--model", PRETRAINED, "--teacher", str(teacher), "--data", str(PAIRS), "--source", "en"]
    arguments += ["--target", "de", "--sentences", "8", "--batches", "8", "--repeats", "1", "--budgets"]
    arguments += ["--without", "onnx", "ctranslate2", "--marian", str(student), "--json", str(file)]
    assert main(["bench", "throughput", *arguments]) == 0
    assert "Marian int8" in capsys.readouterr().out
    rows = json.loads(file.read_text())["results"]
    assert {"student, Marian int8, greedy", "student, Marian int8, beam 5, shortlist"} <= set(rows)


def untrained_teacher(folder: Path) -> None:
    """A Marian model of transformers with random weights and the tokenizer of the bundled model."""
    from transformers import MarianConfig, MarianMTModel

    tokenizer = AutoTokenizer.from_pretrained(PRETRAINED)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = MarianConfig(
        vocab_size=len(tokenizer),
        max_length=20,
        decoder_start_token_id=tokenizer.pad_token_id,
        **sizes,
        **heads,
        **special,
    )
    MarianMTModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_width_that_marian_cannot_multiply_is_refused(tmp_path, capsys):
    data = ["--train_data", str(PAIRS), "--validation_data", str(PAIRS), "--source", "en", "--target", "de"]
    arguments = ["--tokenizer", PRETRAINED, *data, "--output_dir", str(tmp_path), "--d_model", "96"]
    assert marian_student.main(arguments) == 2
    assert "--d_model 96 must be a multiple of 64" in capsys.readouterr().err


def test_wrong_folders_and_tokenizers_are_refused(tokenizer, tmp_path, monkeypatch):
    options = {"threads": 1, "num_beams": 1, "shortlist": False}
    with pytest.raises(FileNotFoundError, match="is not a Marian student, it has no student.json; train one with"):
        load_translator(tmp_path, tokenizer, **options)
    marian.Student("of another", {}, has_shortlist=False).write(tmp_path)
    with pytest.raises(ValueError, match="was trained with another tokenizer than the model's; train it again"):
        load_translator(tmp_path, tokenizer, **options)
    marian.Student(marian.fingerprint_of_tokenizer(tokenizer), {}, has_shortlist=False).write(tmp_path)
    with pytest.raises(ValueError, match="has no shortlist; train it again"):
        load_translator(tmp_path, tokenizer, **{**options, "shortlist": True})
    monkeypatch.setattr(
        marian, "find_spec", lambda name: None if name == "pymarian" else importlib.util.find_spec(name)
    )
    with pytest.raises(ImportError, match=r"needs pymarian: pip install 'hf_deqnar\[marian\]'"):
        load_translator(tmp_path, tokenizer, **options)
    shutil.rmtree(tmp_path)

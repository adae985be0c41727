import gzip
import json
import shutil

import pytest
from transformers import MarianMTModel

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.main import main

from ..conftest import SENTENCES
from ..models.deqnar.test_generation_deqnar import reranker

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "test.jsonl.gz"
    with gzip.open(file, "wt", encoding="utf-8") as stream:
        for number, (english, german) in enumerate(SENTENCES):
            references = [german, german.lower()] if number % 2 else [german]
            stream.write(json.dumps({"en": english, "de": references}) + "\n")
    return file


def test_one_model_is_scored(run, saved, data, tmp_path):
    figures = tmp_path / "figures.json"
    columns = ["--data", data, "--source", "en", "--target", "de"]
    done = run("evaluate", saved["ctc"], *columns, "--json", figures, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(figures.read_text())["systems"].values()
    assert found["sentences"] == 6
    assert found["mean_nfe"] > 1
    assert 0 <= found["share_converged"] <= 1
    assert found["bleu_signature"].startswith("nrefs:var")
    assert found["bleu_signature"] in done.stdout
    for name in ("bleu", "chrf", "repetition_rate", "length_ratio", "brevity_penalty", "seconds"):
        assert isinstance(found[name], float)
    assert f"| {found['length_ratio']:.3f}" in done.stdout
    assert f"| {found['brevity_penalty']:.3f}" in done.stdout
    assert len((tmp_path / "out" / "1.txt").read_text().split("\n")) == 7


def test_replaced_names_are_counted_in_the_translations(run, saved, tmp_path):
    corpus, test, figures = tmp_path / "corpus.jsonl", tmp_path / "test.jsonl", tmp_path / "figures.json"
    cities = [{"en": f"He is in {city}.", "de": f"Er ist in {city}."} for city in ("Boston", "Berlin", "Oslo")]
    corpus.write_text("\n".join(map(json.dumps, cities)))
    test.write_text("\n".join(map(json.dumps, [cities[1], {"en": "I like tea.", "de": "Ich mag Tee."}])))
    columns = ["--data", test, "--source", "en", "--target", "de"]
    done = run("evaluate", saved["ctc"], *columns, "--other-names", corpus, "--json", figures)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(figures.read_text())["systems"].values()
    assert (found["sentences"], found["names_copied"]) == (1, 0.0)  # of an untrained model
    assert "names copied" in done.stdout
    done = run("evaluate", saved["ctc"], *columns, "--other-names", test)
    assert done.returncode == 2
    assert "has a name that can be replaced by one of" in done.stderr


def test_comparison_with_an_autoregressive_model(run, saved, data, tokenizer, tmp_path):
    teacher = tmp_path / "teacher"
    reranker(len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    figures = tmp_path / "figures.json"
    systems = [f"{saved['predict']},length_beams=3,solver=broyden", f"{teacher},num_beams=2,max_length=10"]
    columns = ["--data", data, "--source", "en", "--target", "de"]
    done = run("evaluate", *systems, *columns, "--samples", "50", "--json", figures)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert list(found["systems"]) == systems
    assert "mean_nfe" not in found["systems"][systems[1]]
    compared = found["paired_bootstrap"][systems[1]]
    assert 0 <= compared["BLEU"]["p_value"] <= 1
    assert "(p = " in done.stdout


def test_the_source_prefix_comes_from_the_flag_or_the_configuration(data, tokenizer, tmp_path, monkeypatch, capsys):
    recorded = []

    def generate(self, input_ids, **options):
        recorded.extend(tokenizer.batch_decode(input_ids, skip_special_tokens=True))
        return input_ids

    monkeypatch.setattr(MarianMTModel, "generate", generate)
    words = "translate English to German: "
    model = reranker(len(tokenizer))
    model.config.task_specific_params = {"translation_en_to_de": {"prefix": words}}
    model.save_pretrained(tmp_path / "told")
    tokenizer.save_pretrained(tmp_path / "told")
    arguments = ["evaluate", str(tmp_path / "told"), "--data", str(data), "--source", "en", "--target", "de"]
    for asked, expected in ([], words), (["--source-prefix", "Now: "], "Now: "), (["--source-prefix", ""], ""):
        recorded.clear()
        assert main([*arguments, *asked]) == 0
        assert sorted(recorded) == sorted(expected + english for english, _ in SENTENCES)


def test_a_model_that_returns_two_sequences_is_scored_by_the_first(saved, data, tmp_path):
    model = DeqNarForConditionalGeneration.from_pretrained(saved["ctc"])
    model.generation_config.update(ctc_beam_size=4, num_return_sequences=2)
    shutil.copytree(saved["ctc"], tmp_path / "two")
    model.save_pretrained(tmp_path / "two")
    systems = [f"{saved['ctc']},ctc_beam_size=4", str(tmp_path / "two")]
    columns = ["--data", str(data), "--source", "en", "--target", "de"]
    assert main(["evaluate", *systems, *columns, "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "1.txt").read_text() == (tmp_path / "out" / "2.txt").read_text()


def test_errors_are_one_readable_line(run, saved, data, tmp_path):
    columns = ["--data", data, "--source", "en", "--target", "de"]
    for arguments, message in [
        ([saved["ctc"], "--data", data, "--source", "en", "--target", "fr"], "no column fr; there are en, de"),
        ([saved["ctc"], "--data", tmp_path / "no", "--source", "en", "--target", "de"], "There is neither a file"),
        ([f"{saved['ctc']},beam", *columns], "'beam' in"),
        ([f"{saved['ctc']},penalty_alpha=2", *columns], "penalty_alpha"),
        ([saved["ctc"], saved["ctc"], *columns], "named twice"),
        ([saved["ctc"], *columns, "--json", tmp_path / "no" / "file"], "There is no folder"),
        ([saved["ctc"], *columns, "--json", tmp_path], "is a folder; name a file."),
        ([f"{saved['ctc']},reranker=5", *columns], "reranker must be a seq2seq model or its name, not 5."),
        ([saved["ctc"], *columns, "--batch-size", "-1"], "--batch_size must be at least 1"),
        ([saved["ctc"], *columns, "--samples", "0"], "--samples must be at least 1"),
        ([f"{saved['predict']},length_beams=2,num_return_sequences=2", *columns], "num_return_sequences must be 1"),
    ]:
        done = run("evaluate", *arguments)
        assert done.returncode == 2, (arguments, done.stdout, done.stderr)
        assert message in done.stderr, (arguments, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_all_models_are_checked_before_the_first_translates(run, saved, data, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_deqnar.evaluation.translation.translate_sentences", pytest.fail)
    flags = ["--data", data, "--source", "en", "--target", "de"]
    done = run("evaluate", saved["ctc"], f"{tmp_path / 'absent'},num_beams=2", *flags)
    assert done.returncode == 2
    assert "absent is neither a model directory nor a model on the Hub" in done.stderr

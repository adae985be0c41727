import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    pipeline,
)

import hf_deqnar
from hf_deqnar import DeqNarGenerationConfig
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.models.deqnar.quality import pack_log_probs
from hf_deqnar.models.deqnar.text import clean_text

from ...conftest import SENTENCES
from .test_generation_deqnar import reranker
from .test_quality import make_quality

ENGLISH = [english for english, _ in SENTENCES]


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_pipeline_accepts_a_directory_and_a_model(saved, tokenizer, length):
    named = pipeline("translation", model=str(saved[length]))
    assert isinstance(named, hf_deqnar.DeqNarTranslationPipeline)
    given = pipeline("translation", model=AutoModelForSeq2SeqLM.from_pretrained(saved[length]), tokenizer=tokenizer)
    assert named(ENGLISH[0]) == given(ENGLISH[0])
    (answer,) = named(ENGLISH[0])
    assert list(answer) == ["translation_text"]
    assert isinstance(answer["translation_text"], str)


def test_text_equals_the_output_of_generate(saved):
    translate = pipeline("translation", model=str(saved["predict"]))
    batch = translate.tokenizer(ENGLISH[0], return_tensors="pt")
    sequences = translate.model.generate(**batch, length_beams=3)
    expected = translate.tokenizer.decode(sequences[0], skip_special_tokens=True).strip()
    assert translate(ENGLISH[0], length_beams=3) == [{"translation_text": expected}]


def test_lists_generators_and_columns_are_translated_in_batches(saved):
    datasets = pytest.importorskip("datasets", reason="datasets is part of the train extra")
    translate = pipeline("translation", model=str(saved["ctc"]))
    one_by_one = [translate(sentence)[0] for sentence in ENGLISH]
    assert translate(ENGLISH) == one_by_one
    assert translate(ENGLISH, batch_size=4) == one_by_one
    assert [result[0] for result in translate((text for text in ENGLISH), batch_size=4)] == one_by_one
    column = datasets.Dataset.from_dict({"en": ENGLISH})["en"]
    assert translate(column, batch_size=3) == one_by_one
    assert translate(tuple(ENGLISH)) == one_by_one
    assert translate([]) == []


@pytest.mark.parametrize("task", ["translation_en_to_de", "translation_xx_to_yy"])
def test_task_names_with_languages_are_accepted(saved, task):
    translate = pipeline(task, model=str(saved["ctc"]))
    assert translate(ENGLISH[0]) == pipeline("translation", model=str(saved["ctc"]))(ENGLISH[0])


def test_other_removed_tasks_stay_removed():
    with pytest.raises(KeyError, match="summarization"):
        pipeline("summarization")
    with pytest.raises(KeyError, match="no-such-task"):
        pipeline("no-such-task")


def test_options_can_be_set_per_pipeline_and_per_call(saved):
    translate = pipeline("translation", model=str(saved["predict"]), length_beams=4)
    several = translate(ENGLISH[0], num_return_sequences=3)
    assert len(several) == 3
    assert translate(ENGLISH[0]) == several[:1]
    figures = translate(ENGLISH[0], return_figures=True)[0]
    assert set(figures) == {"translation_text", "nfe", "residual", "converged", "score"}
    assert translate(ENGLISH[0], max_nfe=2, return_figures=True)[0]["nfe"] == 2
    assert translate(ENGLISH[0], num_beams=4) == translate(ENGLISH[0])
    with pytest.raises(ValueError, match="num_bems is not an option of generate"):
        translate(ENGLISH[0], num_bems=5)
    assert len(translate(ENGLISH[:2], num_return_sequences=2)[1]) == 2


def test_nbest_list_has_no_duplicates(saved):
    """Different tokens can decode to the same text."""
    translate = pipeline("translation", model=str(saved["ctc"]))
    translate.tokenizer.decode = lambda tokens, **options: "ab"[int(tokens[0]) % 2]
    texts = [one["translation_text"] for one in translate(ENGLISH[0], ctc_beam_size=8, num_return_sequences=3)]
    assert sorted(texts) == sorted(set(texts))


def test_generation_config_of_transformers_is_accepted(saved):
    translate = pipeline("translation", model=str(saved["ctc"]))
    expected = translate(ENGLISH[0])
    translate.model.generation_config = GenerationConfig(max_length=256)
    assert translate(ENGLISH[0]) == expected


@pytest.mark.parametrize("text", ["", " ", "\t \n", "\x00", "\x00\x01 \x7f"])
def test_empty_text_translates_to_empty_text(saved, text):
    translate = pipeline("translation", model=str(saved["ctc"]))
    assert translate(text) == [{"translation_text": ""}]
    assert translate([ENGLISH[0], text, ENGLISH[1]], batch_size=3) == [
        translate(ENGLISH[0])[0], {"translation_text": ""}, translate(ENGLISH[1])[0]
    ]  # fmt: skip


def test_sentences_of_a_text_are_translated_separately_and_joined(saved):
    translate = pipeline("translation", model=str(saved["ctc"]))
    first, second, third = (translate(sentence)[0]["translation_text"] for sentence in ENGLISH[:3])
    text = f"  {ENGLISH[0]}  {ENGLISH[1]}\n\n\t{ENGLISH[2]} "
    for options in ({}, {"batch_size": 1}, {"batch_size": 2}):
        assert translate(text, **options) == [{"translation_text": f"{first}  {second}\n\n\t{third}"}]
    assert translate([ENGLISH[3], text, ""], batch_size=4)[1] == translate(text)[0]
    assert list(translate((one for one in [text, ENGLISH[0]]), batch_size=3)) == [
        translate(text),
        translate(ENGLISH[0]),
    ]
    batch = translate.tokenizer(text.replace("\n", " ").replace("\t", " ").strip(), return_tensors="pt")
    together = translate.tokenizer.decode(translate.model.generate(**batch)[0], skip_special_tokens=True).strip()
    assert translate(text, split_sentences=False) == [{"translation_text": together}] != translate(text)


def test_segments_have_offsets_and_figures_of_the_text_are_joined(saved):
    translate = pipeline("translation", model=str(saved["ctc"]))
    text = f"{ENGLISH[0]} 😀 {ENGLISH[1]}"
    (answer,) = translate(text, return_segments=True, return_figures=True)
    parts = answer["segments"]
    assert [text[one["source_start"] : one["source_end"]] for one in parts] == [ENGLISH[0], "😀", ENGLISH[1]]
    single = [translate(sentence, return_figures=True)[0] for sentence in ENGLISH[:2]]
    targets = [answer["translation_text"][one["target_start"] : one["target_end"]] for one in parts]
    assert targets == [single[0]["translation_text"], "😀", single[1]["translation_text"]]
    assert answer["nfe"] == sum(one["nfe"] for one in single)
    assert answer["residual"] == pytest.approx(max(one["residual"] for one in single), abs=1e-5)
    assert answer["converged"] == all(one["converged"] for one in single)
    low, high = sorted(one["score"] for one in single)
    assert low <= answer["score"] <= high
    assert "nfe" not in parts[1]


def test_nbest_lists_of_texts_combine_those_of_their_sentences(saved):
    translate = pipeline("translation", model=str(saved["predict"]), length_beams=4, num_return_sequences=3)
    lists = [[one["translation_text"] for one in translate(sentence)] for sentence in ENGLISH[:2]]
    expected = [" ".join(several[min(rank, len(several) - 1)] for several in lists) for rank in range(3)]
    assert [one["translation_text"] for one in translate(" ".join(ENGLISH[:2]))] == expected


@pytest.mark.parametrize("text", ["12,345.60", "😀🎉", "https://example.org/a?b=c", "someone@example.org", "— … !"])
def test_text_without_words_is_copied(saved, text):
    translate = pipeline("translation", model=str(saved["ctc"]))
    assert translate(text) == [{"translation_text": text}]
    assert translate([ENGLISH[0], text], batch_size=2) == [translate(ENGLISH[0])[0], {"translation_text": text}]


@pytest.mark.parametrize("text", ["word " * 2000, "x" * 10_000, "😀x" * 5000, "word, " * 1700, "Is it? " * 1400])
def test_a_text_of_ten_thousand_characters_is_translated_in_parts_that_fit(saved, text):
    translate = pipeline("translation", model=str(saved["ctc"]))
    encoded = list(translate.preprocess(text))
    assert max(one["input_ids"].shape[1] for one in encoded) <= 64
    covered = "".join(text[one["piece"].segment.start : one["piece"].segment.end] for one in encoded)
    assert "".join(covered.split()) == "".join(text.split())
    assert translate(text[:500])[0]["translation_text"]


@pytest.mark.parametrize("text", ["😀🎉 a", "שלום עולם", "日本語のテキスト", "a\x07b\x00c", "x" * 40, "ﷺ\u202e!"])
def test_any_writing_system_is_translated(saved, text):
    (answer,) = pipeline("translation", model=str(saved["ctc"]))(text)
    assert isinstance(answer["translation_text"], str)


def test_control_characters_are_replaced_by_spaces():
    assert clean_text("a\x00b\r\n") == "a b"


def test_too_long_texts_and_other_types_are_refused(saved):
    translate = pipeline("translation", model=str(saved["ctc"]))
    with pytest.raises(ValueError, match="tokens is too long: this model supports 64"):
        translate("word " * 2000, split_sentences=False)
    with pytest.raises(ValueError, match="Only text can be translated.*int"):
        translate([1, 2])


def test_an_autoregressive_model_uses_the_same_pipeline(tokenizer, tmp_path):
    reranker(len(tokenizer)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    translate = pipeline("translation", model=str(tmp_path))
    batch = translate.tokenizer(ENGLISH[0], return_tensors="pt")
    sequences = translate.model.generate(**batch, num_beams=2, max_length=9)
    expected = tokenizer.decode(sequences[0], skip_special_tokens=True).strip()
    assert translate(ENGLISH[0], num_beams=2, max_length=9) == [{"translation_text": expected}]
    with pytest.raises(ValueError, match="return_figures needs a deqnar model, not marian"):
        translate(ENGLISH[0], return_figures=True)


def test_quality_of_texts_and_words(saved, tokenizer):
    translate = pipeline("translation", model=str(saved["ctc"]))
    with pytest.raises(ValueError, match="this model has no quality estimate; fit one with hf-deqnar calibrate"):
        translate(ENGLISH[0], return_quality=True)
    translate.model.generation_config.update(quality=make_quality(len(tokenizer)))
    single = [translate(sentence, return_quality=True)[0] for sentence in ENGLISH[:2]]
    batch = tokenizer(ENGLISH[0], return_tensors="pt")
    out = translate.model.generate(**batch, return_dict_in_generate=True)
    assert single[0]["quality"] == pytest.approx(float(out.quality), abs=1e-5)
    text = f"{ENGLISH[0]} 😀\n{ENGLISH[1]}"
    (answer,) = translate(text, return_quality=True, return_segments=True)
    assert list(answer) == ["translation_text", "quality", "words", "segments"]
    low, high = sorted(one["quality"] for one in single)
    assert low <= answer["quality"] <= high
    words = [answer["translation_text"][one["start"] : one["end"]] for one in answer["words"] if one["end"]]
    assert words == [word for part in single for word in part["translation_text"].split()]
    qualities = [one["quality"] for part in single for one in part["words"]]
    assert [one["quality"] for one in answer["words"]] == pytest.approx(qualities, abs=1e-5)
    assert [one.get("quality") for one in answer["segments"]] == [
        pytest.approx(single[0]["quality"], abs=1e-5), None, pytest.approx(single[1]["quality"], abs=1e-5)
    ]  # fmt: skip
    for nothing in ("", "😀 123"):
        assert translate(nothing, return_quality=True) == [{"translation_text": nothing, "quality": 0.0, "words": []}]


def test_text_in_another_language_is_warned_of(saved, tokenizer, caplog):
    translate = pipeline("translation", model=str(saved["ctc"]))
    known = tokenizer([sentence.capitalize() for sentence in ENGLISH])["input_ids"]
    log_probs = torch.full((len(tokenizer),), -12.0)
    log_probs[[token for row in known for token in row]] = -3.0
    quality = {**make_quality(len(tokenizer)), "source_log_probs": pack_log_probs(log_probs), "unfamiliar": [-6.0, 0.0]}
    translate.model.generation_config.update(quality=quality)
    translate([ENGLISH[0], ENGLISH[1].upper(), "A.", "123456789"])
    assert "does not look like" not in caplog.text
    translate(f"{ENGLISH[0]} WXYZ wxyz wxyz!")
    message = "A text does not look like the source language of this model: 'WXYZ wxyz wxyz!'."
    assert message in caplog.text
    caplog.clear()
    translate("WXYZ wxyz wxyz!", warn_unfamiliar=False)
    assert "does not look like" not in caplog.text


def test_a_reranker_of_another_vocabulary_is_refused_even_if_it_is_as_large(saved, tokenizer, tmp_path):
    translate = pipeline("translation", model=str(saved["predict"]))
    reranker(len(tokenizer)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tokenizer to compare"):
        translate(ENGLISH[0], length_beams=2, reranker=str(tmp_path))
    tokenizer.save_pretrained(tmp_path)
    assert translate(ENGLISH[0], length_beams=2, reranker=str(tmp_path))
    other = tmp_path / "other"
    reranker(len(tokenizer)).save_pretrained(other)
    train_tokenizer(["zzz yyy xxx" * 9, "Etwas anderes."] * 9, vocab_size=len(tokenizer)).save_pretrained(other)
    refusal = "The vocabulary of .*other.* differs from the model's.*there; both must be trained"
    with pytest.raises(ValueError, match=refusal):
        translate(ENGLISH[0], length_beams=2, reranker=str(other))
    translate.model.generation_config.update(length_beams=2, reranker=str(other))
    with pytest.raises(ValueError, match=refusal):
        translate(ENGLISH[0])


def test_options_of_the_former_pipeline_are_supported(saved):
    translate = pipeline("translation", model=str(saved["ctc"]))
    assert translate("word " * 2000, truncation=True)[0]["translation_text"]
    (answer,) = translate(ENGLISH[0], return_tensors=True)
    text = translate.tokenizer.decode(answer["translation_token_ids"], skip_special_tokens=True).strip()
    assert translate(ENGLISH[0]) == [{"translation_text": text}]
    with pytest.raises(ValueError, match="not valid Unicode"):
        translate("half of an emoji: \ud83d")


def test_empty_texts_have_as_many_translations_as_others(saved):
    translate = pipeline("translation", model=str(saved["predict"]))
    translate.model.generation_config.update(length_beams=3, num_return_sequences=3)
    for size in (1, 2):
        assert [len(result) for result in translate(["", ENGLISH[0]], batch_size=size)] == [3, 3]
        other = DeqNarGenerationConfig(length_beams=2, num_return_sequences=2)
        assert [len(result) for result in translate(["", ENGLISH[0]], generation_config=other)] == [2, 2]
        nothing, _ = translate(["", ENGLISH[0]], batch_size=size, return_tensors=True)
        assert [one["translation_token_ids"].tolist() for one in nothing] == [[translate.tokenizer.pad_token_id]] * 3


def test_task_prefix_is_added_for_t5(tokenizer):
    model = reranker(len(tokenizer))
    model.config.prefix = "translate English to German: "
    translate = pipeline("translation", model=model, tokenizer=tokenizer)
    expected = tokenizer("translate English to German: A man.", return_tensors="pt")["input_ids"]
    assert torch.equal(next(translate.preprocess("A man."))["input_ids"], expected)
    model.config.task_specific_params = {"translation_en_to_fr": {"prefix": "translate English to French: "}}
    french = tokenizer("translate English to French: A man.", return_tensors="pt")["input_ids"]
    assert torch.equal(next(translate.preprocess("A man.", src_lang="en", tgt_lang="fr"))["input_ids"], french)
    assert torch.equal(next(translate.preprocess("A man.", src_lang="en", tgt_lang="de"))["input_ids"], expected)


def test_languages_are_passed_to_a_multilingual_tokenizer(tokenizer):
    """M2M100 and similar models: the tokenizer builds the inputs for a pair of languages."""
    recorded = {}

    class Multilingual(type(tokenizer)):
        def _build_translation_inputs(self, text, return_tensors, src_lang, tgt_lang):
            recorded.update(src_lang=src_lang, tgt_lang=tgt_lang)
            return {**self(text, return_tensors=return_tensors), "forced_bos_token_id": 7}

    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    model = M2M100ForConditionalGeneration(M2M100Config(vocab_size=len(tokenizer), **sizes, **heads)).eval()
    multilingual = Multilingual(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="</s>")
    translate = pipeline("translation_en_to_de", model=model, tokenizer=multilingual)
    translate(ENGLISH[0], max_length=5)
    assert recorded == {"src_lang": "en", "tgt_lang": "de"}
    translate(ENGLISH[0], src_lang="fr", tgt_lang="it", max_length=5)
    assert recorded == {"src_lang": "fr", "tgt_lang": "it"}


def test_pipeline_works_as_remote_code(saved, tmp_path):
    script = (
        "import json, sys; sys.modules['hf_deqnar'] = None\n"
        "from transformers import pipeline\n"
        "translate = pipeline('translation', model=sys.argv[1], trust_remote_code=True)\n"
        "assert type(translate).__module__.startswith('transformers_modules.')\n"
        "print(json.dumps(translate(json.loads(sys.argv[2]), batch_size=3)))\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(saved["ctc"]), json.dumps(ENGLISH)],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == pipeline("translation", model=str(saved["ctc"]))(ENGLISH)


def test_readme_example_runs(saved):
    translate = pipeline("translation", model=str(saved["predict"]))
    translate("A man is riding a horse.")
    model = AutoModelForSeq2SeqLM.from_pretrained(saved["predict"])
    batch = AutoTokenizer.from_pretrained(saved["predict"])(ENGLISH, return_tensors="pt", padding=True)
    out = model.generate(
        **batch, length_beams=5, max_nfe=20, tol=1e-3, refinement_passes=2, return_dict_in_generate=True,
        output_trajectory=True,
    )  # fmt: skip
    for figure in (out.sequences, out.sequences_scores, out.nfe, out.residual, out.converged, out.trajectory):
        assert len(figure) == len(ENGLISH)
    assert out.nfe.dtype == torch.long

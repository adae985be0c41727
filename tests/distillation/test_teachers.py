import dataclasses
from collections import Counter

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from hf_deqnar.distillation.teachers import (
    Teacher,
    TeacherOptions,
    fingerprint_of_teacher,
    make_translate,
    nearest_text,
    translate_texts,
)

from ..conftest import real_sentences
from ..models.deqnar.test_generation_deqnar import reranker
from .conftest import OPTIONS, corpus, make_teacher


def translations(teacher, options, folder, sentences=None) -> list[str]:
    sentences = sentences or [pair.source for pair in corpus()]
    rows = translate_texts(teacher, make_translate(teacher, options, folder), sentences, options)
    return [row["text"] for row in rows]


def test_translations_equal_those_of_generate_in_the_given_order(teacher, tmp_path):
    """Batched by length, against one sentence at a time; float64, so that padding does not matter."""
    teacher.model.double()
    found = translations(teacher, OPTIONS, tmp_path)
    assert len(set(found)) > 10
    for sentence, text in zip(corpus(), found, strict=True):
        tokens = teacher.tokenizer(sentence.source, truncation=True, max_length=12, return_tensors="pt")
        out = teacher.model.generate(input_ids=tokens["input_ids"], num_beams=2, max_new_tokens=12)
        expected = teacher.tokenizer.decode(out[0], skip_special_tokens=True).strip()
        assert text == (expected if sentence.source.strip() else "")


def test_the_teachers_generation_config_does_not_change_the_result(teacher, tmp_path):
    expected = translations(teacher, OPTIONS, tmp_path)
    own = teacher.model.generation_config
    own.return_dict_in_generate, own.num_return_sequences, own.num_beams = True, 2, 4
    assert translations(teacher, OPTIONS, tmp_path) == expected


@pytest.mark.parametrize("backend", ["transformers", "ctranslate2"])
def test_nearest_selects_the_beam_equal_to_a_reference(teacher, tmp_path, backend):
    if backend == "ctranslate2":
        pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    options = dataclasses.replace(OPTIONS, num_beams=3, backend=backend)
    choosing = dataclasses.replace(options, nearest=True)
    sentences = [pair.source for pair in corpus()]
    translate, beams_of = make_translate(teacher, choosing, tmp_path), {}

    def recorded(batch):
        found = translate(batch)
        for number, source in enumerate(batch):
            beams = found[3 * number : 3 * number + 3]
            beams_of[tuple(source)] = [
                teacher.tokenizer.decode(beam, skip_special_tokens=True).strip() for beam in beams
            ]
        return found

    first = translations(teacher, options, tmp_path)
    translate_texts(teacher, recorded, sentences, choosing, [[""]] * len(sentences))
    sources = teacher.tokenizer(sentences, truncation=True, max_length=12)["input_ids"]
    all_beams = [
        beams_of[tuple(source)] if text.strip() else [""] * 3 for source, text in zip(sources, sentences, strict=True)
    ]
    for rank in range(3):
        references = [["Something else.", beams[rank]] for beams in all_beams]
        rows = translate_texts(teacher, translate, sentences, choosing, references)
        assert [row["text"] for row in rows] == [beams[rank] for beams in all_beams]
        assert ([row["text"] for row in rows] == first) == (rank == 0)
    with pytest.raises(ValueError, match="nearest has no effect with one beam; raise num_beams"):
        TeacherOptions(num_beams=1, nearest=True)


def test_nearest_text_has_the_highest_sentence_bleu_and_is_the_first_of_equals():
    texts = ["Ein Hund.", "Ein Mann schläft.", "Ein Mann isst Brot.", "Ein Mann schläft."]
    assert nearest_text(texts, ["Ein Mann schläft."]) == 1
    assert nearest_text(texts, ["Eine Katze trinkt Milch.", "Ein Mann isst Brot."]) == 2
    assert nearest_text(["Ja.", "Ja."], ["Nein."]) == 0


def test_rows_count_tokens_without_special_ones_and_mark_truncated_sources(teacher, tmp_path):
    sentences = ["A man.", "", "horse " * 40]
    rows = translate_texts(teacher, make_translate(teacher, OPTIONS, tmp_path), sentences, OPTIONS)
    assert [row["cut"] for row in rows] == [False, False, True]
    assert rows[0]["source_tokens"] == len(teacher.tokenizer("A man.")["input_ids"]) - 1
    assert rows[1] == {"text": "", "source_tokens": 0, "target_tokens": 0, "cut": False}
    assert rows[2]["source_tokens"] == 11
    for row in (rows[0], rows[2]):
        assert row["target_tokens"] == len(teacher.tokenizer(row["text"])["input_ids"]) - 1 or "\ufffd" in row["text"]


def test_a_source_prefix_precedes_every_sentence(teacher, tmp_path):
    teacher.model.double()
    options = dataclasses.replace(OPTIONS, source_prefix="Where is: ", max_length=16)
    sentences = ["A man.", "", "horse " * 40]
    translate = make_translate(teacher, options, tmp_path)
    rows = translate_texts(teacher, translate, sentences, options)
    bare = dataclasses.replace(options, source_prefix="")
    prefixed = translate_texts(teacher, translate, [f"Where is: {text}" for text in sentences], bare)
    assert [row["text"] for row in rows] == [prefixed[0]["text"], "", prefixed[2]["text"]]
    without = translate_texts(teacher, translate, sentences, bare)
    assert rows[0]["text"] != without[0]["text"]
    assert rows[0]["source_tokens"] == without[0]["source_tokens"]
    assert rows[1]["source_tokens"] == 0
    assert [row["cut"] for row in rows] == [False, False, True]
    long = dataclasses.replace(options, source_prefix="Where is " * 20)
    with pytest.raises(
        ValueError, match="source_prefix has .* runs/teacher takes at most 16 .*, which leaves none for the sentence"
    ):
        translate_texts(teacher, translate, sentences, long)


@pytest.mark.parametrize("backend", ["transformers", "ctranslate2"])
def test_translations_begin_with_the_forced_token(teacher, tmp_path, backend):
    pytest.importorskip(backend, reason=f"{backend} is an extra")
    sources = [teacher.tokenizer(pair.source)["input_ids"] for pair in corpus()[:20]]
    forced = teacher.tokenizer.convert_tokens_to_ids("<mask>")
    options = dataclasses.replace(OPTIONS, forced_bos_token="<mask>", backend=backend)
    found = make_translate(teacher, options, tmp_path)(sources)
    expected = [
        teacher.model.generate(
            torch.tensor([row]), num_beams=2, max_new_tokens=12, forced_bos_token_id=forced, do_sample=False
        )[0].tolist()
        for row in sources
    ]

    def words(rows):
        return [[token for token in row if token > 5] for row in rows]

    same = sum(first == second for first, second in zip(words(found), words(expected), strict=True))
    assert same > 0.9 * len(sources)
    assert all(forced in row[:2] for row in found)
    for token in ("de_DE", ""):
        with pytest.raises(ValueError, match=f"runs/teacher has no token '{token}' to begin translations with"):
            make_translate(teacher, dataclasses.replace(options, forced_bos_token=token), tmp_path)


def test_batches_do_not_exceed_the_token_budget(teacher, tmp_path):
    translate, sizes = make_translate(teacher, OPTIONS, tmp_path), []

    def recorded(batch):
        sizes.append(len(batch) * max(map(len, batch)))
        return translate(batch)

    translate_texts(teacher, recorded, [pair.source for pair in corpus()], OPTIONS)
    assert len(sizes) > 3
    assert max(sizes) <= OPTIONS.batch_tokens


def test_fingerprint_depends_on_weights_and_settings_but_not_on_the_path(teacher, tokenizer, tmp_path):
    first = fingerprint_of_teacher(teacher)
    teacher.tokenizer("A", truncation=True, max_length=3, padding="max_length")
    teacher.model.save_pretrained(tmp_path)
    moved = Teacher("elsewhere", type(teacher.model).from_pretrained(tmp_path), tokenizer)
    assert fingerprint_of_teacher(moved) == first
    moved.model.generation_config.length_penalty = 2.0
    assert fingerprint_of_teacher(moved) != first
    with torch.no_grad():
        teacher.model.model.decoder.layers[0].fc1.bias[3] += 1e-3
    assert fingerprint_of_teacher(teacher) != first


@pytest.mark.parametrize("beams", [1, 4])
def test_ctranslate2_gives_the_translations_of_transformers(tokenizer, tmp_path, beams):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    teacher = make_teacher(tokenizer)
    teacher.model.generation_config.bad_words_ids = [[tokenizer.pad_token_id]]
    options = dataclasses.replace(OPTIONS, num_beams=beams, max_length=16)
    sentences = [pair.source for pair in corpus()] + real_sentences(40)
    config = teacher.model.config.to_dict()
    expected = translations(teacher, options, tmp_path, sentences)
    fast = dataclasses.replace(options, backend="ctranslate2")
    found = translations(teacher, fast, tmp_path, sentences)
    same = sum(first == second for first, second in zip(expected, found, strict=True))
    assert same > 0.95 * len(sentences)
    assert len(set(expected)) > 10
    assert teacher.model.config.to_dict() == config
    before = (tmp_path / "ctranslate2" / "model.bin").stat().st_mtime_ns
    assert translations(teacher, fast, tmp_path, sentences) == found
    assert (tmp_path / "ctranslate2" / "model.bin").stat().st_mtime_ns == before  # converted once


def test_ctranslate2_suppresses_the_tokens_that_transformers_suppresses(tokenizer, tmp_path):
    """Teachers of this package suppress special tokens; here the most frequent words are suppressed as well."""
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    teacher = make_teacher(tokenizer)
    options = dataclasses.replace(OPTIONS, num_beams=1, max_length=16)
    sources = [tokenizer(pair.source)["input_ids"] for pair in corpus()[:40]]
    unrestricted = make_translate(teacher, options, tmp_path)(sources)
    common = [token for token, _ in Counter(token for row in unrestricted for token in row if token > 5).most_common(3)]
    teacher.model.generation_config.suppress_tokens = common
    found = {}
    for backend in ("transformers", "ctranslate2"):
        rows = make_translate(teacher, dataclasses.replace(options, backend=backend), tmp_path)(sources)
        found[backend] = [[token for token in row if token > 5] for row in rows]
        assert not {token for row in rows for token in row} & set(common)
    same = sum(first == second for first, second in zip(*found.values(), strict=True))
    assert same > 0.9 * len(sources)


def test_models_that_ctranslate2_cannot_run_are_refused(tokenizer, teacher, tmp_path, monkeypatch):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    from ctranslate2.converters import transformers as loaders

    model = T5ForConditionalGeneration(T5Config(vocab_size=400, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    monkeypatch.delitem(loaders._MODEL_LOADERS, "T5Config")
    options = dataclasses.replace(OPTIONS, backend="ctranslate2")
    with pytest.raises(ValueError, match="small is a T5ForConditionalGeneration, which CTranslate2 cannot convert"):
        make_translate(Teacher("small", model, tokenizer), options, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="cannot use compute_type=int7 on cpu"):
        make_translate(teacher, dataclasses.replace(options, compute_type="int7"), tmp_path)


def test_invalid_options_are_refused():
    for fields, message in [
        ({"num_beams": 0}, "num_beams must be at least 1, not 0"),
        ({"length_penalty": float("nan")}, "length_penalty must be a number, not nan"),
        ({"num_beams": 1, "length_penalty": 2.0}, "length_penalty=2.0 has no effect on one beam; raise num_beams"),
        ({"shard_sentences": -1}, "shard_sentences must be at least 1"),
        ({"backend": "fairseq"}, "backend 'fairseq' is unknown; choose transformers or ctranslate2"),
    ]:
        with pytest.raises(ValueError, match=message):
            TeacherOptions(**fields)


def test_any_seq2seq_model_can_be_a_teacher(tokenizer, tmp_path):
    torch.manual_seed(0)
    special = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = T5Config(vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, **special)
    teacher = Teacher("t5", T5ForConditionalGeneration(config), tokenizer)
    assert any(translations(teacher, OPTIONS, tmp_path))
    positions = reranker(len(tokenizer), init_std=0.3).config.max_position_embeddings
    long = make_teacher(tokenizer)
    rows = translate_texts(
        long,
        make_translate(long, TeacherOptions(num_beams=1, max_length=1000), tmp_path),
        ["horse " * 300],
        TeacherOptions(max_length=1000),
    )
    assert rows[0]["cut"]
    assert rows[0]["source_tokens"] == positions - 1


def test_a_configuration_that_the_converter_rejects_is_a_one_line_error(tokenizer, tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    bart = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **sizes, **heads))
    options = dataclasses.replace(OPTIONS, backend="ctranslate2")
    with pytest.raises(ValueError, match="small is a BartForConditionalGeneration that CTranslate2 cannot convert"):
        make_translate(Teacher("small", bart, tokenizer), options, tmp_path)

"""`import hf_deqnar` brings back `pipeline("translation")` for the architectures that had it.

Tiny random models with the real tokenizer classes, trained here. The pipeline must do what one would write by hand.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    MBartTokenizer,
    NllbTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
    pipeline,
)

import hf_deqnar

from ...conftest import PAIRS_FILE, SENTENCES

TEXTS = PAIRS_FILE.read_text(encoding="utf-8").splitlines()
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
SIZES = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 128, "init_std": 0.5}
ENGLISH = [english for english, _ in SENTENCES]


def corpus() -> list[str]:
    return [text for line in TEXTS for text in map(str, json.loads(line).values())]


def unigram(special: list[str]) -> list[tuple[str, float]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return [tuple(entry) for entry in json.loads(tokenizer.to_str())["model"]["vocab"]]


def sentencepiece_model(folder: Path) -> tuple[str, dict[str, int]]:
    """A SentencePiece file and a vocabulary of its pieces, in the order of Marian and M2M100."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is part of the test extra")
    prefix = str(folder / "spm")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus()), model_prefix=prefix, vocab_size=300, minloglevel=2, num_threads=1
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")
    pieces = [processor.id_to_piece(number) for number in range(len(processor))]
    words = [*SPECIAL, *(piece for piece in pieces if piece not in SPECIAL)]
    return f"{prefix}.model", {word: number for number, word in enumerate(words)}


def make_marian(folder):
    file, vocabulary = sentencepiece_model(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    from transformers import MarianTokenizer  # needs sentencepiece

    tokenizer = MarianTokenizer(file, file, str(folder / "vocab.json"), source_lang="en", target_lang="de")
    fields = {"vocab_size": len(tokenizer), "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return MarianMTModel(MarianConfig(**SIZES, **fields, forced_eos_token_id=2)), tokenizer


def make_m2m100(folder):
    file, vocabulary = sentencepiece_model(folder)
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    from transformers import M2M100Tokenizer

    tokenizer = M2M100Tokenizer(str(folder / "vocab.json"), file, src_lang="en", tgt_lang="de")
    size = max(tokenizer.lang_token_to_id.values()) + 1  # len(tokenizer) does not count the languages
    return M2M100ForConditionalGeneration(M2M100Config(**SIZES, vocab_size=size)), tokenizer


def make_nllb(folder):
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False)
    )
    found = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in found["merges"]]
    tokenizer = NllbTokenizer(vocab=found["vocab"], merges=merges, src_lang="eng_Latn", tgt_lang="deu_Latn")
    return M2M100ForConditionalGeneration(M2M100Config(**SIZES, vocab_size=len(tokenizer))), tokenizer


def make_mbart(folder, kind=MBartTokenizer):
    tokenizer = kind(vocab=unigram(SPECIAL), src_lang="en_XX", tgt_lang="de_DE")
    return MBartForConditionalGeneration(MBartConfig(**SIZES, vocab_size=len(tokenizer))), tokenizer


def make_mbart50(folder):
    return make_mbart(folder, MBart50Tokenizer)


def make_t5(folder):
    tokenizer = T5Tokenizer(vocab=unigram(["<pad>", "</s>", "<unk>"]))
    task = {"translation_en_to_de": {"prefix": "translate English to German: "}}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "initializer_factor": 3.0}
    tokens = {"decoder_start_token_id": 0, "task_specific_params": task}
    return T5ForConditionalGeneration(T5Config(**sizes, **tokens, vocab_size=len(tokenizer))), tokenizer


def make_deqnar(folder):
    model = AutoModelForSeq2SeqLM.from_pretrained(hf_deqnar.PRETRAINED)
    return model, AutoTokenizer.from_pretrained(hf_deqnar.PRETRAINED)


MAKERS = {
    "marian": (make_marian, {}),
    "m2m100": (make_m2m100, {"src_lang": "en", "tgt_lang": "de"}),
    "nllb": (make_nllb, {"src_lang": "eng_Latn", "tgt_lang": "deu_Latn"}),
    "mbart": (make_mbart, {"src_lang": "en_XX", "tgt_lang": "de_DE"}),
    "mbart50": (make_mbart50, {"src_lang": "en_XX", "tgt_lang": "de_DE"}),
    "t5": (make_t5, {}),
    "deqnar": (make_deqnar, {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Saved models by name, made when they are first needed."""
    made = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            model, tokenizer = MAKERS[name][0](folder)
            if name != "deqnar":
                model.generation_config.max_length = 20
            made[name] = folder / "model"
            model.save_pretrained(made[name])
            tokenizer.save_pretrained(made[name])
        return made[name]

    return folder_of


def by_hand(folder: Path, texts: list[str], src_lang: str | None = None, tgt_lang: str | None = None) -> list[str]:
    """The translations as transformers' documentation of the model writes them."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    options = {}
    if src_lang is not None:
        tokenizer.src_lang = src_lang
        known = getattr(tokenizer, "lang_code_to_token", {}) if tgt_lang in ("de", "fr") else {}
        options["forced_bos_token_id"] = tokenizer.convert_tokens_to_ids(known.get(tgt_lang, tgt_lang))
    found = []
    for text in texts:
        output = model.generate(**tokenizer(text, return_tensors="pt"), **options)
        if src_lang is not None:
            assert options["forced_bos_token_id"] in output[0].tolist()
        found.append(tokenizer.decode(output[0], skip_special_tokens=True).strip())
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_the_pipeline_translates_as_one_would_by_hand(name, folders):
    folder, languages = folders(name), MAKERS[name][1]
    translate = pipeline("translation", model=str(folder), **languages)
    found = [record["translation_text"] for record in translate(ENGLISH)]
    assert found == by_hand(folder, ENGLISH, **languages)
    assert any(found)


@pytest.mark.parametrize("name", ["m2m100", "nllb", "mbart", "mbart50"])
def test_the_target_language_can_be_chosen_for_each_call(name, folders):
    folder, languages = folders(name), MAKERS[name][1]
    french = {"de": "fr", "deu_Latn": "fra_Latn", "de_DE": "fr_XX"}[languages["tgt_lang"]]
    translate = pipeline("translation", model=str(folder), **languages)
    found = translate(ENGLISH[:2], src_lang=languages["src_lang"], tgt_lang=french)
    expected = by_hand(folder, ENGLISH[:2], languages["src_lang"], french)
    assert [record["translation_text"] for record in found] == expected


def test_the_task_prefix_of_t5_is_that_of_the_languages(folders):
    folder = folders("t5")
    translate = pipeline("translation_en_to_de", model=str(folder))
    with_prefix = [f"translate English to German: {text}" for text in ENGLISH]
    assert [record["translation_text"] for record in translate(ENGLISH)] == by_hand(folder, with_prefix)


@pytest.mark.slow
def test_the_import_alone_brings_the_pipeline_back(folders):
    script = (
        "import sys\n"
        "from transformers import pipeline\n"
        "try:\n"
        "    pipeline('translation', model=sys.argv[1])\n"
        "except (KeyError, ValueError, RuntimeError) as error:\n"
        "    print('without:', type(error).__name__)\n"
        "import hf_deqnar\n"
        "print('with:', type(pipeline('translation', model=sys.argv[1])('Hi.')[0]['translation_text']).__name__)\n"
    )
    command = [sys.executable, "-c", script, str(folders("t5"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    without, found = done.stdout.strip().splitlines()
    assert without.startswith("without: ")
    assert found == "with: str"

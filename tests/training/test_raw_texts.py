"""Trainers that are given texts instead of token ids."""

import pytest
import torch
from datasets import Dataset

from hf_deqnar.training.arguments import DeqNarTrainingArguments
from hf_deqnar.training.trainer import DeqNarTrainer

from ..conftest import SENTENCES, small_model


def raw(kind: str) -> list[dict]:
    """Rows of texts with one empty source."""
    pairs = [*SENTENCES, ("", "leer")]
    if kind == "translation":
        return [{"translation": {"de": german, "en": english}} for english, german in pairs]
    return [{"source": english, "target": german} for english, german in pairs]


@pytest.fixture
def train_raw(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def make(rows, **options):
        arguments = DeqNarTrainingArguments(
            str(tmp_path / "raw"), objective="ctc", max_steps=1, max_tokens=100, use_cpu=True, report_to="none"
        )
        model = small_model(torch.float32, length="ctc", vocab_size=len(tokenizer), max_nfe=2)
        return DeqNarTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer, **options)

    return make


@pytest.mark.parametrize("kind", ["columns", "translation"])
def test_raw_texts_are_tokenized_and_cached(train_raw, tokenizer, tmp_path, kind):
    sides = {"source": "en", "target": "de"} if kind == "translation" else {}
    trainer = train_raw(Dataset.from_list(raw(kind)), eval_dataset=Dataset.from_list(raw(kind)[:2]), **sides)
    assert len(trainer.train_dataset) == len(SENTENCES)  # the empty pair is dropped
    assert trainer.train_dataset["input_ids"][0] == tokenizer(SENTENCES[0][0])["input_ids"]
    assert trainer.train_dataset["labels"][0] == tokenizer(SENTENCES[0][1])["input_ids"]
    assert trainer.eval_dataset["references"][:] == [[german] for _, german in SENTENCES[:2]]
    assert list((tmp_path / "cache" / "hf_deqnar" / "tokenized").glob("*.arrow"))
    assert trainer.train().global_step == 1
    assert "test_bleu" in trainer.predict(Dataset.from_list(raw(kind)[:2])).metrics


def test_unknown_columns_are_named_with_the_remedy(train_raw):
    message = "train_dataset has the columns question, answer, but source and target are needed.*source=… and target=…"
    with pytest.raises(ValueError, match=message):
        train_raw([{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match="translation with the languages de, en, but source and target are needed"):
        train_raw(raw("translation"))
    with pytest.raises(ValueError, match="train_dataset, line 1: en and de must be text"):
        train_raw([{"en": "a", "de": 3}], source="en", target="de")

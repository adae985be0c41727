import pytest
from transformers import AutoTokenizer

from hf_deqnar import DeqNarConfig
from hf_deqnar.corpus.tokenizer import train_tokenizer

from ..conftest import SENTENCES


def test_special_tokens_have_the_ids_that_configurations_expect(tokenizer):
    config = DeqNarConfig.preset("tiny")
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.unk_token_id == config.unk_token_id
    assert tokenizer.mask_token_id == config.mask_token_id
    assert tokenizer.convert_tokens_to_ids("<blank>") == config.blank_token_id


@pytest.mark.parametrize("text", [german for _, german in SENTENCES] + ["😀 שלום", "日本語", "tab\there", "a  b"])
def test_any_text_survives_the_round_trip(tokenizer, text):
    tokens = tokenizer(text)["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_it_is_saved_and_loaded_as_a_fast_tokenizer(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    for _, german in SENTENCES:
        assert loaded(german)["input_ids"] == tokenizer(german)["input_ids"]
    assert loaded.decode([5, 4, 7], skip_special_tokens=True) == tokenizer.decode([7])


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(ValueError, match="vocab_size=100 is too small.*262"):
        train_tokenizer(["a"], vocab_size=100)

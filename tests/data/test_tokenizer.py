import pytest
from transformers import AutoTokenizer

from hf_deqnar import DeqNarConfig
from hf_deqnar.data.tokenizer import train_tokenizer

from ..conftest import SENTENCES


def test_special_tokens_have_the_default_ids_of_the_configuration(tokenizer):
    config = DeqNarConfig.preset("tiny")
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.unk_token_id == config.unk_token_id
    assert tokenizer.mask_token_id == config.mask_token_id
    assert tokenizer.convert_tokens_to_ids("<blank>") == config.blank_token_id


NUMBERS = ["1990", "a 12b 3,5 ½"]
OTHERS = ["😀 שלום", "日本語", "tab\there", "a  b"]


@pytest.mark.parametrize("text", [*(german for _, german in SENTENCES), *NUMBERS, *OTHERS])
def test_decoding_restores_any_text(tokenizer, text):
    tokens = tokenizer(text)["input_ids"]
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_a_saved_tokenizer_loads_as_a_fast_tokenizer_with_the_same_tokens(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    for _, german in SENTENCES:
        assert loaded(german)["input_ids"] == tokenizer(german)["input_ids"]
    assert loaded.decode([5, 4, 7], skip_special_tokens=True) == tokenizer.decode([7])


def test_a_vocabulary_smaller_than_bytes_and_special_tokens_is_refused():
    with pytest.raises(ValueError, match="vocab_size=100 is too small.*262"):
        train_tokenizer(["a"], vocab_size=100)


def test_every_digit_is_a_token_even_where_numbers_are_frequent():
    tokenizer = train_tokenizer(["Im Jahr 1990 über 1990 m²."] * 20, vocab_size=300)
    assert tokenizer.tokenize("Im Jahr 1990") == ["ĠIm", "ĠJahr", "Ġ1", "9", "9", "0"]
    assert tokenizer.tokenize("über") == ["ĠÃ¼ber"]
    assert not [token for token in tokenizer.get_vocab() if sum(map(str.isdecimal, token)) > 1]


def test_truncation_gives_inputs_that_the_model_accepts(tmp_path):
    longest = DeqNarConfig.preset("tiny", length="ctc").max_source_length
    train_tokenizer(["a b"], 262, model_max_length=longest).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded("a " * 2000, truncation=True)["input_ids"]) == longest

import random

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_deqnar.data.subword_regularization import merges_of, split_tokens
from hf_deqnar.data.tokenizer import train_tokenizer

TEXTS = ["A man is riding a horse.", "Ein Mann reitet auf einem Pferd.", "Übung macht den Meister."] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, vocab_size=330)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_split_tokens_have_the_same_text(tokenizer, probability):
    merges, generator, changed = merges_of(tokenizer), random.Random(1), 0
    for text in TEXTS:
        tokens = tokenizer(text)["input_ids"]
        split = split_tokens(tokens, merges, probability, generator)
        assert tokenizer.decode(split, skip_special_tokens=True) == text
        changed += split != tokens
        if probability == 1.0:
            assert len(split) == len(text.encode()) + 2, "a token per byte, with the space before the text, and </s>"
    assert changed > len(TEXTS) / 2 if probability else changed == 0


def test_every_merge_concatenates_to_its_token(tokenizer):
    merges = merges_of(tokenizer)
    assert len(merges) > 50
    for token, parts in merges.items():
        assert "".join(tokenizer.convert_ids_to_tokens(parts)) == tokenizer.convert_ids_to_tokens(token)


def test_tokenizers_without_merges_are_refused():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    with pytest.raises(ValueError, match="needs a BPE tokenizer"):
        merges_of(tokenizer)

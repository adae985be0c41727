import copy

import pytest
from tokenizers import processors
from transformers import ByT5Tokenizer

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.tokenized_dataset import NO_CANVAS, VALID, drop_reason, tokenize_for_validation, tokenize_pairs
from hf_deqnar.distillation.candidates import tokenize_candidates
from hf_deqnar.evaluation.translation import labelled_batches

from ..conftest import SENTENCES, small_model

PAIRS = [Pair(source, [target]) for source, target in SENTENCES]


def test_pairs_become_token_ids_with_their_index_in_the_corpus(tokenizer, tmp_path):
    pairs = [Pair("", ["leer"]), *PAIRS]
    found = tokenize_pairs(pairs, tokenizer, max_length=60, cache=tmp_path)
    assert found.dataset["number"][:] == [1, 2, 3, 4, 5, 6]
    for row, (source, target) in zip(found.dataset, SENTENCES, strict=True):
        assert row["input_ids"] == tokenizer(source)["input_ids"]
        assert row["labels"] == tokenizer(target)["input_ids"]
        assert row["input_ids"][-1] == tokenizer.eos_token_id


def test_invalid_pairs_are_dropped_and_counted_by_reason(tokenizer, tmp_path):
    long = "horse " * 50
    pairs = [
        *PAIRS,
        Pair("A man.", ["  "]),
        Pair(" \t", ["x"]),
        Pair(long, ["Pferd"]),
        Pair("A", ["cup of coffee, cup of tea"]),
    ]
    found = tokenize_pairs(pairs, tokenizer, max_length=40, canvas=2, cache=tmp_path)
    assert found.dropped == {"empty": 2, "too long": 1, "longer than its canvas": 1}
    assert len(found.dataset) == len(PAIRS)
    without_canvas = tokenize_pairs(pairs, tokenizer, max_length=40, cache=tmp_path)
    assert without_canvas.dropped == {"empty": 2, "too long": 1}


def test_a_repeated_token_needs_one_more_canvas_position():
    assert drop_reason("a", "b", [6, 2], [7, 8, 9, 2], max_length=40, canvas=2) == VALID
    assert drop_reason("a", "b", [6, 2], [7, 7, 9, 2], max_length=40, canvas=2) == NO_CANVAS
    assert drop_reason("a", "b", [6, 2], [7, 7, 9, 2], max_length=40, canvas=None) == VALID


def test_a_second_call_uses_the_cache(tokenizer, tmp_path):
    class Counting:
        backend_tokenizer = tokenizer.backend_tokenizer
        bos_token_id = None
        eos_token_id = tokenizer.eos_token_id
        calls = 0

        def __call__(self, texts):
            self.calls += 1
            return tokenizer(texts)

    counting = Counting()
    # The state that this call leaves in the tokenizer must have no effect.
    tokenizer(["A man.", "A man is riding a horse."], padding=True, truncation=True, max_length=4)
    first = tokenize_pairs(PAIRS, counting, max_length=60, cache=tmp_path)
    calls = counting.calls
    again = tokenize_pairs(PAIRS, counting, max_length=60, cache=tmp_path)
    assert calls > 0
    assert counting.calls == calls
    assert first.dataset[:] == again.dataset[:]
    changed = tokenize_pairs([*PAIRS[:-1], Pair("Other.", ["Anders."])], counting, max_length=60, cache=tmp_path)
    assert counting.calls > calls
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("damage", ["a flipped bit", "half of the file", "no checksum"])
def test_a_damaged_cache_is_named_and_made_again(tokenizer, tmp_path, caplog, damage):
    first = tokenize_pairs(PAIRS, tokenizer, max_length=60, cache=tmp_path)
    (file,) = tmp_path.rglob("*.arrow")
    intact = file.read_bytes()
    changed = bytearray(intact)
    changed[intact.index(bytes(first.dataset["input_ids"][0][0].to_bytes(4, "little")))] ^= 1
    broken = {"a flipped bit": changed, "half of the file": intact[: len(intact) // 2], "no checksum": changed}[damage]
    file.unlink()  # the old content remains mapped
    file.write_bytes(broken)
    if damage == "no checksum":
        file.with_suffix(".json").unlink()
    again = tokenize_pairs(PAIRS, tokenizer, max_length=60, cache=tmp_path)
    assert again.dataset[:] == first.dataset[:]
    assert (f"{file} is damaged; the texts are tokenized again." in caplog.text) == (damage != "no checksum")
    assert sorted(path.suffix for path in file.parent.iterdir()) == [".arrow", ".json"]


def test_errors_about_invalid_text_name_the_sentence(tokenizer, tmp_path):
    for bad in (Pair("\ud800", ["x"]), Pair("x", ["\ud800"])):
        for read in (tokenize_pairs, tokenize_for_validation):
            with pytest.raises(ValueError, match="Sentence 7 of the corpus: .*not valid Unicode"):
                read([*PAIRS, bad], tokenizer, max_length=60)


def test_a_slow_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Training needs a fast tokenizer, and ByT5Tokenizer is a slow one; without"):
        tokenize_pairs(PAIRS, ByT5Tokenizer(), max_length=60, cache=tmp_path)
    with pytest.raises(ValueError, match="Training needs a fast tokenizer, and ByT5Tokenizer"):
        tokenize_candidates(PAIRS, [["a", "b"]] * len(PAIRS), ByT5Tokenizer(), max_length=60, cache=tmp_path)


def test_a_corpus_without_valid_pairs_is_an_error(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="None of 6 pairs can be used .6 too long; max_length is 3"):
        tokenize_pairs(PAIRS, tokenizer, max_length=3, cache=tmp_path)


def test_labels_have_no_start_token(tokenizer, tmp_path):
    """Bart's tokenizer puts <s> before every text."""
    with_start = copy.deepcopy(tokenizer)
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", start), ("</s>", end)]
    )
    assert with_start("A man.")["input_ids"][0] == start
    plain = tokenize_pairs(PAIRS, tokenizer, max_length=60, cache=tmp_path).dataset
    several = [[pair.references[0], "Nein."] for pair in PAIRS]
    for found in (
        tokenize_pairs(PAIRS, with_start, max_length=60, cache=tmp_path).dataset,
        tokenize_for_validation(PAIRS, with_start, max_length=60),
        tokenize_candidates(PAIRS, several, with_start, max_length=60, cache=tmp_path).dataset,
    ):
        assert found["labels"][:] == plain["labels"][:]
        assert [row[0] for row in found["input_ids"]] == [start] * len(PAIRS)
    assert [row[0] for row in found["candidates"]] == plain["labels"][:]
    (batch,), order = labelled_batches(small_model(vocab_size=len(tokenizer)), with_start, SENTENCES, batch_size=9)
    labels = [[token for token in row if token >= 0] for row in batch["labels"].tolist()]
    assert labels == [plain["labels"][index] for index in order]


def test_validation_retains_all_pairs_with_all_references(tokenizer):
    pairs = [Pair("A horse.", ["Ein Pferd.", "Das Pferd."]), Pair("horse " * 100, ["Pferd"])]
    found = tokenize_for_validation(pairs, tokenizer, max_length=20)
    assert found["references"][:] == [["Ein Pferd.", "Das Pferd."], ["Pferd"]]
    assert found["source"][1] == pairs[1].source
    assert len(found["input_ids"][1]) == 20

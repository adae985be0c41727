import pytest
import torch

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.export.parity import agreement, compare_systems

from ..conftest import SENTENCES


def test_agreement_counts_tokens_in_order():
    assert agreement([[1, 2], []], [[1, 2], []]).tokens == 1.0
    assert agreement([[]], [[]]).tokens == 1.0
    near = agreement([[1, 2, 3, 4], [5]], [[1, 3, 4], [6]])
    assert near.sentences == 0.0
    assert near.tokens == pytest.approx(2 * 3 / 9)


def test_systems_are_compared_with_the_first(loaded, tokenizer, monkeypatch):
    pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")
    model, onnx_model = loaded("implicit", "fp32")
    pairs = [Pair(english, [german]) for english, german in SENTENCES]
    figures = compare_systems({"torch": model, "fp32": onnx_model}, tokenizer, pairs, batch_size=4)
    assert figures["torch"]["same_tokens"] == figures["torch"]["same_sentences"] == 1.0
    assert figures["fp32"] == {**figures["torch"], "same_tokens_sentence_graph": 1.0}
    monkeypatch.setattr(
        onnx_model, "sentence", lambda *_: [torch.full((1, 4), 7), torch.tensor([0.1]), torch.tensor([0.5])]
    )
    assert (
        compare_systems({"torch": model, "fp32": onnx_model}, tokenizer, pairs, 4)["fp32"]["same_tokens_sentence_graph"]
        < 0.5
    )
    without = compare_systems({"torch": model}, tokenizer, [Pair(pair.source, []) for pair in pairs], batch_size=4)
    assert "bleu" not in without["torch"]

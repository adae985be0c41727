"""The quality estimate of `generate`, against its formula."""

import math

import pytest
import torch

from hf_deqnar import DeqNarGenerationConfig
from hf_deqnar.models.deqnar.quality import (
    FEATURES,
    Familiarity,
    features_of,
    pack_log_probs,
    unpack_log_probs,
    words_of,
)

from ...conftest import SENTENCES, VOCABULARY, padded, random_sentences, small_model


def make_quality(vocabulary: int = VOCABULARY) -> dict:
    log_probs = -1 - 0.1 * torch.arange(vocabulary)
    return {
        "sentence": [0.5, *(0.1 * (index + 1) for index in range(len(FEATURES)))],
        "word": [1.0, 0.5, 0.25],
        "usual_log_ratio": 0.1,
        "source_log_probs": pack_log_probs(log_probs),
        "rare": -4.0,
        "unfamiliar": [-3.0, -2.0],
    }


MODELS = [
    ({"length": "predict"}, {}),
    ({"length": "predict"}, {"length_beams": 3, "num_return_sequences": 2}),
    ({"length": "ctc"}, {}),
    ({"length": "ctc"}, {"ctc_beam_size": 4, "num_return_sequences": 2}),
    ({"length": "ctc", "refinement": "stacked"}, {"ctc_beam_size": 2}),
]


@pytest.mark.parametrize(("fields", "options"), MODELS)
def test_quality_is_the_formula_and_does_not_depend_on_the_batch(fields, options):
    model, quality = small_model(**fields), make_quality()
    sentences = random_sentences(5, shortest=2)
    tokens = padded(sentences)
    settings = {"quality": quality, "return_dict_in_generate": True, **options}
    out = model.generate(tokens, **settings)
    count = options.get("num_return_sequences", 1)
    assert out.quality.shape == (5 * count,)
    assert out.token_quality.shape == out.sequences.shape
    assert ((out.quality > 0) & (out.quality < 1)).all()
    bias, *weights = quality["sentence"]
    logits = out.quality_features.double() @ torch.tensor(weights).double() + bias
    torch.testing.assert_close(out.quality.double(), logits.sigmoid(), rtol=1e-5, atol=1e-6)
    assert (out.token_quality[out.sequences == 1] == 0).all()
    for row, sentence in enumerate(sentences):
        alone = model.generate(torch.tensor([sentence]), **settings)
        torch.testing.assert_close(alone.quality, out.quality[row * count : (row + 1) * count], rtol=1e-5, atol=1e-6)
        width = alone.token_quality.shape[1]
        torch.testing.assert_close(
            alone.token_quality, out.token_quality[row * count : (row + 1) * count, :width], rtol=1e-5, atol=1e-6
        )
    plain = model.generate(tokens, return_dict_in_generate=True, **options)
    assert plain.quality is None
    assert torch.equal(plain.sequences, out.sequences)
    assert torch.equal(plain.sequences_scores, out.sequences_scores)


def test_tokens_of_a_beam_have_the_log_probability_of_the_best_path():
    """With one beam the best path is known; its tokens have the same scores when they come from a beam search."""
    model, quality = small_model(length="ctc"), {**make_quality(), "word": [0.0, 1.0, 0.0]}
    tokens = padded(random_sentences(6, shortest=3))
    settings = {"quality": quality, "return_dict_in_generate": True}
    path = model.generate(tokens, **settings)
    beam = model.generate(tokens, ctc_beam_size=6, num_return_sequences=6, **settings)
    compared = 0
    for row, text in enumerate(path.sequences.tolist()):
        text = [token for token in text if token != 1]
        for candidate in range(6 * row, 6 * row + 6):
            if [token for token in beam.sequences[candidate].tolist() if token != 1] == text:
                expected = path.token_scores[row, : len(text)].float()
                found = beam.token_quality[candidate, : len(text)].float().logit()
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
                compared += 1
    assert compared >= 3


def test_features_are_what_they_are_called():
    scores = torch.tensor([[-1.0, -3.0, 0.0], [-0.5, 0.0, 0.0]])
    real = torch.tensor([[True, True, False], [False, False, False]])
    canvas = torch.tensor([[-2.0, -4.0, -9.0], [-1.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    source, source_mask = (
        torch.tensor([[10, 40, 0], [20, 1, 1]]),
        torch.tensor([[True, True, True], [True, False, False]]),
    )
    found = features_of(scores, real, canvas, mask, source, source_mask, torch.tensor([True, False]), make_quality())
    ratio = math.log(2 / 3) - 0.1
    expected = [-2.0, -3.0, -3.0, 0.0, -ratio, (-2 - 5 - 1) / 3, 1 / 3, math.log(3), 0.0]
    torch.testing.assert_close(found[0], torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert found[1].tolist() == pytest.approx([-20, -20, -1, 0, 0.1, -3, 0, 0, 1], abs=1e-4)


def test_a_text_with_rare_tokens_is_unfamiliar_unless_it_is_short():
    familiarity = Familiarity(make_quality())  # token n has log-probability −1 − n/10; usual are −3, of n tokens ± 2/√n
    assert not familiarity.is_unfamiliar(torch.tensor([20] * 9))
    assert not familiarity.is_unfamiliar(torch.tensor([25] * 9))
    assert familiarity.is_unfamiliar(torch.tensor([28] * 9))
    assert not familiarity.is_unfamiliar(torch.tensor([49] * 4))
    assert familiarity.is_unfamiliar(torch.tensor([999] * 5))
    assert unpack_log_probs(make_quality()["source_log_probs"]).shape == (VOCABULARY,)


def test_words_have_their_tokens(tokenizer):
    for _, german in SENTENCES:
        tokens = tokenizer(german)["input_ids"]
        text, words = words_of(tokenizer, tokens)
        assert text == german
        assert [text[start:end] for start, end, _ in words] == german.split()
        used = [index for _, _, own in words for index in own]
        assert used == sorted(used)
        for start, end, own in words:
            assert tokenizer.decode([tokens[index] for index in own]).strip() == text[start:end]


@pytest.mark.parametrize(
    ("quality", "message"),
    [
        ({"sentence": [1.0]}, "quality must be unset or a dictionary with sentence, word"),
        ("good", "quality must be unset or a dictionary"),
        ({**make_quality(), "word": [1.0]}, "quality has 10 and 1 parameters; fit it with hf-deqnar calibrate"),
    ],
)
def test_a_damaged_estimate_is_refused(quality, message):
    with pytest.raises(ValueError, match=message):
        DeqNarGenerationConfig(quality=quality)


def test_the_estimate_is_saved_with_the_generation_config(tmp_path):
    DeqNarGenerationConfig(quality=make_quality()).save_pretrained(tmp_path)
    assert DeqNarGenerationConfig.from_pretrained(tmp_path).quality == make_quality()
    assert DeqNarGenerationConfig().quality is None

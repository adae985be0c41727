"""The chunked losses compared with full logits in float64: losses, gradients and log-probabilities."""

import pytest
import torch
from torch.nn import functional

from hf_deqnar.models.deqnar import losses_deqnar
from hf_deqnar.models.deqnar.ctc import ctc_loss, viterbi_path
from hf_deqnar.models.deqnar.losses_deqnar import (
    OwnWords,
    SampledWords,
    cross_entropy_total,
    ctc_total,
    score_targets,
)

ROWS, CANVAS, WIDTH, VOCABULARY, BLANK = 5, 12, 8, 30, 5


@pytest.fixture(params=[1, 100, 10**9], ids=["one by one", "some", "all at once"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(losses_deqnar, "CHUNK", request.param)


def problem(dtype: torch.dtype = torch.float64):
    """Canvases of different lengths; the third target does not fit, the fourth repeats words."""
    features = torch.randn(ROWS, CANVAS, WIDTH, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
    canvas_lengths = torch.tensor([12, 7, 3, 9, 1])
    labels = torch.full((ROWS, 6), -100)
    for row, words in enumerate([[7, 8, 9], [6, 7, 6, 7, 6], [8, 8, 8], [9, 9, 9, 10], [11]]):
        labels[row, : len(words)] = torch.tensor(words)
    mask = torch.arange(CANVAS)[None] < canvas_lengths[:, None]
    return features, weight, mask, labels


def gradients(loss: torch.Tensor, *tensors: torch.Tensor):
    return torch.autograd.grad(3 * loss, tensors)


@pytest.mark.usefixtures("chunk")
def test_ctc_in_chunks_is_ctc():
    features, weight, mask, labels = problem()
    full, fits = ctc_loss(features @ weight.T, labels, mask.sum(dim=1), (labels >= 0).sum(dim=1), BLANK)
    found, also_fits, _ = ctc_total(features, mask, weight, labels, BLANK)
    assert fits.tolist() == also_fits.tolist() == [True, True, False, True, True]
    torch.testing.assert_close(found, full.sum())
    for actual, expected in zip(
        gradients(found, features, weight), gradients(full.sum(), features, weight), strict=True
    ):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_in_chunks_is_cross_entropy(smoothing):
    features, weight, mask, _ = problem()
    targets = torch.randint(VOCABULARY, (int(mask.sum()),))
    full = functional.cross_entropy(features[mask] @ weight.T, targets, reduction="sum", label_smoothing=smoothing)
    found = cross_entropy_total(features[mask], weight, targets, smoothing)
    torch.testing.assert_close(found, full)
    for actual, expected in zip(gradients(found, features, weight), gradients(full, features, weight), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.usefixtures("chunk")
def test_own_log_probs_are_the_log_softmax_of_the_target_vocabulary():
    features, weight, mask, labels = problem()
    full = (features @ weight.T).log_softmax(dim=-1)
    own = OwnWords.of(labels, BLANK)
    reading = score_targets(features, mask, weight, own.words)
    assert torch.equal(reading.tokens[mask], full.argmax(dim=-1)[mask])
    expected = full.gather(2, own.words[:, None].expand(-1, CANVAS, -1))
    torch.testing.assert_close(reading.log_probs[mask], expected[mask].detach())


def test_best_path_is_the_same_in_the_target_vocabulary():
    features, weight, mask, labels = problem()
    lengths, canvas_lengths = (labels >= 0).sum(dim=1), mask.sum(dim=1)
    full, score = viterbi_path((features @ weight.T).log_softmax(dim=-1), labels, canvas_lengths, lengths, BLANK)
    own = OwnWords.of(labels, BLANK)
    reading = score_targets(features, mask, weight, own.words)
    places, own_score = viterbi_path(reading.log_probs, own.labels, canvas_lengths, lengths, 0)
    assert torch.equal(own.tokens(places), full)
    torch.testing.assert_close(own_score, score.detach())


def test_loss_is_zero_if_all_tokens_are_revealed():
    features, weight, _, _ = problem()
    loss = cross_entropy_total(features[:, :0].flatten(0, 1), weight, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss == 0
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_computed_in_at_least_float32(dtype):
    features, weight, mask, labels = problem(dtype)
    exact, *_ = ctc_total(features.double(), mask, weight.double(), labels, BLANK)
    loss, *_ = ctc_total(features, mask, weight, labels, BLANK)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    loss.backward()
    assert weight.grad.dtype == features.grad.dtype == dtype


def test_only_requested_gradients_are_computed():
    features, weight, mask, labels = problem()
    loss, *_ = ctc_total(features.detach(), mask, weight, labels, BLANK)
    loss.backward()
    assert weight.grad.abs().sum() > 0
    with torch.no_grad():
        loss, *_ = ctc_total(features, mask, weight, labels, BLANK)
    assert not loss.requires_grad


def test_autocast_rounds_the_projections_only():
    """Losses and gradients of a bfloat16 autocast agree with those without it up to the precision of bfloat16."""
    features, weight, mask, labels = problem(torch.float32)
    expected, *_ = ctc_total(features, mask, weight, labels, BLANK)
    with torch.autocast("cpu", torch.bfloat16):
        found, _, prediction = ctc_total(features, mask, weight, labels, BLANK, predict=True)
    assert found.dtype == prediction.expected.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.0)
    for one, other in zip(gradients(found, features, weight), gradients(expected, features, weight), strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.usefixtures("chunk")
def test_a_sample_of_all_words_is_the_whole_vocabulary():
    features, weight, mask, labels = problem()
    sampled = SampledWords.draw(labels, VOCABULARY, BLANK, VOCABULARY)
    assert sorted(sampled.tokens.tolist()) == list(range(VOCABULARY))
    expected, fits, prediction = ctc_total(features, mask, weight, labels, BLANK, predict=True)
    found, also_fits, also = ctc_total(features, mask, weight, labels, BLANK, predict=True, sampled=sampled)
    torch.testing.assert_close(found, expected)
    assert fits.tolist() == also_fits.tolist()
    for one, other in zip(gradients(found, features, weight), gradients(expected, features, weight), strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(also.scores.tokens[mask], prediction.scores.tokens[mask])
    real = functional.pad(labels >= 0, (1, 0), value=True)[:, None, :] & mask[:, :, None]  # the blank and the labels
    torch.testing.assert_close(also.scores.log_probs[real], prediction.scores.log_probs[real])
    torch.testing.assert_close(also.expected, prediction.expected)


def test_a_sample_estimates_the_normaliser_without_bias():
    features, weight, _, labels = problem()
    features, weight = features.detach() * 0.3, weight.detach()
    expected = (features @ weight.T).logsumexp(dim=-1).exp()
    generator, draws = torch.Generator().manual_seed(0), 4000
    total = torch.zeros_like(expected)
    for _ in range(draws):
        sampled = SampledWords.draw(labels, VOCABULARY, BLANK, 6, generator)
        assert len(sampled.tokens) == len(set(sampled.tokens.tolist())) == 7 + 6  # six words, the blank, the sample
        assert (sampled.places[labels[labels >= 0]] >= 0).all()
        total += (features @ weight[sampled.tokens].T + sampled.offsets).logsumexp(dim=-1).exp()
    torch.testing.assert_close(total / draws, expected, rtol=0.05, atol=0.0)


def test_predictions_are_words_of_the_sample():
    features, weight, mask, labels = problem()
    sampled = SampledWords.draw(labels, VOCABULARY, BLANK, 3, torch.Generator().manual_seed(0))
    _, _, prediction = ctc_total(features, mask, weight, labels, BLANK, predict=True, sampled=sampled)
    logits = (features @ weight.T)[:, :, sampled.tokens]
    assert torch.equal(prediction.scores.tokens[mask], sampled.tokens[logits.argmax(dim=-1)][mask])
    probabilities = (logits + sampled.offsets).softmax(dim=-1)
    torch.testing.assert_close(prediction.expected[mask], (probabilities @ weight[sampled.tokens])[mask])

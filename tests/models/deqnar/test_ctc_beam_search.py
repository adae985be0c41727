"""CTC beam search: equal to enumeration, in tensors, in NumPy and with Python floats."""

import math

import pytest
import torch

from hf_deqnar.models.deqnar.ctc import collapse
from hf_deqnar.models.deqnar.ctc_beam_search import (
    NUMPY_ROWS,
    prefix_beam_of_sentence,
    prefix_beam_search,
    prefix_beams_in_numpy,
    prefix_beams_on_cpu,
)

from .test_ctc import all_texts


@pytest.mark.parametrize("seed", range(5))
def test_wide_beam_in_numpy_agrees_with_enumeration(seed):
    torch.manual_seed(seed)
    blank, lengths = 2, [5, 3, 1]
    log_probabilities = (2 * torch.randn(3, 5, 4, dtype=torch.float64)).log_softmax(dim=-1)
    candidates = log_probabilities.topk(4, dim=-1).indices
    question = (log_probabilities.numpy(), candidates.numpy(), torch.tensor(lengths).numpy(), blank)
    texts, counts, scores = prefix_beams_in_numpy(*question, 400)
    for row, length in enumerate(lengths):
        expected = all_texts(log_probabilities[row, :length], blank)
        for rank, (text, probability) in enumerate(expected.items()):
            assert texts[row, rank, : counts[row, rank]].tolist() == list(text)
            assert math.exp(scores[row, rank]) == pytest.approx(probability, rel=1e-9)
        assert (scores[row, len(expected) :] == -math.inf).all()


@pytest.mark.parametrize("seed", range(5))
def test_wide_prefix_beam_agrees_with_enumeration(seed):
    torch.manual_seed(seed)
    blank, lengths = 2, [5, 3, 1]
    log_probabilities = (2 * torch.randn(3, 5, 4, dtype=torch.float64)).log_softmax(dim=-1)
    texts, counts, scores = prefix_beam_search(log_probabilities, torch.tensor(lengths), blank, 400, padding=9)
    for row, length in enumerate(lengths):
        expected = all_texts(log_probabilities[row, :length], blank)
        for rank, (text, probability) in enumerate(expected.items()):
            assert texts[row, rank, : counts[row, rank]].tolist() == list(text)
            assert math.exp(scores[row, rank]) == pytest.approx(probability, rel=1e-9)
        assert scores[row, : len(expected)].logsumexp(dim=0).item() == pytest.approx(0, abs=1e-9)


def test_narrow_prefix_beam_is_better_than_the_best_path_and_never_overestimates():
    torch.manual_seed(0)
    log_probabilities = (2 * torch.randn(12, 5, 4, dtype=torch.float64)).log_softmax(dim=-1)
    lengths = torch.full((12,), 5)
    texts, counts, scores = prefix_beam_search(log_probabilities, lengths, 0, 4, padding=9)
    best_path, best_counts = collapse(log_probabilities.argmax(dim=-1), lengths, 0, 9)
    gains = []
    for row in range(12):
        exact = all_texts(log_probabilities[row], 0)
        found = exact[tuple(texts[row, 0, : counts[row, 0]].tolist())]
        assert math.exp(scores[row, 0]) <= found + 1e-12
        gains.append(found - exact[tuple(best_path[row, : best_counts[row]].tolist())])
    assert sum(gains) > 0


@pytest.mark.parametrize("beam_size", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_sentence_search_agrees_with_batched_search(seed, beam_size):
    generator = torch.Generator().manual_seed(seed)
    vocabulary, blank = 30, 4
    logits = torch.randn(6, 12, vocabulary, generator=generator, dtype=torch.float64)
    logits[:, :, :6] += 2.0 * (1 + seed)  # few tokens and the blank, repeated: prefixes merge
    log_probabilities = logits.log_softmax(dim=-1)
    lengths = torch.full((6,), 12)
    texts, counts, scores = prefix_beam_search(
        log_probabilities, lengths, blank, beam_size, padding=0, tokens_per_step=vocabulary - 1
    )
    candidates = logits.topk(2 * beam_size + 1, dim=-1).indices
    for row in range(6):
        found = prefix_beam_of_sentence(log_probabilities[row].numpy(), candidates[row].numpy(), blank, beam_size)
        expected = [tuple(texts[row, place, : counts[row, place]].tolist()) for place in range(beam_size)]
        assert [text for text, _ in found] == expected
        assert [score for _, score in found] == pytest.approx(scores[row].tolist())


def test_beam_search_does_not_underflow_on_long_sentences():
    log_probabilities = torch.full((400, 50), 1 / 50, dtype=torch.float64).log()
    candidates = torch.arange(7).expand(400, -1)
    ((_, score), *_) = prefix_beam_of_sentence(log_probabilities.numpy(), candidates.numpy(), blank=0, beam_size=3)
    assert -400 * 50 < score < -700  # exp(−700) is near the smallest float


@pytest.mark.parametrize("rows", [1, NUMPY_ROWS - 1, NUMPY_ROWS, 7], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("beam_size", [1, 4, 30])
@pytest.mark.parametrize("seed", range(3))
def test_search_on_a_cpu_agrees_with_that_of_tensors(seed, beam_size, rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 9, 6, generator=generator, dtype=torch.float64)
    logits[:, :, :3] += seed  # few tokens and the blank, repeated: prefixes merge
    log_probabilities = logits.log_softmax(dim=-1)
    question = (log_probabilities, torch.tensor([9, 1, 4, 2, 6, 9, 5])[:rows], 0, beam_size)
    texts, counts, scores = prefix_beam_search(*question, padding=9)
    others, other_counts, other_scores = prefix_beams_on_cpu(*question, 9, None, 0.0)
    found = scores > float("-inf")
    assert torch.equal(found, other_scores > float("-inf"))  # a short row has fewer texts
    assert beam_size < 30 or rows == 1 or not found.all()
    torch.testing.assert_close(other_scores, scores)
    assert torch.equal(other_counts[found], counts[found])
    assert torch.equal(others[found], texts[found])


def test_rows_of_a_prefix_beam_do_not_influence_each_other():
    torch.manual_seed(0)
    log_probabilities = torch.randn(3, 7, 6, dtype=torch.float64).log_softmax(dim=-1)
    lengths = torch.tensor([7, 4, 2])
    batched = prefix_beam_search(log_probabilities, lengths, 0, 3, padding=9)
    for row, length in enumerate(lengths.tolist()):
        single = prefix_beam_search(log_probabilities[row : row + 1, :length], lengths[row : row + 1], 0, 3, padding=9)
        assert torch.equal(single[1][0], batched[1][row])
        torch.testing.assert_close(single[2][0], batched[2][row])
        assert torch.equal(single[0][0], batched[0][row, :, : single[0].shape[2]])

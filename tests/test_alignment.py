import itertools

import pytest
import torch

from hf_deqnar.alignment import ctc_loss


def collapse(path: tuple[int, ...], blank: int) -> list[int]:
    """Merge repetitions, then drop blanks: the definition, written out."""
    return [token for token, _ in itertools.groupby(path) if token != blank]


@pytest.mark.parametrize("target", [[1], [2, 2], [1, 2, 1], [3]])
def test_ctc_sums_over_all_paths(target):
    blank, canvas, vocabulary = 0, 4, 4
    logits = torch.randn(1, canvas, vocabulary, dtype=torch.float64)
    probabilities = logits.softmax(dim=-1)[0]
    total = sum(
        torch.stack([probabilities[t, token] for t, token in enumerate(path)]).prod()
        for path in itertools.product(range(vocabulary), repeat=canvas)
        if collapse(path, blank) == target
    )
    loss, fits = ctc_loss(logits, torch.tensor([target]), torch.tensor([canvas]), torch.tensor([len(target)]), blank)
    assert fits.all()
    torch.testing.assert_close(loss[0].double(), -total.log(), rtol=1e-5, atol=1e-6)


def test_a_target_that_does_not_fit_costs_nothing_and_says_so():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 1, 1], [1, 2, -100]])
    loss, fits = ctc_loss(logits, targets, torch.tensor([3, 3]), torch.tensor([3, 2]), blank=0)
    loss.sum().backward()
    assert fits.tolist() == [False, True]
    assert loss[0] == 0
    assert logits.grad.isfinite().all()
    assert (logits.grad[0] == 0).all()

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from hf_deqnar import solve
from hf_deqnar.models.deqnar.stability import (
    RandomState,
    cached_weights,
    initial_condition_loss,
    jacobian_penalty,
    mixed_initial_state,
    random_budget,
    remove_rescaling,
    rescale_weights,
    rescaling_of,
    spectral_radius,
)

from ...conftest import padded, random_sentences, small_model
from ...invariants.functions import Contraction


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)).double()


@pytest.mark.parametrize("kind", ["weight", "spectral"])
def test_initial_rescaling_has_no_effect_and_can_be_removed(kind):
    module, inputs = two_layers(), torch.randn(3, 6, dtype=torch.float64)
    before = module(inputs)
    rescale_weights(module, kind)
    torch.testing.assert_close(module(inputs), before)
    remove_rescaling(module)
    assert not parametrize.is_parametrized(module[0])
    torch.testing.assert_close(module(inputs), before)


@pytest.mark.parametrize("kind", ["weight", "spectral"])
def test_norms_are_as_precise_under_autocast(kind):
    module = two_layers().float()
    rescale_weights(module, kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rescaled, raw = rescaling_of(module[0])
        rescaled.refresh(raw)
        inside = module[0].weight
        assert module(torch.randn(3, 6)).dtype == torch.bfloat16
    torch.testing.assert_close(inside, module[0].weight, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["weight", "spectral"])
def test_scale_determines_the_norm(kind):
    module = two_layers()
    rescale_weights(module, kind)
    rescaled, raw = rescaling_of(module[0])
    with torch.no_grad():
        rescaled.scale.fill_(0.7)
        raw.mul_(13)  # the direction is the same, the length has no effect
    norm = module[0].weight.norm(dim=1) if kind == "weight" else torch.linalg.matrix_norm(module[0].weight, 2)
    torch.testing.assert_close(norm, torch.full_like(norm, 0.7), rtol=1e-3, atol=0)


def test_the_rescaling_factor_is_clipped():
    module = two_layers()
    raw = module[0].weight.detach().clone()
    rescale_weights(module, "weight", clip=0.5)
    torch.testing.assert_close(module[0].weight, 0.5 * raw)


def test_power_iteration_follows_the_weights():
    module = nn.Sequential(nn.Linear(8, 8)).double().train()
    rescale_weights(module, "spectral")
    rescaled, raw = rescaling_of(module[0])
    with torch.no_grad():
        raw.copy_(torch.randn_like(raw))
    for _ in range(200):
        with cached_weights(module):
            pass
    torch.testing.assert_close(rescaled.norm(raw), torch.linalg.matrix_norm(raw, 2))


def test_rescaled_weights_are_computed_once_per_solve(monkeypatch):
    model = small_model(weight_norm="spectral").train()
    rescaled, _ = rescaling_of(model.model.transition.layers[0].feed_forward.expand)
    calls = []
    original = type(rescaled).forward
    monkeypatch.setattr(type(rescaled), "forward", lambda self, w: calls.append(self is rescaled) or original(self, w))
    tokens = padded(random_sentences(3))
    out = model(input_ids=tokens, labels=tokens.masked_fill(tokens == 1, -100))
    assert out.nfe.max() > 2
    assert sum(calls) == 1
    out.loss.backward()
    assert rescaled.scale.grad.abs().sum() > 0


def test_the_jacobian_penalty_estimates_the_squared_frobenius_norm():
    function = Contraction.random(rows=1, positions=1, features=12, strength=0.9)
    jacobian = torch.autograd.functional.jacobian(lambda z: function(z).flatten(), function.zeros).reshape(12, 12)
    estimates = torch.stack([jacobian_penalty(function, function.zeros) for _ in range(3000)])
    torch.testing.assert_close(estimates.mean(), jacobian.pow(2).sum() / 12, rtol=0.05, atol=0)


def test_the_jacobian_penalty_can_be_minimised_and_ignores_padding():
    weight = (0.9 * torch.eye(4)).requires_grad_()
    mask = torch.tensor([[True, True, False]])
    penalty = jacobian_penalty(lambda z: z @ weight, torch.zeros(1, 3, 4), mask)
    penalty.backward()
    assert torch.allclose(penalty, torch.tensor(0.81), atol=0.8)
    assert weight.grad.diagonal().min() > 0


def test_initial_condition_loss_has_a_gradient_of_the_first_evaluation_only():
    first = torch.zeros(2, 3, 4, requires_grad=True)
    equilibrium = torch.ones(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    loss = initial_condition_loss(first, equilibrium, mask)
    loss.backward()
    assert loss == 1
    assert equilibrium.grad is None
    assert (first.grad[~mask] == 0).all()
    assert (first.grad[mask] < 0).all()


def test_correction_state_is_drawn_uniformly_from_the_trajectory_of_each_row():
    function = Contraction.random(rows=3, positions=2, features=4, strength=0.95)
    path = solve(function, function.zeros, keep_trajectory=True, tol=1e-5, max_nfe=40)
    counts = torch.zeros(3, 41)
    for _ in range(600):
        chosen = RandomState()
        solve(function, function.zeros, tol=1e-5, max_nfe=40, observe=chosen)
        for index, step in enumerate(path.trajectory):
            for place, row in enumerate(step.rows.tolist()):
                counts[row, index] += torch.equal(chosen.value[row], step.value[place])
    assert (counts.sum(dim=1) == 600).all()  # always a state of the row's own trajectory
    for row in range(3):
        visited = counts[row, : int(path.nfe[row])]
        assert (visited > 0).all()
        assert visited.max() < 3 * visited.mean()


def test_random_budgets_cover_their_range():
    drawn = {random_budget(5) for _ in range(300)}
    assert drawn == {1, 2, 3, 4, 5}


def test_a_share_of_the_rows_starts_from_noise():
    initial = torch.zeros(2000, 3, 4)
    mixed = mixed_initial_state(initial, share=0.25)
    noisy = mixed.flatten(1).abs().sum(dim=1) > 0
    assert 0.2 < noisy.double().mean() < 0.3
    assert 0.9 < mixed[noisy].std() < 1.1


def test_the_spectral_radius_is_the_largest_eigenvalue():
    matrix = torch.randn(3, 10, 10, dtype=torch.float64)
    exact = torch.linalg.eigvals(matrix).abs().amax(dim=1)
    estimate = spectral_radius(
        lambda z: (z[:, None] @ matrix)[:, 0], torch.zeros(3, 10, dtype=torch.float64), iterations=400
    )
    torch.testing.assert_close(estimate, exact, rtol=0.03, atol=0)

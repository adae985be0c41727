"""IFT is the gradient through an iteration unrolled to convergence; phantom converges to it; memory does not grow."""

import pytest
import torch

from hf_deqnar.models.deqnar.implicit_gradient import GradientOptions, equilibrium

from ..conftest import padded, random_sentences, small_model
from .functions import Contraction, Counting


def parameter_gradients(options: GradientOptions, **solver_options) -> list[torch.Tensor]:
    torch.manual_seed(3)
    function = Contraction.random(rows=5, positions=3, features=6, strength=0.8)
    function.weight.requires_grad_()
    function.context.requires_grad_()
    found = equilibrium(function, torch.zeros_like(function.context), gradient=options, **solver_options)
    target = torch.linspace(-1, 1, found.value.numel(), dtype=torch.float64).view_as(found.value)
    loss = (found.value - target).pow(2).sum()
    return list(torch.autograd.grad(loss, [function.weight, function.context]))


def distance(actual: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(actual, exact, strict=True))


EXACT = GradientOptions("unrolled", steps=200)
TIGHT = {"tol": 1e-12, "max_nfe": 100}


@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_ift_is_the_gradient_of_an_iteration_unrolled_to_convergence(solver):
    ift = GradientOptions("ift", solver=solver, max_nfe=200, tol=1e-12)
    assert distance(parameter_gradients(ift, **TIGHT), parameter_gradients(EXACT)) < 1e-9


def test_phantom_converges_to_ift_with_more_steps():
    exact = parameter_gradients(EXACT)
    errors = [
        distance(parameter_gradients(GradientOptions("phantom", steps=k), **TIGHT), exact) for k in (1, 4, 16, 80)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6


def test_one_step_replaces_the_inverse_by_the_identity():
    one_step = parameter_gradients(GradientOptions("one_step"), **TIGHT)
    phantom = parameter_gradients(GradientOptions("phantom", steps=1, damping=1.0), **TIGHT)
    assert distance(one_step, phantom) < 1e-12
    truncated = parameter_gradients(GradientOptions("ift", solver="picard", max_nfe=1), **TIGHT)
    assert distance(one_step, truncated) > 1e-3  # one product with the Jacobian gives another gradient


def test_one_step_with_max_nfe_1_evaluates_once():
    """With max_nfe=1 nothing is computed twice, and the result is that of a solve and a step."""
    torch.manual_seed(5)
    function = Contraction.random(rows=3, positions=4, features=6, strength=0.8)
    function.weight.requires_grad_()
    initial = torch.randn(3, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[True] * 4, [True] * 3 + [False], [True] * 2 + [False] * 2])
    counting = Counting(function, rows=3)
    one_step, phantom = GradientOptions("one_step"), GradientOptions("phantom", steps=1, damping=1.0)
    found, expected = (
        equilibrium(one, initial, gradient=gradient, mask=mask, max_nfe=1, keep_trajectory=True)
        for one, gradient in ((counting, one_step), (function, phantom))
    )
    assert counting.counts.tolist() == [1, 1, 1]
    for name in ("value", "state", "residual", "nfe", "converged"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.trajectory[0].value, expected.trajectory[0].value, rtol=1e-12, atol=1e-12)
    actual, other = (torch.autograd.grad(one.value.pow(2).sum(), function.weight) for one in (found, expected))
    assert distance(actual, other) < 1e-12


def test_checkpointed_iteration_has_the_same_gradient():
    stored = parameter_gradients(GradientOptions("unrolled", steps=12))
    recomputed = parameter_gradients(GradientOptions("unrolled", steps=12, checkpoint=True))
    assert distance(recomputed, stored) == 0


def saved_bytes(kind: str, budget: int, **fields) -> int:
    """Bytes that autograd stores for the backward pass of one training step."""
    model = small_model(gradient=kind, max_nfe=budget, gradient_steps=budget if kind == "unrolled" else 3, tol=1e-30)
    model.train()
    if fields.get("checkpoint"):
        model.gradient_checkpointing_enable()
    tokens = padded(random_sentences(4))
    storages = {}

    def keep(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=tokens, labels=tokens.masked_fill(tokens == 1, -100))
    assert int(out.nfe.max()) == budget
    return sum(storages.values())


@pytest.mark.parametrize("kind", ["one_step", "phantom", "ift"])
def test_memory_does_not_grow_with_evaluations(kind):
    assert saved_bytes(kind, budget=40) == saved_bytes(kind, budget=5)


def test_memory_of_an_unrolled_iteration_grows_unless_it_is_checkpointed():
    growth = saved_bytes("unrolled", budget=40) - saved_bytes("unrolled", budget=5)
    checkpointed = saved_bytes("unrolled", budget=40, checkpoint=True) - saved_bytes("unrolled", 5, checkpoint=True)
    assert growth > 0
    assert checkpointed < growth / 5


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_model_gradient_with_ift_is_exact(refinement):
    """The complete model in training mode with dropout: ift equals back-propagation through 80 evaluations.

    With plain iteration, because `mixed` is discontinuous and another trajectory may have another equilibrium.
    """

    def gradients(**fields) -> dict[str, torch.Tensor]:
        model = small_model(refinement=refinement, tol=1e-12, max_nfe=80, solver="picard", **fields).train()
        if refinement == "mixed":  # a random fusion cycles between tokens; a small one converges
            model.model.transition.fusion[2].weight.data *= 0.1
        tokens = padded(random_sentences(3))
        torch.manual_seed(1)
        out = model(input_ids=tokens, labels=tokens.masked_fill(tokens == 1, -100))
        assert out.converged.all()
        out.loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    exact = gradients(gradient="unrolled", gradient_steps=80)
    actual = gradients(gradient="ift", gradient_max_nfe=80, gradient_tol=1e-12)
    for name, gradient in exact.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=1e-9, msg=name)


def test_gradients_flow_in_evaluation_mode():
    model = small_model()
    assert not model.training
    tokens = padded(random_sentences(3))
    model(input_ids=tokens, labels=tokens.masked_fill(tokens == 1, -100)).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert not model(input_ids=tokens).logits.requires_grad


@pytest.mark.parametrize("kind", ["phantom", "ift", "unrolled"])
def test_masked_positions_have_no_gradient(kind):
    """An f that mixes positions: with a mask it must be the f of the shorter sentence."""
    torch.manual_seed(0)
    mixing = 0.3 * torch.randn(4, 4, dtype=torch.float64)
    weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    context = torch.randn(1, 4, 2, dtype=torch.float64)

    def gradient(positions: int, mask: torch.Tensor | None) -> float:
        def function(state):
            return torch.tanh(weight * (mixing[:positions, :positions] @ state) + context[:, :positions])

        options = GradientOptions(kind, steps=100, max_nfe=100, tol=1e-12)
        initial = torch.zeros(1, positions, 2, dtype=torch.float64)
        found = equilibrium(function, initial, gradient=options, mask=mask, tol=1e-12, max_nfe=100)
        return float(torch.autograd.grad(found.value[:, :3].pow(2).sum(), weight)[0])

    assert gradient(4, torch.tensor([[True, True, True, False]])) == pytest.approx(gradient(3, None), rel=1e-8)


def test_non_finite_gradient_passes_through_ift():
    weight = torch.tensor(0.5, requires_grad=True)
    found = equilibrium(lambda z: weight * z + 1, torch.zeros(1, 1), gradient=GradientOptions("ift"))
    (found.value.sum() * float("inf")).backward()
    assert not weight.grad.isfinite()

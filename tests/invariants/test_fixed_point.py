"""A converged row has a residual below tol when f is evaluated again; other rows are marked as unconverged."""

import pytest
import torch

from hf_deqnar import solve
from hf_deqnar.models.deqnar.fixed_point import measure_residual
from hf_deqnar.models.deqnar.solvers import SOLVERS

from ..conftest import padded, random_sentences, small_model
from .functions import Contraction


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strength", [0.3, 0.9, 1.2, 3.0])
@pytest.mark.parametrize("solver", SOLVERS)
def test_converged_rows_have_a_residual_below_the_tolerance(solver, strength, dtype):
    function = Contraction.random(rows=16, positions=2, features=8, strength=strength)
    function = Contraction(function.weight.to(dtype), function.context.to(dtype))
    tol = 1e-2 if dtype == torch.bfloat16 else 1e-5
    found = solve(function, function.zeros, solver=solver, tol=tol, max_nfe=12)
    by_hand = measure_residual(found.state, function(found.state))
    torch.testing.assert_close(found.residual, by_hand, rtol=1e-3, atol=1e-9)
    assert torch.equal(found.converged, by_hand < tol)
    assert torch.equal(found.value, function(found.state))
    assert (found.nfe[~found.converged] == 12).all()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("expanding", [lambda z: 3 * z + 1, lambda z: z * z + 1, lambda z: torch.exp(z) + 2])
def test_expanding_function_returns_a_finite_unconverged_result(solver, expanding):
    found = solve(expanding, torch.full((3, 4), 2.0), solver=solver, max_nfe=25, tol=1e-4)
    assert found.state.isfinite().all()
    assert found.value.isfinite().all()
    assert torch.equal(found.converged, measure_residual(found.state, expanding(found.state)) < 1e-4)


def test_acceleration_solves_an_expanding_linear_function():
    """Anderson and Broyden are quasi-Newton methods: z = 3z + 1 has its fixed point at −1/2, repelling or not."""
    for solver in ("anderson", "broyden"):
        found = solve(lambda z: 3 * z + 1, torch.full((2, 3), 2.0, dtype=torch.float64), solver=solver, tol=1e-6)
        assert found.converged.all()
        torch.testing.assert_close(found.value, torch.full_like(found.value, -0.5), atol=1e-4, rtol=0)


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_converged_state_is_a_fixed_point(refinement):
    model = small_model(refinement=refinement, max_nfe=30, tol=1e-5)
    tokens = padded(random_sentences(5))
    with torch.no_grad():
        source = model.prepare(tokens)
        canvas = model.lay_out(source, lengths=source.lengths)
        found = model.solve(source, canvas)
        by_hand = measure_residual(found.state, found.function(found.state), canvas.mask)
    torch.testing.assert_close(found.residual, by_hand, rtol=1e-3, atol=1e-9)
    assert torch.equal(found.converged, by_hand < 1e-5)

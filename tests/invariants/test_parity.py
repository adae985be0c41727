"""On random contractions the solvers find the fixed point of torchdeq in no more evaluations."""

import pytest
import torch

from hf_deqnar import solve

from .functions import Contraction

torchdeq_solver = pytest.importorskip("torchdeq.solver", reason="torchdeq is part of the test extra")

# The memory of torchdeq counts points, `memory` the steps between them. Its Broyden is unlimited by default.
COUNTERPARTS = {
    "picard": ("fixed_point_iter", {}, {}),
    "anderson": ("anderson", {"m": 6}, {"memory": 5}),
    "broyden": ("broyden", {}, {"memory": 100}),
}


@pytest.mark.parametrize("tol", [1e-3, 1e-6])
@pytest.mark.parametrize("strength", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("solver", COUNTERPARTS)
@pytest.mark.parametrize("seed", range(4))
def test_solvers_find_the_fixed_point_of_torchdeq_in_no_more_evaluations(solver, strength, tol, seed):
    torch.manual_seed(seed)
    function = Contraction.random(rows=8, positions=3, features=20, strength=strength)
    name, torchdeq_options, options = COUNTERPARTS[solver]
    calls = []
    expected, _, _ = torchdeq_solver.get_solver(name)(
        lambda z: calls.append(1) or function(z),
        function.zeros,
        max_iter=100,
        tol=tol,
        stop_mode="rel",
        **torchdeq_options,
    )
    actual = solve(function, function.zeros, solver=solver, max_nfe=100, tol=tol, **options)
    assert actual.converged.all()
    assert int(actual.nfe.max()) <= len(calls)
    # Both are within tol / (1 − strength) of the fixed point, in units of its size.
    allowed = 2 * tol / (1 - strength) * float(actual.value.flatten(1).norm(dim=1).max())
    assert (actual.value - expected).flatten(1).norm(dim=1).max() < allowed

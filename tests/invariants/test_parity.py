"""On random contractions our solvers reach the same point as torchdeq's in no more evaluations."""

import pytest
import torch

from hf_deqnar import solve

from .functions import Contraction

torchdeq_solver = pytest.importorskip("torchdeq.solver", reason="torchdeq is part of the test extra")

# Their memory counts points, ours the steps between them. Their Broyden keeps everything unless told otherwise.
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
    name, their_options, our_options = COUNTERPARTS[solver]
    calls = []
    theirs, _, _ = torchdeq_solver.get_solver(name)(
        lambda z: calls.append(1) or function(z),
        function.zeros,
        max_iter=100,
        tol=tol,
        stop_mode="rel",
        **their_options,
    )
    ours = solve(function, function.zeros, solver=solver, max_nfe=100, tol=tol, **our_options)
    assert ours.converged.all()
    assert int(ours.nfe.max()) <= len(calls)
    # Both stand within tol / (1 − strength) of the fixed point, in units of its size.
    allowed = 2 * tol / (1 - strength) * float(ours.value.flatten(1).norm(dim=1).max())
    assert (ours.value - theirs).flatten(1).norm(dim=1).max() < allowed

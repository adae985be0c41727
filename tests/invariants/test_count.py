"""Reported NFE equals the calls counted by a wrapper."""

import pytest
import torch

from hf_deqnar import solve
from hf_deqnar.models.deqnar.solvers import SOLVERS

from ..conftest import padded, random_sentences, small_model
from .functions import Contraction, Counting


@pytest.mark.parametrize("budget", [1, 2, 7, 40])
@pytest.mark.parametrize("solver", SOLVERS)
def test_evaluations_are_counted_row_by_row(solver, budget):
    function = Contraction.random(rows=9, positions=2, features=5, strength=0.95)
    counting = Counting(function, rows=9)
    found = solve(counting, function.zeros, solver=solver, max_nfe=budget, tol=1e-7)
    assert torch.equal(found.nfe, counting.counts)
    assert found.nfe.max() <= budget


@pytest.mark.parametrize("solver", SOLVERS)
def test_function_without_select_is_called_as_often_as_for_its_slowest_row(solver):
    function = Contraction.random(rows=9, positions=2, features=5, strength=0.95)
    calls = []
    found = solve(lambda z: calls.append(1) or function(z), function.zeros, solver=solver, max_nfe=60, tol=1e-7)
    narrowed = solve(function, function.zeros, solver=solver, max_nfe=60, tol=1e-7)
    assert found.nfe.max() == len(calls)
    assert torch.equal(found.nfe, narrowed.nfe)


@pytest.mark.parametrize("budget", [1, 2, 30])
@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_nfe_equals_the_number_of_decoder_evaluations(refinement, budget, monkeypatch):
    model = small_model(refinement=refinement, max_nfe=budget, tol=1e-5)
    transition = model.model.transition
    rows = []
    original = transition.layers[0].forward
    monkeypatch.setattr(
        transition.layers[0], "forward", lambda hidden, *rest: rows.append(len(hidden)) or original(hidden, *rest)
    )
    with torch.no_grad():
        out = model(input_ids=padded(random_sentences(6)))
    assert out.nfe.max() <= budget
    assert sum(rows) == int(out.nfe.sum())

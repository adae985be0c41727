from itertools import pairwise

import numpy
import pytest
import torch

from hf_deqnar import FixedPoint, solve
from hf_deqnar.models.deqnar.fixed_point import _Iterate, _length_groups, _propose, _split_rows, _step_size
from hf_deqnar.models.deqnar.solvers import FEW_ROWS, SOLVERS, History, _eliminate

from ...invariants.functions import Contraction


@pytest.mark.parametrize("solver", SOLVERS)
def test_plain_functions_on_any_shape_are_solved(solver):
    for shape in [(2, 1), (3, 4), (2, 3, 4), (2, 3, 4, 5)]:
        found = solve(torch.cos, torch.rand(shape), solver=solver, tol=1e-5, max_nfe=60)
        torch.testing.assert_close(found.value, torch.full(shape, 0.7390851), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tol": 0.0}, "tol must be above 0"),
        ({"tol": -1.0}, "tol must be above 0"),
        ({"tol": float("nan")}, "tol must be above 0"),
        ({"max_nfe": 0}, "max_nfe must be at least 1"),
        ({"solver": "newton"}, "Unknown solver 'newton'; choose one of picard, anderson, broyden"),
        ({"memory": 0}, "memory must be at least 1.*picard"),
        ({"damping": 0.0}, "damping"),
        ({"check_interval": 0}, "check_interval must be at least 1.*unset"),
        ({"mask": torch.ones(2, 5, dtype=torch.bool)}, r"mask is \(2, 5\).*\(2, 3\)"),
        ({"mask": torch.tensor([[True] * 3, [False] * 3])}, r"Row\(s\) \[1\] are completely masked"),
    ],
)
def test_invalid_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        solve(torch.cos, torch.zeros(2, 3), **options)


@pytest.mark.parametrize(
    "initial", [torch.zeros(0, 3), torch.zeros(2, 0), torch.zeros(3), torch.zeros(2, 3, dtype=torch.long)]
)
def test_empty_initial_state_is_refused(initial):
    with pytest.raises(ValueError, match="initial state"):
        solve(torch.cos, initial)


def test_non_finite_initial_value_is_reported_with_its_rows():
    context = torch.tensor([[0.0], [float("nan")], [1.0]])
    with pytest.raises(FloatingPointError, match=r"row\(s\) \[1\]"):
        solve(lambda z: z * 0.5 + context, torch.zeros(3, 1))


@pytest.mark.parametrize("solver", SOLVERS)
def test_nan_during_solve_returns_best_finite_iterate(solver):
    found = solve(lambda z: torch.where(z > 3, float("nan"), 2 * z + 1), torch.ones(2, 2), solver=solver, max_nfe=15)
    assert found.state.isfinite().all()
    assert found.value.isfinite().all()
    assert found.residual.isfinite().all()


def test_diverging_row_does_not_affect_others():
    slopes = torch.tensor([[0.5], [-40.0], [0.9]], dtype=torch.float64)
    found = solve(lambda z: torch.sin(slopes * z) + 1, torch.zeros(3, 1, dtype=torch.float64), max_nfe=40, tol=1e-8)
    single = solve(
        lambda z: torch.sin(slopes[2:] * z) + 1, torch.zeros(1, 1, dtype=torch.float64), max_nfe=40, tol=1e-8
    )
    assert found.converged[0]
    assert found.nfe[2] == single.nfe[0]
    assert torch.equal(found.value[2], single.value[0])


def test_the_best_iterate_is_returned_not_the_last():
    visited = []

    def wandering(z):
        visited.append(float((z.cos() * 5 - z).abs() / (z.cos() * 5).abs()))
        return z.cos() * 5

    found = solve(wandering, torch.ones(1, 1), solver="picard", max_nfe=15, tol=1e-9)
    assert not found.converged.any()
    assert float(found.residual) == pytest.approx(min(visited), rel=1e-4)


def test_damping_converges_where_plain_iteration_does_not():
    swinging = lambda z: -1.5 * z + 1  # noqa: E731
    assert not solve(swinging, torch.zeros(1, 1), solver="picard", max_nfe=50).converged.any()
    assert solve(swinging, torch.zeros(1, 1), solver="picard", damping=0.5, max_nfe=50).converged.all()


def test_trajectory_has_every_evaluation_of_every_row():
    function = Contraction.random(rows=5, positions=2, features=4, strength=0.9)
    found = solve(function, function.zeros, keep_trajectory=True, tol=1e-6, max_nfe=30)
    counts = torch.zeros(5, dtype=torch.long)
    for step in found.trajectory:
        counts[step.rows] += 1
    assert torch.equal(counts, found.nfe)
    assert torch.equal(found.trajectory[0].value, function(function.zeros))
    assert solve(function, function.zeros).trajectory is None


def test_an_observer_can_stop_rows():
    function = Contraction.random(rows=4, positions=2, features=4, strength=0.9)
    recorded = {row: 0 for row in range(4)}

    def stop_even_rows_after_three(rows, value, residual):
        for row in rows.tolist():
            recorded[row] += 1
        return torch.tensor([row % 2 == 0 and recorded[row] == 3 for row in rows.tolist()])

    found = solve(function, function.zeros, tol=1e-10, max_nfe=60, observe=stop_even_rows_after_three)
    assert found.nfe[[0, 2]].tolist() == [3, 3]
    assert not found.converged[[0, 2]].any()
    assert found.converged[[1, 3]].all()


def test_low_precision_is_solved_in_fp32():
    function = Contraction.random(rows=4, positions=2, features=16, strength=0.8, dtype=torch.float32)
    half = Contraction(function.weight.bfloat16(), function.context.bfloat16())
    found = solve(half, half.zeros, tol=2e-2)
    assert found.state.dtype == found.value.dtype == torch.bfloat16
    assert found.residual.dtype == torch.float32
    assert found.converged.all()
    exact = solve(function, function.zeros, tol=1e-6)
    assert (found.value.float() - exact.value).norm() / exact.value.norm() < 0.05


def test_no_graph_is_built():
    weight = torch.tensor(0.5, requires_grad=True)
    assert not solve(lambda z: weight * z + 1, torch.zeros(1, 1)).value.requires_grad


def test_rows_of_similar_length_are_solved_together():
    class Trimmable:
        trim = None

    lengths = torch.tensor([60, 5, 6, 58, 5, 30, 31, 59] * 8)
    mask = torch.arange(60) < lengths[:, None]
    groups = _length_groups(Trimmable(), torch.arange(64), torch.zeros(64, 60, 2), mask)
    assert sorted(torch.cat([rows for rows, _ in groups]).tolist()) == list(range(64))
    assert len(groups) == 3
    for rows, positions in groups:
        assert positions == int(lengths[rows].max())
        assert int(lengths[rows].min()) > positions - 6
    assert len(_length_groups(torch.cos, torch.arange(64), torch.zeros(64, 60, 2), mask)) == 1


def test_initial_values_at_masked_positions_have_no_effect():
    mask = torch.tensor([[True, True, False]])
    function = lambda z: torch.where(mask[:, :, None], 0.5 * z + 1, float("nan"))  # noqa: E731
    initial = torch.tensor([[[0.0], [0.0], [float("nan")]]])
    for solver in SOLVERS:
        found = solve(function, initial, solver=solver, mask=mask, tol=1e-6, max_nfe=40)
        assert found.converged.all()
        torch.testing.assert_close(found.value[0, :, 0], torch.tensor([2.0, 2.0, 0.0]), rtol=1e-4, atol=0)


def test_a_fixed_point_at_zero_is_found():
    assert solve(lambda z: 0 * z, torch.full((2, 2), 10.0)).converged.all()


def evaluations(function, initial, **options) -> tuple[list[torch.Tensor], FixedPoint]:
    visited = []
    found = solve(lambda z: visited.append(z.clone()) or function(z), initial, **options)
    return visited, found


@pytest.mark.parametrize("beyond", [float("nan"), -1.0])
def test_failed_step_is_undone_and_the_next_one_is_shorter(beyond):
    """Plain iteration goes from 1 to 1.5, where f is NaN or the residual far larger; then half a step is taken."""
    function = lambda z: torch.where(z > 1.4, beyond * z, 1.5 * z if z < 1.1 else z + 0.1)  # noqa: E731
    visited, found = evaluations(function, torch.ones(1, 1), solver="picard", max_nfe=4, tol=1e-9)
    assert [round(float(state), 6) for state in visited] == [1.0, 1.5, 1.25, 1.3]
    assert float(found.state) == pytest.approx(1.3)


@pytest.mark.parametrize("solver", ["anderson", "broyden"])
def test_failed_step_resets_history_of_its_row_only(solver):
    history = History.empty(torch.zeros(2, 1, 3), memory=2)
    first = _Iterate(torch.zeros(2, 1, 3), torch.ones(2, 1, 3), torch.ones(2, 1, 3), [1.0, 1.0])
    second = _Iterate(torch.ones(2, 1, 3), torch.full((2, 1, 3), 1.5), torch.full((2, 1, 3), 0.5), [1.0, 1.0])
    history.record(second, first, evaluation=2, step=1.0)
    history.reset([0])
    weights = SOLVERS[solver](history, 1.0, [1e-6, 1e-6])
    assert weights[0].tolist() == [[0.0, 0.0]]
    assert weights[1].abs().sum() > 0.1


def test_failures_increase_the_ridge_and_shorten_the_step():
    state = torch.zeros(4, 1, 2)
    history = History.empty(state, memory=1)
    before = _Iterate(state, state + 1, torch.ones(4, 1, 2), [1.0] * 4)
    now = _Iterate(state + 1, state + 1.5, torch.full((4, 1, 2), 0.5), [1.0] * 4)
    failures = [0, 1, 2, 3]
    step = _step_size(1.0, failures, state)
    history.record(now, before, evaluation=2, step=step)
    proposal = _propose(SOLVERS["anderson"], history, now, failures, step)[:, 0, 0]
    # y = −1/2, s = 1: γ = −1 without a ridge, so z ← 1 + 1/2 + (1 − 1/2) = 2
    assert proposal[0] == pytest.approx(2.0, abs=1e-4)
    assert proposal[1] == pytest.approx(1 + 0.25 + (1 - 0.25) * 1 / (1 + 1.2e-3), abs=1e-3)
    assert proposal[2] == pytest.approx(1 + 0.125 + (1 - 0.125) * 1 / (1 + 1.2), abs=0.05)
    assert proposal[3] == pytest.approx(1 + 0.0625)  # damped Picard


def test_the_oldest_step_is_overwritten_first():
    history = History.empty(torch.zeros(1, 1, 1), memory=2)
    for evaluation in range(2, 6):
        before = _Iterate(*[torch.zeros(1, 1, 1)] * 3, [1.0])
        now = _Iterate(*[torch.full((1, 1, 1), float(evaluation))] * 3, [1.0])
        history.record(now, before, evaluation, step=1.0)
    assert sorted(history.moves.flatten().tolist()) == [4.0, 5.0]
    assert sorted(history.created_at) == [4, 5]


def random_history(rows: int, steps: int, step: torch.Tensor | float) -> tuple[History, list[_Iterate]]:
    """A history of four slots and the iterates it was recorded from, in fp64."""
    path = []
    for _ in range(steps + 1):
        state, value = torch.randn(2, rows, 1, 7, dtype=torch.float64)
        path.append(_Iterate(state, value, value - state, [1.0] * rows))
    history = History.empty(path[0].state, memory=4)
    for number in range(1, len(path)):
        history.record(path[number], path[number - 1], number + 1, step)
    return history, path


def least_squares(path: list[_Iterate], row: int) -> torch.Tensor:
    """argmin ‖g − Σ_i γ_i·y_i‖ over the last four steps, oldest first, by torch.linalg."""
    errors = [iterate.error[row, 0] for iterate in path[-5:]]
    changes = torch.stack([after - before for before, after in pairwise(errors)], dim=1)
    return torch.linalg.lstsq(changes, errors[-1]).solution


def by_age(history: History, weights: torch.Tensor) -> torch.Tensor:
    return weights[:, 0, sorted(range(len(history.created_at)), key=history.created_at.__getitem__)]


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize("steps", [1, 3, 4, 6])
def test_anderson_solves_its_least_squares_problem(rows, steps):
    history, path = random_history(rows, steps, step=1.0)
    weights = by_age(history, SOLVERS["anderson"](history, 1.0, [1e-15] * rows))
    for row in range(rows):
        torch.testing.assert_close(weights[row], least_squares(path, row), rtol=1e-8, atol=1e-8)


def test_converged_or_failed_rows_do_not_change_the_weights_of_others():
    history, path = random_history(rows=5, steps=6, step=1.0)
    history.reset([3])
    kept = history.select(torch.tensor([0, 1, 4, 3]))  # row 2 has converged and row 4 takes its index
    weights = by_age(kept, SOLVERS["anderson"](kept, 1.0, [1e-15] * 4))
    for place, row in enumerate([0, 1, 4]):
        torch.testing.assert_close(weights[place], least_squares(path, row), rtol=1e-8, atol=1e-8)
    assert weights[3].tolist() == [0.0] * 4


def test_elimination_is_bitwise_independent_of_batch():
    vectors = torch.randn(6, 5, 7)
    vectors[2, 3] = 0  # a reset slot
    products = (vectors @ vectors.mT).double()
    ridge = torch.tensor([1e-6, 1e-6, 1e-3, 1e-6, 1.0, 1e-6], dtype=torch.float64)
    batched = _eliminate(products.permute(1, 2, 0).numpy(), 4, ridge.numpy(), numpy.maximum)
    single = [_eliminate(products[row].tolist(), 4, float(ridge[row]), max) for row in range(6)]
    assert numpy.stack(batched, axis=1).tolist() == single
    assert single[2][2] == 0


@pytest.mark.parametrize("step", [1.0, 0.7, torch.tensor([[[0.7]], [[0.35]]], dtype=torch.float64)])
def test_a_move_is_the_step_and_the_damped_change(step):
    history, path = random_history(rows=2, steps=2, step=step)
    for slot, (before, after) in enumerate(pairwise(path)):
        expected = after.state - before.state + step * (after.error - before.error)
        torch.testing.assert_close(history.move_slots[slot], expected)


def test_parallel_steps_leave_the_weights_finite():
    """One dimension and four slots: the products have rank one."""
    history = History.empty(torch.zeros(1, 1, 1), memory=4)
    for evaluation in range(2, 6):
        before, now = (
            _Iterate(*[torch.full((1, 1, 1), 0.5**exponent)] * 3, [1.0]) for exponent in (evaluation - 1, evaluation)
        )
        history.record(now, before, evaluation, step=1.0)
    weights = SOLVERS["anderson"](history, 1.0, [1e-6])
    assert weights.isfinite().all()
    assert float(weights @ history.errors[:, 1:]) == pytest.approx(0.5**5, rel=1e-4)


@pytest.mark.parametrize("halted", ["1000", "0001", "0110", "1011", "10110100"])
def test_rows_from_the_end_fill_the_gaps(halted):
    gone = [place == "1" for place in halted]
    leaving, order = _split_rows(gone)
    assert leaving == [row for row, done in enumerate(gone) if done]
    assert sorted(order) == [row for row, done in enumerate(gone) if not done]
    assert all(row == place for place, row in enumerate(order) if not gone[place])


def test_values_at_masked_positions_have_no_effect():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    function = lambda z: torch.where(mask[:, :, None], 0.5 * z + 1, float("nan"))  # noqa: E731
    recorded = []
    found = solve(function, torch.zeros(2, 3, 1), mask=mask, observe=lambda *step: recorded.append(step[1]))
    assert all(value.isfinite().all() for value in [*recorded, found.state, found.value])


def figures_of(found: FixedPoint) -> dict[str, torch.Tensor]:
    return {name: getattr(found, name) for name in ("state", "value", "residual", "nfe", "converged")}


@pytest.mark.parametrize("interval", [1, 3, 50])
@pytest.mark.parametrize("rows", [2, 9])
@pytest.mark.parametrize("solver", SOLVERS)
def test_results_do_not_depend_on_how_often_the_host_checks(solver, rows, interval):
    function = Contraction.random(rows, 6, 5, strength=0.8)
    mask = torch.arange(6) < torch.randint(1, 7, (rows, 1), generator=torch.Generator().manual_seed(1))
    for options in ({}, {"max_nfe": 2}, {"damping": 0.7}, {"memory": 2, "tol": 1e-8}):
        expected = solve(function, function.zeros, solver=solver, mask=mask, **options)
        found = solve(function, function.zeros, solver=solver, mask=mask, check_interval=interval, **options)
        torch.testing.assert_close(figures_of(found), figures_of(expected), rtol=1e-7, atol=1e-9)
    assert expected.nfe.max() > 1


@pytest.mark.parametrize("solver", SOLVERS)
def test_rows_with_failed_steps_do_not_depend_on_how_often_the_host_checks(solver):
    """Some rows expand: their steps fail, so that they return to their best iterate with a smaller step."""
    slopes = torch.tensor([[-0.9], [-3.0], [0.5], [-40.0], [1.7]], dtype=torch.float64)

    def function(state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(slopes * state).exp() + 0.3 * torch.sin(5 * state)

    initial = torch.full((5, 4), 0.4, dtype=torch.float64)
    expected = solve(function, initial, solver=solver, max_nfe=12)
    found = solve(function, initial, solver=solver, max_nfe=12, check_interval=4)
    torch.testing.assert_close(figures_of(found), figures_of(expected), rtol=1e-6, atol=1e-9)
    assert not expected.converged.all()


def test_non_finite_initial_value_is_reported_with_its_rows_at_the_first_check():
    context = torch.tensor([[0.0], [float("nan")], [1.0]])
    with pytest.raises(FloatingPointError, match=r"row\(s\) \[1\]"):
        solve(lambda z: z * 0.5 + context, torch.zeros(3, 1), check_interval=4)


def test_an_observer_is_called_after_every_evaluation_whatever_the_interval():
    seen = []
    found = solve(
        torch.cos, torch.ones(1, 1), check_interval=4, observe=lambda rows, value, residual: seen.append(rows)
    )
    assert len(seen) == found.nfe.item()

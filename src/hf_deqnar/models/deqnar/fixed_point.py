"""Fixed-point solvers: z = f(z) for every row of a batch.

`solve` implements what all solvers share: counting evaluations, masking, residuals, removing converged rows, the best
iterate, and the guards against divergence. The solvers are in `solvers.py`. Both modules are independent of text: f may
be any function on tensors whose first dimension is rows.

For one sentence on a CPU an evaluation of f takes half a millisecond and evicts the CPU caches, so that the smallest
operation on a tensor takes ten microseconds. Scalars per row, and linear systems of a few unknowns, are therefore
Python floats, read once per evaluation. An accelerator would have to wait for the host there; with `check_interval`
they stay on the device.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .solvers import SOLVERS, History, Solver, picard

# A residual this many times above the best one marks a step as failed.
GROWTH_LIMIT = 4.0
# Each failed step of a row multiplies its ridge by this factor; after RIDGE_RAISES of them it falls back to Picard.
RIDGE_FACTOR = 1e3
RIDGE_RAISES = 2


@dataclass
class Step:
    """One evaluation of a trajectory: the evaluated rows, f(z) and their residuals.

    For a row whose step failed, this is the best iterate, to which it returns.
    """

    rows: Tensor
    value: Tensor
    residual: Tensor


@dataclass
class FixedPoint:
    """Result of `solve` for every row.

    Attributes:
        state: the iterate z with the smallest residual.
        value: f(state), computed by the solve. Models predict tokens from it: after one evaluation it is f(initial),
            and at the equilibrium it equals `state`.
        residual: ‖f(z) − z‖ / ‖f(z)‖ at `state`, over unmasked positions.
        nfe: number of evaluations of f for the row.
        converged: whether `residual` is below the tolerance.
        trajectory: every evaluation in order, if requested.
        function: f, if the fixed point is that of a model.
    """

    state: Tensor
    value: Tensor
    residual: Tensor
    nfe: Tensor
    converged: Tensor
    trajectory: list[Step] | None = None
    function: Any = None


class _FullBatch:
    """Adds `select` to a plain function, which may depend on the row: it is always called with the full batch.

    Converged rows stay in the batch with an earlier state; their outputs are ignored and not counted.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], state: Tensor, rows: Tensor) -> None:
        self.function, self.state, self.rows = function, state, rows

    def __call__(self, state: Tensor) -> Tensor:
        if len(self.rows) == len(self.state):
            return self.function(state)
        self.state = self.state.index_copy(0, self.rows, state)
        return self.function(self.state)[self.rows]

    def select(self, rows: Tensor) -> "_FullBatch":
        return _FullBatch(self.function, self.state, self.rows[rows])


@dataclass
class _Iterate:
    """z, f(z), f(z) − z: rows × 1 × size, all zero at masked positions; and the relative residual of every row."""

    state: Tensor
    value: Tensor
    error: Tensor
    residual: list[float]

    @classmethod
    def measure(cls, state: Tensor, value: Tensor) -> "_Iterate":
        error = value - state
        sizes = (torch.linalg.vector_norm(tensor, dim=(1, 2)).tolist() for tensor in (error, value))
        # 0 = f(0) has residual 0; NaN is propagated.
        return cls(state, value, error, [size / max(total, 1e-12) for size, total in zip(*sizes, strict=True)])

    def select(self, rows: Tensor) -> "_Iterate":
        residual = [self.residual[row] for row in rows.tolist()]
        return _Iterate(self.state[rows], self.value[rows], self.error[rows], residual)

    def where(self, condition: list[bool], other: "_Iterate") -> "_Iterate":
        """This iterate in the rows where the condition holds, the other one elsewhere."""
        if all(condition):
            return self
        if not any(condition):
            return other
        chosen = torch.tensor(condition, device=self.state.device)[:, None, None]
        return _Iterate(
            torch.where(chosen, self.state, other.state),
            torch.where(chosen, self.value, other.value),
            torch.where(chosen, self.error, other.error),
            [(self if own else other).residual[row] for row, own in enumerate(condition)],
        )


@torch.no_grad()
def solve(
    function: Callable[[Tensor], Tensor],
    initial: Tensor,
    *,
    solver: str = "anderson",
    mask: Tensor | None = None,
    max_nfe: int = 20,
    tol: float = 1e-3,
    memory: int = 5,
    damping: float = 1.0,
    check_interval: int | None = None,
    keep_trajectory: bool = False,
    observe: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None,
) -> FixedPoint:
    """Find z = f(z) for every row, starting from `initial`.

    A row is removed from the batch as soon as ‖f(z) − z‖ / ‖f(z)‖ < tol, so that rows do not influence each other; if
    `function` has `select`, converged rows are not evaluated. The history and the linear systems are in fp32 (fp64 for
    fp64 input), independently of the dtype of `initial`.

    Args:
        function: f. If it has `select(rows)`, which returns f for those rows, only rows that have not converged are
            evaluated; otherwise it is always called on the full batch. If it also has `trim(positions)`, which returns
            f for the first positions, rows of similar length are solved together and little is computed for padding.
        initial: initial state; rows first, any further shape.
        solver: `picard`, `anderson` or `broyden`.
        mask: rows × positions, true at valid positions; masked positions are zero.
        max_nfe: maximum number of evaluations of f for any row.
        tol: relative residual below which a row has converged.
        memory: number of past steps of Anderson and Broyden.
        damping: τ above; 1 takes full steps.
        check_interval: for accelerators: evaluations until the host waits for the device, to see whether all rows have
            converged. Until then converged rows are evaluated with the others, but keep their results, which are the
            same as without this option. Unset, the host reads the residuals of every evaluation and converged rows are
            removed, which is faster on CPUs. A solve with `keep_trajectory` or `observe` does so in any case.
        keep_trajectory: return f(z) and the residual of every evaluation. Rows that are solved together share a step.
        observe: called after every evaluation with (row numbers, f(z), residuals); if it returns a boolean for each of
            these rows, the true ones stop, converged or not.

    >>> found = solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3))
    >>> found.value[0].round(decimals=3), found.converged
    (tensor([2., 2., 2.]), tensor([True, True]))
    """
    check_options(solver, max_nfe, tol, memory, damping, check_interval)
    mask = _check_state(initial, mask)
    settings = _Settings(SOLVERS[solver], max_nfe, tol, memory, float(damping), observe)
    if check_interval is not None and observe is None and not keep_trajectory:
        return _solve_on_device(function, initial, mask, settings, check_interval)
    rows = torch.arange(initial.shape[0], device=initial.device)
    trajectory: list[Step] | None = [] if keep_trajectory else None
    if not hasattr(function, "select"):
        function = _FullBatch(function, initial, rows)
    parts: list[_Result] = []
    for group, positions in _length_groups(function, rows, initial, mask):
        if len(group) == len(rows):
            _solve_group(function, initial, mask, group, settings, parts, trajectory)
        else:
            assert mask is not None  # groups are formed by its lengths
            narrowed, inside = function.select(group).trim(positions), mask[group, :positions]
            group_mask = None if inside.all() else inside
            _solve_group(narrowed, initial[group, :positions], group_mask, group, settings, parts, trajectory)
    return _merge_results(parts, initial, trajectory)


@dataclass
class _Settings:
    """Options of a solve; the same for all groups of rows."""

    choose_weights: Solver
    max_nfe: int
    tol: float
    memory: int
    damping: float
    observe: Callable | None


# Fixed cost of evaluating a separate group, in positions.
GROUP_COST = 64


def _length_groups(function: Callable, rows: Tensor, initial: Tensor, mask: Tensor | None) -> list[tuple[Tensor, int]]:
    """Rows of similar length and their number of positions, so that little is computed for padding.

    Rows do not influence each other, so they need not be solved together. Only on the CPU, where the time is
    proportional to the number of positions, and for functions with `trim`.
    """
    if mask is None or not hasattr(function, "trim") or initial.device.type != "cpu":
        return [(rows, initial.shape[1])]
    lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1)
    lengths, order = lengths.sort(stable=True)

    def split(first: int, last: int) -> list[tuple[int, int]]:
        """Split sorted rows where it saves the most padding, if that exceeds the cost of another group."""
        inside = lengths[first:last]
        saved = torch.arange(1, len(inside)) * (inside[-1] - inside[:-1])
        if len(saved) == 0 or int(saved.max()) <= GROUP_COST:
            return [(first, last)]
        cut = first + 1 + int(saved.argmax())
        return split(first, cut) + split(cut, last)

    runs = split(0, len(rows))
    if len(runs) == 1:
        return [(rows, initial.shape[1])]
    return [(order[first:last].sort().values, int(lengths[last - 1])) for first, last in runs]


@dataclass
class _Result:
    """Results of rows that stopped in the same evaluation."""

    rows: Tensor  # their indices in the full batch
    best: _Iterate
    shape: torch.Size  # of the states; the first dimension is not used
    nfe: int
    converged: list[bool]


def _solve_group(
    function: Any,  # with `select`
    initial: Tensor,
    mask: Tensor | None,
    rows: Tensor,
    settings: _Settings,
    parts: list[_Result],
    trajectory: list[Step] | None,
) -> None:
    """Solve some rows and append their results to `parts`; `rows` are their indices in the full batch."""
    shape, dtype, precision = initial.shape, initial.dtype, _precision(initial)
    memory = 0 if settings.choose_weights is picard else min(settings.memory, settings.max_nfe)
    exact = dtype == precision
    state = _zero_masked(initial.to(precision).flatten(1)[:, None], mask)
    failures = [0] * len(rows)
    step: Tensor | float = settings.damping
    history = History.empty(state, memory)
    best = previous = None

    for evaluation in range(1, settings.max_nfe + 1):
        value = function((state if exact else state.to(dtype)).view(-1, *shape[1:]))
        value = (value if value.dtype == precision else value.to(precision)).reshape(state.shape)
        current = _Iterate.measure(state, _zero_masked(value, mask))
        if best is None:
            _refuse_non_finite(current.residual, rows)
            best = current
        else:
            both = list(zip(current.residual, best.residual, strict=True))
            failed = [not now <= GROWTH_LIMIT * least for now, least in both]  # true for NaN as well
            best = current.where([now < least for now, least in both], best)
            if any(failed):
                current = best.where(failed, current)
                failures = [count + failure for count, failure in zip(failures, failed, strict=True)]
                step = _step_size(settings.damping, failures, state)
                history.reset([row for row, failure in enumerate(failed) if failure])

        converged = [residual < settings.tol for residual in best.residual]
        halted = converged
        if trajectory is not None or settings.observe is not None:
            residual = torch.tensor(current.residual, dtype=precision, device=state.device)
            observed = Step(rows, current.value.to(dtype).view(-1, *shape[1:]), residual)
            if trajectory is not None:
                trajectory.append(observed)
            stopped = (
                None if settings.observe is None else settings.observe(observed.rows, observed.value, observed.residual)
            )
            if stopped is not None:
                halted = [done or stop for done, stop in zip(converged, stopped.tolist(), strict=True)]
        if evaluation == settings.max_nfe or all(halted):
            parts.append(_Result(rows, best, shape, evaluation, converged))
            return
        if memory and previous is not None:
            history.record(current, previous, evaluation, step)
        if any(halted):
            leaving, staying = (torch.tensor(places, device=state.device) for places in _split_rows(halted))
            left = [done for done, out in zip(converged, halted, strict=True) if out]
            parts.append(_Result(rows[leaving], best.select(leaving), shape, evaluation, left))
            rows, history, mask = rows[staying], history.select(staying), None if mask is None else mask[staying]
            best, current, function = best.select(staying), current.select(staying), function.select(staying)
            failures = [failures[row] for row in staying.tolist()]
            step = _step_size(settings.damping, failures, state)

        with _without_autocast(state.device.type):
            proposal = _propose(settings.choose_weights, history, current, failures, step)
        state = proposal if exact else proposal.to(dtype).to(precision)  # exactly the input of f
        previous = current


def _without_autocast(device: str) -> AbstractContextManager:
    """f may run in bf16; the solver runs in full precision."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _split_rows(halted: list[bool]) -> tuple[list[int], list[int]]:
    """The stopped rows, and the new order of the others: rows from the end fill the gaps, the rest keep their index."""
    leaving = [row for row, done in enumerate(halted) if done]
    moving = [row for row, done in enumerate(halted) if not done]
    from_end = iter([row for row in moving if row >= len(moving)])
    return leaving, [next(from_end) if halted[place] else place for place in range(len(moving))]


def _step_size(damping: float, failures: list[int], state: Tensor) -> Tensor | float:
    """τ: the damping, halved by each failed step of a row; then rows × 1 × 1."""
    if not any(failures):
        return damping
    return state.new_tensor([damping * 0.5**count for count in failures])[:, None, None]


def _propose(
    choose_weights: Solver, history: History, current: _Iterate, failures: list[int], step: Tensor | float
) -> Tensor:
    """z + τ·g − Σ_i γ_i·(s_i + τ·y_i). Rows with failed steps get a larger ridge and a smaller τ, finally γ = 0."""
    if isinstance(step, float) and step == 1:
        proposal = current.value
    else:
        proposal = current.state + step * current.error
    if not history.created_at:
        return proposal
    base = 10 * torch.finfo(proposal.dtype).eps
    ridge = [base * RIDGE_FACTOR ** min(count, RIDGE_RAISES) for count in failures]
    weights = choose_weights(history, step, ridge)  # rows, 1, slots
    if weights is None:
        return proposal
    if any(count > RIDGE_RAISES for count in failures):
        weights[[row for row, count in enumerate(failures) if count > RIDGE_RAISES]] = 0
    return torch.baddbmm(proposal, weights, history.active()[2], alpha=-1)


class _DeviceIterate(_Iterate):
    """An iterate whose residuals are a tensor."""

    residual: Tensor  # type: ignore[assignment]

    @classmethod
    def measure(cls, state: Tensor, value: Tensor) -> "_DeviceIterate":
        error = value - state
        precision = torch.float32 if state.device.type == "mps" else torch.float64  # MPS has no float64
        size, total = (torch.linalg.vector_norm(tensor, dim=(1, 2)).to(precision) for tensor in (error, value))
        return cls(state, value, error, size / total.clamp(min=1e-12))

    def select_where(self, condition: Tensor, other: "_DeviceIterate") -> "_DeviceIterate":
        """This iterate in the rows where the condition holds, the other one elsewhere."""
        chosen = condition[:, None, None]
        return _DeviceIterate(
            torch.where(chosen, self.state, other.state),
            torch.where(chosen, self.value, other.value),
            torch.where(chosen, self.error, other.error),
            torch.where(condition, self.residual, other.residual),  # type: ignore[arg-type]
        )


def _solve_on_device(
    function: Callable[[Tensor], Tensor], initial: Tensor, mask: Tensor | None, settings: _Settings, check_interval: int
) -> FixedPoint:
    """Like `_solve_group` for all rows; numbers of rows are tensors, read once in `check_interval` evaluations."""
    shape, dtype, precision = initial.shape, initial.dtype, _precision(initial)
    memory = 0 if settings.choose_weights is picard else min(settings.memory, settings.max_nfe)
    state = _zero_masked(initial.to(precision).flatten(1)[:, None], mask)
    rows = torch.arange(shape[0], device=state.device)
    failures, nfe, active = torch.zeros_like(rows), torch.zeros_like(rows), torch.ones_like(rows, dtype=torch.bool)
    history = History.empty(state, memory)
    step: Tensor | float = settings.damping
    best = previous = None
    finite = torch.ones_like(active)  # of f at the initial state

    for evaluation in range(1, settings.max_nfe + 1):
        value = function(state.to(dtype).view(-1, *shape[1:])).to(precision).reshape(state.shape)
        current = _DeviceIterate.measure(state, _zero_masked(value, mask))
        nfe += active
        if best is None:
            best, finite = current, current.residual.isfinite()
        else:
            failed = ~(current.residual <= GROWTH_LIMIT * best.residual)  # true for NaN as well
            best = current.select_where(active & (current.residual < best.residual), best)
            current = best.select_where(failed, current)
            failures += failed
            history.reset(failed)
            step = (settings.damping * 0.5 ** failures.to(precision))[:, None, None]
        active = active & ~(best.residual < settings.tol)
        if evaluation == settings.max_nfe or evaluation % check_interval == 0:
            all_finite, unfinished = torch.stack([finite.all(), active.any()]).tolist()
            if not all_finite:
                _refuse_non_finite(torch.where(finite, 0.0, torch.nan).tolist(), rows)
            if evaluation == settings.max_nfe or not unfinished:
                break
        if memory and previous is not None:
            history.record(current, previous, evaluation, step)
        with _without_autocast(state.device.type):
            state = _propose_on_device(settings.choose_weights, history, current, failures, step)
        state = state.to(dtype).to(precision)  # exactly the input of f
        previous = current

    assert best is not None  # max_nfe is at least 1
    return FixedPoint(
        state=best.state.view(shape).to(dtype),
        value=best.value.view(shape).to(dtype),
        residual=best.residual.to(precision),
        nfe=nfe,
        converged=best.residual < settings.tol,
    )


def _propose_on_device(
    choose_weights: Solver, history: History, current: _Iterate, failures: Tensor, step: Tensor | float
) -> Tensor:
    """`_propose` with tensors of failures and steps."""
    proposal = torch.where(torch.as_tensor(step) == 1, current.value, current.state + step * current.error)
    if not history.created_at:
        return proposal
    base = 10 * torch.finfo(proposal.dtype).eps
    scalars = current.residual.dtype  # type: ignore[attr-defined]
    weights = choose_weights(history, step, base * RIDGE_FACTOR ** failures.clamp(max=RIDGE_RAISES).to(scalars))
    if weights is None:
        return proposal
    weights = weights.masked_fill((failures > RIDGE_RAISES)[:, None, None], 0)
    return torch.baddbmm(proposal, weights, history.active()[2], alpha=-1)


def _merge_results(parts: list[_Result], initial: Tensor, trajectory: list[Step] | None) -> FixedPoint:
    """Results of all rows in their original order."""
    order = None if len(parts) == 1 else torch.cat([part.rows for part in parts]).argsort()

    def states(name: str) -> Tensor:
        pieces = [getattr(part.best, name).view(-1, *part.shape[1:]) for part in parts]
        if order is None:
            return pieces[0].to(initial.dtype)
        merged = initial.new_zeros(initial.shape)
        for part, piece in zip(parts, pieces, strict=True):
            merged[part.rows, : part.shape[1]] = piece.to(initial.dtype)
        return merged

    def figures(values: list, dtype: torch.dtype) -> Tensor:
        together = torch.tensor(values, dtype=dtype, device=initial.device)
        return together if order is None else together[order]

    return FixedPoint(
        state=states("state"),
        value=states("value"),
        residual=figures([one for part in parts for one in part.best.residual], _precision(initial)),
        nfe=figures([part.nfe for part in parts for _ in part.converged], torch.long),
        converged=figures([one for part in parts for one in part.converged], torch.bool),
        trajectory=trajectory,
    )


def _precision(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for an fp64 state."""
    return torch.promote_types(tensor.dtype, torch.float32)


def measure_residual(state: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖f(z) − z‖ / ‖f(z)‖ of every row over its unmasked positions, given z and f(z)."""
    precision = _precision(state)
    state, value = (_zero_masked(tensor.to(precision).flatten(1)[:, None], mask) for tensor in (state, value))
    return torch.tensor(_Iterate.measure(state, value).residual, dtype=precision, device=state.device)


def _zero_masked(value: Tensor, mask: Tensor | None) -> Tensor:
    """Zero at masked positions; value is rows × 1 × (positions · features), mask rows × positions."""
    if mask is None:
        return value
    # masked_fill instead of a product, because f may be NaN at padding
    return value.reshape(*mask.shape, -1).masked_fill(~mask.bool()[:, :, None], 0).view(value.shape)


def _refuse_non_finite(residual: list[float], rows: Tensor) -> None:
    non_finite = [row for row, size in enumerate(residual) if not math.isfinite(size)]
    if non_finite:
        raise FloatingPointError(
            f"The function is not finite at the initial state of row(s) {rows[non_finite].tolist()}; "
            "check the weights and inputs for NaN."
        )


def check_options(
    solver: str,
    max_nfe: int,
    tol: float,
    memory: int = 1,
    damping: float = 1.0,
    check_interval: int | None = None,
) -> None:
    """Raise ValueError for invalid solver options."""
    if solver not in SOLVERS:
        raise ValueError(f"Unknown solver '{solver}'; choose one of {', '.join(SOLVERS)}.")
    if max_nfe < 1:
        raise ValueError(f"max_nfe must be at least 1, not {max_nfe}; one evaluation is one pass of the decoder.")
    if not tol > 0:
        raise ValueError(f"tol must be above 0, not {tol}; to use the full budget set a small one such as 1e-12.")
    if memory < 1:
        raise ValueError(f"memory must be at least 1, not {memory}; for iteration without history use solver='picard'.")
    if not 0 < damping <= 1:
        raise ValueError(f"damping must be in (0, 1], not {damping}.")
    if check_interval is not None and check_interval < 1:
        raise ValueError(
            f"check_interval must be at least 1, not {check_interval}; leave it unset to check every evaluation."
        )


def _check_state(initial: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask, None if nothing is masked, after checking that every row has a valid position."""
    if initial.dim() < 2 or initial.numel() == 0:
        raise ValueError(
            f"The initial state must have rows with at least one element, but its shape is {tuple(initial.shape)}."
        )
    if not initial.is_floating_point():
        raise ValueError(f"The initial state must be floating point, not {initial.dtype}.")
    if mask is None:
        return None
    if mask.shape != initial.shape[:2]:
        raise ValueError(
            f"The mask is {tuple(mask.shape)} but the state has rows × positions = {tuple(initial.shape[:2])}."
        )
    if mask.all():
        return None
    mask = mask.bool()
    if not mask.any(dim=1).all():
        empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
        raise ValueError(f"Row(s) {empty} are completely masked; remove them.")
    return mask

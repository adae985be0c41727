"""Finding z = f(z) for every row of a batch.

`solve` owns what all solvers share: counting evaluations, masking, residuals, letting converged rows leave, the best
iterate, and the guards against divergence. A solver is one function that looks at the recent steps

    s_i = z_{i+1} − z_i,   y_i = g_{i+1} − g_i,   g(z) = f(z) − z

and returns the weights γ of the next proposal

    z ← z + τ·g(z) − Σ_i γ_i·(s_i + τ·y_i).

Picard has γ = 0; Anderson and Broyden are two ways to choose γ so that the next residual is small. Nothing here knows
about text: any function on tensors whose first dimension is rows will do.

For one sentence on a CPU an evaluation of f takes half a millisecond and leaves nothing of ours in the caches, so that
the smallest operation on a tensor takes ten microseconds. What is one number per row, and the systems of a few
unknowns, are therefore Python's numbers, read once per evaluation.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

# A residual this many times above the best one seen means that the step was bad, not merely unlucky.
GROWTH_LIMIT = 4.0
# Each bad step of a row multiplies its ridge by this much; after RIDGE_RAISES of them the row falls back to Picard.
RIDGE_FACTOR = 1e3
RIDGE_RAISES = 2
# More than no pivot, less than any square of a step.
TINY = 1e-300
NUMPY_TYPES = {torch.float32: numpy.float32, torch.float64: numpy.float64}
# Up to here it is quicker to go through the systems of all rows one by one than to go through them together.
FEW_ROWS = 4


@dataclass
class Step:
    """One evaluation of a trajectory: which rows took part, f(z) there, and their residuals.

    For a row whose step was bad and is taken back, this is the iterate it goes back to.
    """

    rows: Tensor
    value: Tensor
    residual: Tensor


@dataclass
class FixedPoint:
    """What `solve` found, row by row.

    Attributes:
        state: the iterate z with the smallest residual.
        value: f(state), known from the solve at no further cost. This is what a model reads its answer from: after one
            evaluation it is f(initial), and in the equilibrium it equals `state`.
        residual: ‖f(z) − z‖ / ‖f(z)‖ at `state`, over unmasked positions.
        nfe: how many evaluations of f the row took part in.
        converged: whether `residual` is below the tolerance.
        trajectory: every evaluation in order, if it was asked for.
        function: f, where a model solved for the fixed point.
    """

    state: Tensor
    value: Tensor
    residual: Tensor
    nfe: Tensor
    converged: Tensor
    trajectory: list[Step] | None = None
    function: Any = None


@dataclass
class History:
    """The last `memory` steps of every row. Slots of a row that made a bad step hold zeros."""

    errors: Tensor  # rows, 1 + memory, size: the current g, then the changes y_i
    moves: Tensor  # rows, memory, size: s_i + τ·y_i
    born: list[int]  # for every slot in use, the evaluation it was written in; they fill from the front
    whole: bool  # slots not in use hold zeros and may be looked at

    def __post_init__(self) -> None:
        self.columns = self.errors.mT
        self.error_slots, self.move_slots = self.errors.split(1, dim=1), self.moves.split(1, dim=1)

    @classmethod
    def empty(cls, state: Tensor, memory: int) -> "History":
        """For a few rows zeros cost less than to cut off, in every evaluation, what is not in use."""
        rows, _, size = state.shape
        whole = rows <= FEW_ROWS
        new = state.new_zeros if whole else state.new_empty
        return cls(new((rows, 1 + memory, size)), new((rows, memory, size)), [], whole)

    def seen(self) -> tuple[Tensor, Tensor, Tensor]:
        """Errors, errors transposed, and moves, as far as they may be looked at."""
        used = len(self.born)
        if self.whole or used == len(self.move_slots):
            return self.errors, self.columns, self.moves
        return self.errors[:, : 1 + used], self.columns[:, :, : 1 + used], self.moves[:, :used]

    def record(self, current: "_Iterate", previous: "_Iterate", evaluation: int, step: Tensor | float) -> None:
        slot = (evaluation - 2) % len(self.move_slots)  # the first step is known after the second evaluation
        self.born[slot : slot + 1] = [evaluation]
        self.error_slots[0].copy_(current.error)
        change, move = self.error_slots[1 + slot], self.move_slots[slot]
        torch.sub(current.error, previous.error, out=change)
        if isinstance(step, float) and step == 1:  # z + g(z) is f(z)
            torch.sub(current.value, previous.value, out=move)
        else:
            torch.sub(current.state, previous.state, out=move).add_(step * change)

    def keep(self, order: Tensor) -> "History":
        """Row i of the result is row order[i]. In place: only rows that change their place are copied."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        if len(moved):
            self.errors[moved] = self.errors[order[moved]]
            self.moves[moved] = self.moves[order[moved]]
        return History(self.errors[: len(order)], self.moves[: len(order)], self.born, self.whole)

    def forget(self, rows: list[int]) -> None:
        self.errors[rows] = 0
        self.moves[rows] = 0


def picard(history: History, step: Tensor | float, ridge: Sequence[float]) -> None:
    """z ← z + τ·(f(z) − z), plain or damped iteration: γ = 0.

    Converges when f contracts.

    >>> solve(torch.cos, torch.ones(1, 1), solver="picard", max_nfe=50, tol=1e-5).value
    tensor([[0.7391]])
    """


def anderson(history: History, step: Tensor | float, ridge: Sequence[float]) -> Tensor:
    """γ = argmin ‖g − Σ_i γ_i·y_i‖² + ridge: (Y Yᵀ + ridge)·γ = Y·g.

    Anderson (1965), in the difference form; TorchDEQ equations 8 and 9.

    >>> solve(torch.cos, torch.ones(1, 1), solver="anderson", tol=1e-5).value
    tensor([[0.7391]])
    """
    errors, columns, moves = history.seen()
    products = torch.bmm(errors, columns)  # rows, 1 + slots, 1 + slots; g is the first
    used = len(history.born)
    weights: list | numpy.ndarray
    if len(products) <= FEW_ROWS:
        weights = [_eliminate(one, used, least, max) for one, least in zip(products.tolist(), ridge, strict=True)]
    else:
        numbers = products.double().cpu().permute(1, 2, 0).numpy()
        weights = numpy.stack(_eliminate(numbers, used, numpy.array(ridge), numpy.maximum), axis=1)
    padded = numpy.zeros((len(products), 1, moves.shape[1]), NUMPY_TYPES[products.dtype])
    padded[:, 0, :used] = weights
    return torch.from_numpy(padded) if products.is_cpu else torch.from_numpy(padded).to(products.device)


def broyden(history: History, step: Tensor | float, ridge: Sequence[float]) -> Tensor:
    """(S Yᵀ + L)·γ = S·g, where L is the part of S Sᵀ that pairs a step with older ones.

    The inverse Jacobian after `memory` rank-one updates of −I (TorchDEQ equations 10 to 12), written in closed form
    (Byrd, Nocedal and Schnabel 1994, theorem 6.1) so that it needs the same two buffers as Anderson.

    >>> solve(torch.cos, torch.ones(1, 1), solver="broyden", tol=1e-5).value
    tensor([[0.7391]])
    """
    errors, columns, moves = history.seen()
    changes = errors[:, 1:]
    steps = moves - step * changes
    born = torch.tensor(history.born + [0] * (steps.shape[1] - len(history.born)), device=steps.device)
    gram = steps @ steps.mT  # rows, slots, slots
    squares = gram.diagonal(dim1=1, dim2=2)
    system = steps @ changes.mT + gram * (born[:, None] > born[None, :])
    # The ridge is relative to each slot's own size. A slot that is unused or forgotten is a row and a column of zeros;
    # a one on its diagonal gives it γ = 0.
    shift = torch.where(squares == 0, 1, -steps.new_tensor(ridge)[:, None] * squares)
    system.diagonal(dim1=1, dim2=2).add_(shift)
    weights, _ = torch.linalg.solve_ex(system, (steps @ columns[:, :, :1])[:, :, 0])
    # A singular system says nothing. The weights come column by column; a batched product wants them row by row.
    return torch.where(weights.isfinite().all(dim=1, keepdim=True), weights, 0).contiguous()[:, None]


Solver = Callable[[History, Tensor | float, Sequence[float]], Tensor | None]

SOLVERS: dict[str, Solver] = {
    "picard": picard,
    "anderson": anderson,
    "broyden": broyden,
}


def _eliminate(products: Sequence | numpy.ndarray, used: int, ridge: float | numpy.ndarray, larger: Callable) -> list:
    """The γ of Anderson by Gaussian elimination, given the products of (g, y_1, y_2, …) with one another.

    Entries are numbers, or arrays with a number for every row; either way a row's γ is the same to the last bit.
    Relative to each slot's own size, one ridge fits steps of all sizes; it also is the least a pivot can be, were there
    no rounding. A forgotten slot is a line of zeros and gets γ = 0.
    """
    lines = [[*products[slot][1 : 1 + used], products[slot][0]] for slot in range(1, 1 + used)]
    least = [ridge * line[place] + TINY for place, line in enumerate(lines)]
    for place, line in enumerate(lines):
        line[place] = line[place] + least[place]
    triangle = []
    for lowest in least:
        (pivot, *first), *others = lines
        pivot = larger(pivot, lowest)
        triangle.append((pivot, first))
        lines = []
        for head, *line in others:
            factor = head / pivot
            lines.append([entry - factor * above for entry, above in zip(line, first, strict=True)])
    weights: list = []
    for pivot, (*line, value) in reversed(triangle):
        for entry, weight in zip(line, weights, strict=True):
            value = value - entry * weight
        weights.insert(0, value / pivot)
    return weights


class _WholeBatch:
    """A plain function has no `select`, and may close over one context per row: it always sees the whole batch.

    Rows that have left ride along at some earlier state; what comes out for them is dropped and not counted.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], whole: Tensor, rows: Tensor) -> None:
        self.function, self.whole, self.rows = function, whole, rows

    def __call__(self, state: Tensor) -> Tensor:
        if len(self.rows) == len(self.whole):
            return self.function(state)
        self.whole = self.whole.index_copy(0, self.rows, state)
        return self.function(self.whole)[self.rows]

    def select(self, rows: Tensor) -> "_WholeBatch":
        return _WholeBatch(self.function, self.whole, self.rows[rows])


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
        # A fixed point at zero is one, too; a size that is NaN stays it.
        return cls(state, value, error, [size / max(whole, 1e-12) for size, whole in zip(*sizes, strict=True)])

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
            [(self if mine else other).residual[row] for row, mine in enumerate(condition)],
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
    keep_trajectory: bool = False,
    observe: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None,
) -> FixedPoint:
    """Find z = f(z) for every row, starting from `initial`.

    A row leaves the batch as soon as ‖f(z) − z‖ / ‖f(z)‖ < tol, so that rows never influence each other; if
    `function` can be narrowed, a row that is done costs nothing more. The history and the small linear systems are kept
    in fp32 (fp64 for fp64 input), whatever the dtype of `initial`.

    Args:
        function: f. If it has `select(rows)`, this must return f narrowed to those rows, and then only rows that still
            move are evaluated; a function without it is always called on the whole batch. If it also has
            `trim(positions)`, f narrowed to the first positions, then rows of similar length are solved together and
            little is computed for padding.
        initial: where to start; rows first, any further shape.
        solver: `picard`, `anderson` or `broyden`.
        mask: rows × positions, true where a position counts; masked positions are held at zero.
        max_nfe: most evaluations of f for any row.
        tol: relative residual below which a row has converged.
        memory: how many past steps Anderson and Broyden look at.
        damping: τ above; 1 takes the whole step.
        keep_trajectory: keep f(z) and the residual of every evaluation. Rows that were solved together share a step.
        observe: called after every evaluation with (row numbers, f(z), residuals); if it returns a boolean for each of
            these rows, the true ones stop there, converged or not.

    >>> found = solve(lambda z: 0.5 * z + 1, torch.zeros(2, 3))
    >>> found.value[0].round(decimals=3), found.converged
    (tensor([2., 2., 2.]), tensor([True, True]))
    """
    check_options(solver, max_nfe, tol, memory, damping)
    mask = _check_state(initial, mask)
    rows = torch.arange(initial.shape[0], device=initial.device)
    settings = _Settings(SOLVERS[solver], max_nfe, tol, memory, float(damping), observe)
    trajectory: list[Step] | None = [] if keep_trajectory else None
    if not hasattr(function, "select"):
        function = _WholeBatch(function, initial, rows)
    parts: list[_Found] = []
    for group, positions in _length_groups(function, rows, initial, mask):
        if len(group) == len(rows):
            _solve_group(function, initial, mask, group, settings, parts, trajectory)
        else:
            assert mask is not None  # groups are made by the lengths in it
            narrowed, inside = function.select(group).trim(positions), mask[group, :positions]
            group_mask = None if inside.all() else inside
            _solve_group(narrowed, initial[group, :positions], group_mask, group, settings, parts, trajectory)
    return _put_together(parts, initial, trajectory)


@dataclass
class _Settings:
    """What a user chose; the same for all groups of rows."""

    choose_weights: Solver
    max_nfe: int
    tol: float
    memory: int
    damping: float
    observe: Callable | None


# An evaluation of a separate group costs about as much as this many positions, whatever is in it.
GROUP_COST = 64


def _length_groups(function: Callable, rows: Tensor, initial: Tensor, mask: Tensor | None) -> list[tuple[Tensor, int]]:
    """Rows of similar length and how many positions they need, so that little is computed for padding.

    Rows do not influence each other, so they need not be solved together. Only on the CPU, where work is paid for by
    the position, and for functions that can `trim` themselves to the first positions.
    """
    if mask is None or not hasattr(function, "trim") or initial.device.type != "cpu":
        return [(rows, initial.shape[1])]
    lengths = (mask * torch.arange(1, mask.shape[1] + 1)).amax(dim=1)
    lengths, order = lengths.sort(stable=True)

    def split(first: int, last: int) -> list[tuple[int, int]]:
        """Cut a run of sorted rows where most padding is saved, as long as it is worth a group of its own."""
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
class _Found:
    """What was found for rows that halted together."""

    rows: Tensor  # their numbers in the whole batch
    best: _Iterate
    shape: torch.Size  # of the states, but for their number
    nfe: int
    converged: list[bool]


def _solve_group(
    function: Any,  # with `select`
    initial: Tensor,
    mask: Tensor | None,
    rows: Tensor,
    settings: _Settings,
    parts: list[_Found],
    trajectory: list[Step] | None,
) -> None:
    """Solve some rows and add what was found to the parts; `rows` are their numbers in the whole batch."""
    shape, dtype, precision = initial.shape, initial.dtype, _precision(initial)
    memory = 0 if settings.choose_weights is picard else min(settings.memory, settings.max_nfe)
    exact = dtype == precision
    state = _hold_masked(initial.to(precision).flatten(1)[:, None], mask)
    failures = [0] * len(rows)
    step: Tensor | float = settings.damping
    history = History.empty(state, memory)
    # f may run in bf16, its solver does not.
    autocast = torch.is_autocast_enabled(state.device.type)
    full_precision = torch.autocast(state.device.type, enabled=False) if autocast else nullcontext()
    best = previous = None

    for evaluation in range(1, settings.max_nfe + 1):
        value = function((state if exact else state.to(dtype)).view(-1, *shape[1:]))
        value = (value if value.dtype == precision else value.to(precision)).reshape(state.shape)
        current = _Iterate.measure(state, _hold_masked(value, mask))
        if best is None:
            _refuse_non_finite(current.residual, rows)
            best = current
        else:
            both = list(zip(current.residual, best.residual, strict=True))
            bad = [not now <= GROWTH_LIMIT * least for now, least in both]  # true for NaN as well
            best = current.where([now < least for now, least in both], best)
            if any(bad):
                current = best.where(bad, current)
                failures = [count + failed for count, failed in zip(failures, bad, strict=True)]
                step = _shortened(settings.damping, failures, state)
                history.forget([row for row, failed in enumerate(bad) if failed])

        converged = [residual < settings.tol for residual in best.residual]
        halted = converged
        if trajectory is not None or settings.observe is not None:
            residual = torch.tensor(current.residual, dtype=precision, device=state.device)
            seen = Step(rows, current.value.to(dtype).view(-1, *shape[1:]), residual)
            if trajectory is not None:
                trajectory.append(seen)
            stopped = None if settings.observe is None else settings.observe(seen.rows, seen.value, seen.residual)
            if stopped is not None:
                halted = [done or stop for done, stop in zip(converged, stopped.tolist(), strict=True)]
        if evaluation == settings.max_nfe or all(halted):
            parts.append(_Found(rows, best, shape, evaluation, converged))
            return
        if memory and previous is not None:
            history.record(current, previous, evaluation, step)
        if any(halted):
            leaving, staying = (torch.tensor(places, device=state.device) for places in _part(halted))
            left = [done for done, out in zip(converged, halted, strict=True) if out]
            parts.append(_Found(rows[leaving], best.select(leaving), shape, evaluation, left))
            rows, history, mask = rows[staying], history.keep(staying), None if mask is None else mask[staying]
            best, current, function = best.select(staying), current.select(staying), function.select(staying)
            failures = [failures[row] for row in staying.tolist()]
            step = _shortened(settings.damping, failures, state)

        with full_precision:
            proposal = _propose(settings.choose_weights, history, current, failures, step)
        state = proposal if exact else proposal.to(dtype).to(precision)  # exactly what f will see
        previous = current


def _part(halted: list[bool]) -> tuple[list[int], list[int]]:
    """The rows that leave, and which row takes each place then: those from the end fill the gaps, the rest stay."""
    leaving = [row for row, done in enumerate(halted) if done]
    moving = [row for row, done in enumerate(halted) if not done]
    behind = iter([row for row in moving if row >= len(moving)])
    return leaving, [next(behind) if halted[place] else place for place in range(len(moving))]


def _shortened(damping: float, failures: list[int], state: Tensor) -> Tensor | float:
    """τ: the damping, halved in a row by each of its bad steps; then rows × 1 × 1."""
    if not any(failures):
        return damping
    return state.new_tensor([damping * 0.5**count for count in failures])[:, None, None]


def _propose(
    choose_weights: Solver, history: History, current: _Iterate, failures: list[int], step: Tensor | float
) -> Tensor:
    """z + τ·g − Σ_i γ_i·(s_i + τ·y_i). Rows with bad steps get a larger ridge and a smaller τ, in the end γ = 0."""
    if isinstance(step, float) and step == 1:
        proposal = current.value
    else:
        proposal = current.state + step * current.error
    if not history.born:
        return proposal
    base = 10 * torch.finfo(proposal.dtype).eps
    ridge = [base * RIDGE_FACTOR ** min(count, RIDGE_RAISES) for count in failures]
    weights = choose_weights(history, step, ridge)  # rows, 1, slots
    if weights is None:
        return proposal
    if any(count > RIDGE_RAISES for count in failures):
        weights[[row for row, count in enumerate(failures) if count > RIDGE_RAISES]] = 0
    return torch.baddbmm(proposal, weights, history.seen()[2], alpha=-1)


def _put_together(parts: list[_Found], initial: Tensor, trajectory: list[Step] | None) -> FixedPoint:
    """What was found for all rows, in the order they came in."""
    order = None if len(parts) == 1 else torch.cat([part.rows for part in parts]).argsort()

    def states(name: str) -> Tensor:
        pieces = [getattr(part.best, name).view(-1, *part.shape[1:]) for part in parts]
        if order is None:
            return pieces[0].to(initial.dtype)
        whole = initial.new_zeros(initial.shape)
        for part, piece in zip(parts, pieces, strict=True):
            whole[part.rows, : part.shape[1]] = piece.to(initial.dtype)
        return whole

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
    """fp32, or fp64 if that is what the state is in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def measure_residual(state: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖f(z) − z‖ / ‖f(z)‖ of every row over its unmasked positions, given z and f(z)."""
    precision = _precision(state)
    state, value = (_hold_masked(tensor.to(precision).flatten(1)[:, None], mask) for tensor in (state, value))
    return torch.tensor(_Iterate.measure(state, value).residual, dtype=precision, device=state.device)


def _hold_masked(value: Tensor, mask: Tensor | None) -> Tensor:
    """Zero at masked positions; value is rows × 1 × (positions · features), mask rows × positions."""
    if mask is None:
        return value
    # filled, not multiplied: what f says behind the end may even be NaN
    return value.reshape(*mask.shape, -1).masked_fill(~mask.bool()[:, :, None], 0).view(value.shape)


def _refuse_non_finite(residual: list[float], rows: Tensor) -> None:
    lost = [row for row, size in enumerate(residual) if not math.isfinite(size)]
    if lost:
        raise FloatingPointError(
            f"The function is not finite at the initial state of row(s) {rows[lost].tolist()}; "
            "check the weights and inputs for NaN."
        )


def check_options(solver: str, max_nfe: int, tol: float, memory: int = 1, damping: float = 1.0) -> None:
    """Refuse settings that no solve can use."""
    if solver not in SOLVERS:
        raise ValueError(f"Unknown solver '{solver}'; choose one of {', '.join(SOLVERS)}.")
    if max_nfe < 1:
        raise ValueError(f"max_nfe must be at least 1, not {max_nfe}; one evaluation is one pass of the decoder.")
    if not tol > 0:
        raise ValueError(f"tol must be above 0, not {tol}; to use the whole budget set a tiny one such as 1e-12.")
    if memory < 1:
        raise ValueError(f"memory must be at least 1, not {memory}; for iteration without memory use solver='picard'.")
    if not 0 < damping <= 1:
        raise ValueError(f"damping must be in (0, 1], not {damping}.")


def _check_state(initial: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask, None if nothing is masked, after making sure that there is something to solve in every row."""
    if initial.dim() < 2 or initial.numel() == 0:
        raise ValueError(
            f"The initial state must have rows and something in them, but its shape is {tuple(initial.shape)}."
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
        raise ValueError(f"Row(s) {empty} are masked everywhere; remove them, there is nothing to solve.")
    return mask

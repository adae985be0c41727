"""Finding z = f(z) for every row of a batch.

`solve` owns what all solvers share: counting evaluations, masking, residuals, letting converged rows leave, the best
iterate, and the guards against divergence. A solver is one function that looks at the recent steps

    s_i = z_{i+1} − z_i,   y_i = g_{i+1} − g_i,   g(z) = f(z) − z

and returns the weights γ of the next proposal

    z ← z + τ·g(z) − Σ_i γ_i·(s_i + τ·y_i).

Picard has γ = 0; Anderson and Broyden are two ways to choose γ so that the next residual is small. Nothing here knows
about text: any function on tensors whose first dimension is rows will do.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# A residual this many times above the best one seen means that the step was bad, not merely unlucky.
GROWTH_LIMIT = 4.0
# Each bad step of a row multiplies its ridge by this much; after RIDGE_RAISES of them the row falls back to Picard.
RIDGE_FACTOR = 1e3
RIDGE_RAISES = 2


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
    """

    state: Tensor
    value: Tensor
    residual: Tensor
    nfe: Tensor
    converged: Tensor
    trajectory: list[Step] | None = None


@dataclass
class History:
    """The last `memory` steps of every row. Slots of a row that made a bad step hold zeros."""

    steps: Tensor  # rows, memory, size: s_i
    changes: Tensor  # rows, memory, size: y_i
    born: Tensor  # memory: in which evaluation a slot was written

    @classmethod
    def empty(cls, state: Tensor, memory: int) -> "History":
        rows, size = state.shape
        shape = (rows, memory, size)
        return cls(state.new_empty(shape), state.new_empty(shape), torch.zeros(memory, dtype=torch.long))

    def record(self, current: "_Iterate", previous: "_Iterate", evaluation: int) -> None:
        slot = (evaluation - 2) % self.steps.shape[1]  # the first step is known after the second evaluation
        torch.sub(current.state, previous.state, out=self.steps[:, slot])
        torch.sub(current.error, previous.error, out=self.changes[:, slot])
        self.born[slot] = evaluation

    def used(self) -> "History":
        """Only the slots written so far (they fill from the front)."""
        count = int((self.born > 0).sum())
        return History(self.steps[:, :count], self.changes[:, :count], self.born[:count])

    def keep(self, order: Tensor) -> "History":
        """Row i of the result is row order[i]. In place: only rows that change their place are copied."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        if len(moved):
            self.steps[moved] = self.steps[order[moved]]
            self.changes[moved] = self.changes[order[moved]]
        return History(self.steps[: len(order)], self.changes[: len(order)], self.born)

    def forget(self, rows: Tensor) -> None:
        self.steps[rows] = 0
        self.changes[rows] = 0


def picard(history: History, error: Tensor, ridge: Tensor | float) -> Tensor:
    """z ← z + τ·(f(z) − z), plain or damped iteration: γ = 0.

    Converges when f contracts.

    >>> solve(torch.cos, torch.ones(1, 1), solver="picard", max_nfe=50, tol=1e-5).value
    tensor([[0.7391]])
    """
    return error.new_zeros(error.shape[0], 0)


def anderson(history: History, error: Tensor, ridge: Tensor | float) -> Tensor:
    """γ = argmin ‖g − Σ_i γ_i·y_i‖² + ridge: (Y Yᵀ + ridge)·γ = Y·g.

    Anderson (1965), in the difference form; TorchDEQ equations 8 and 9.

    >>> solve(torch.cos, torch.ones(1, 1), solver="anderson", tol=1e-5).value
    tensor([[0.7391]])
    """
    changes = history.changes
    gram = changes @ changes.mT  # rows, memory, memory
    target = error[:, None] @ changes.mT
    return _solve_with_ridge(gram, target, gram.diagonal(dim1=1, dim2=2).clone(), ridge)


def broyden(history: History, error: Tensor, ridge: Tensor | float) -> Tensor:
    """(S Yᵀ + L)·γ = S·g, where L is the part of S Sᵀ that pairs a step with older ones.

    The inverse Jacobian after `memory` rank-one updates of −I (TorchDEQ equations 10 to 12), written in closed form
    (Byrd, Nocedal and Schnabel 1994, theorem 6.1) so that it needs the same two buffers as Anderson.

    >>> solve(torch.cos, torch.ones(1, 1), solver="broyden", tol=1e-5).value
    tensor([[0.7391]])
    """
    steps, changes, born = history.steps, history.changes, history.born.to(error.device)
    gram = steps @ steps.mT  # rows, memory, memory
    system = steps @ changes.mT + gram * (born[:, None] > born[None, :])
    target = error[:, None] @ steps.mT
    return _solve_with_ridge(system, target, gram.diagonal(dim1=1, dim2=2), -ridge)


Solver = Callable[[History, Tensor, Tensor | float], Tensor]

SOLVERS: dict[str, Solver] = {
    "picard": picard,
    "anderson": anderson,
    "broyden": broyden,
}


def _solve_with_ridge(system: Tensor, target: Tensor, squares: Tensor, ridge: Tensor | float) -> Tensor:
    """Solve (system + ridge·squares)·γ = target; relative to each slot's own size, one ridge fits steps of all sizes.

    A forgotten slot is a row and a column of zeros; a one on its diagonal gives it γ = 0.
    """
    system.diagonal(dim1=1, dim2=2).add_(torch.where(squares == 0, 1, ridge * squares))
    weights, _ = torch.linalg.solve_ex(system, target[:, 0])
    return weights.contiguous()  # they come column by column, and then a batched product is made row by row


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
    """z, f(z), f(z) − z and the relative residual; rows first, everything else flat.

    State and error are zero at masked positions; the value there is whatever f says.
    """

    state: Tensor
    value: Tensor
    error: Tensor
    residual: Tensor

    @classmethod
    def measure(cls, state: Tensor, value: Tensor, mask: Tensor | None) -> "_Iterate":
        error = value - state
        if mask is not None:  # filled, not multiplied: what f says behind the end may even be NaN
            error.view(*mask.shape, -1).masked_fill_(~mask[:, :, None], 0)
        return cls(state, value, error, _relative_size(error, value, mask))

    def select(self, rows: Tensor) -> "_Iterate":
        return _Iterate(self.state[rows], self.value[rows], self.error[rows], self.residual[rows])

    def where(self, condition: Tensor, other: "_Iterate") -> "_Iterate":
        """This iterate in the rows where the condition holds, the other one elsewhere."""
        if condition.all():
            return self
        if not condition.any():
            return other
        return _Iterate(
            torch.where(condition[:, None], self.state, other.state),
            torch.where(condition[:, None], self.value, other.value),
            torch.where(condition[:, None], self.error, other.error),
            torch.where(condition, self.residual, other.residual),
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

    A row leaves the batch as soon as ‖f(z) − z‖ / ‖f(z)‖ < tol, so that rows never influence each other and a row that
    is done costs nothing more. The history and the small linear systems are kept in fp32 (fp64 for fp64 input),
    whatever the dtype of `initial`.

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
    _check_state(initial, mask)
    rows = torch.arange(initial.shape[0], device=initial.device)
    found = FixedPoint(
        state=torch.zeros_like(initial),
        value=torch.zeros_like(initial),
        residual=torch.zeros(len(rows), dtype=_precision(initial), device=initial.device),
        nfe=torch.zeros_like(rows),
        converged=torch.zeros_like(rows, dtype=torch.bool),
        trajectory=[] if keep_trajectory else None,
    )
    settings = _Settings(SOLVERS[solver], max_nfe, tol, memory, damping, observe)
    if not hasattr(function, "select"):
        function = _WholeBatch(function, initial, rows)
    for group, positions in _length_groups(function, initial, mask):
        narrowed, state, group_mask = function, initial, mask
        if len(group) < len(rows):
            narrowed, state, group_mask = function.select(group).trim(positions), initial[group], mask[group]
        group_mask = None if mask is None else group_mask[:, :positions]
        _solve_group(narrowed, state[:, :positions], group_mask, group, found, settings)
    return found


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


def _length_groups(function: Callable, initial: Tensor, mask: Tensor | None) -> list[tuple[Tensor, int]]:
    """Rows of similar length and how many positions they need, so that little is computed for padding.

    Rows do not influence each other, so they need not be solved together. Only on the CPU, where work is paid for by
    the position, and for functions that can `trim` themselves to the first positions.
    """
    rows = torch.arange(initial.shape[0], device=initial.device)
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


def _solve_group(
    function: Callable, initial: Tensor, mask: Tensor | None, rows: Tensor, found: FixedPoint, settings: _Settings
) -> None:
    """Solve some rows and write what was found; `rows` are their numbers in the whole batch."""
    shape, dtype, precision = initial.shape, initial.dtype, _precision(initial)
    memory = 0 if settings.choose_weights is picard else min(settings.memory, settings.max_nfe)
    mask = None if mask is None or mask.all() else mask.bool()
    state = _hold_masked(initial.to(precision).flatten(1), mask)
    failures = torch.zeros_like(rows)
    history = History.empty(state, memory)
    best = previous = None

    for evaluation in range(1, settings.max_nfe + 1):
        value = function(state.to(dtype).reshape(-1, *shape[1:])).to(precision).reshape(state.shape)
        current = _Iterate.measure(state, value, mask)
        if best is None:
            _refuse_non_finite(current.residual, rows)
            best = current
        else:
            bad = ~(current.residual <= GROWTH_LIMIT * best.residual)  # true for NaN as well
            best = current.where(current.residual < best.residual, best)
            if bad.any():
                current = best.where(bad, current)
                failures = failures + bad
                history.forget(bad)
            if memory:
                history.record(current, previous, evaluation)

        halted = best.residual < settings.tol
        if found.trajectory is not None or settings.observe is not None:
            seen = Step(rows, current.value.to(dtype).reshape(-1, *shape[1:]), current.residual)
            if found.trajectory is not None:
                found.trajectory.append(seen)
            stopped = None if settings.observe is None else settings.observe(seen.rows, seen.value, seen.residual)
            halted = halted if stopped is None else halted | stopped
        if evaluation == settings.max_nfe:
            halted = torch.ones_like(halted)
        if halted.any():
            best_mask = None if mask is None else mask[halted]
            _write(found, rows[halted], best.select(halted), best_mask, shape, evaluation, settings.tol)
            order = _close_gaps(halted)
            if len(order) == 0:
                return
            rows, failures, history = rows[order], failures[order], history.keep(order)
            best, current = best.select(order), current.select(order)
            mask = None if mask is None else mask[order]
            function = function.select(order)

        proposal = _propose(settings.choose_weights, history.used(), current, failures, settings.damping)
        state = proposal.to(dtype).to(precision)  # exactly what the function will see
        previous = current


def _close_gaps(halted: Tensor) -> Tensor:
    """Which row takes each place once the halted ones have left: rows from the end fill the gaps, the rest stay."""
    moving = ~halted
    count = int(moving.sum())
    order = torch.arange(count, device=halted.device)
    order[halted[:count]] = moving[count:].nonzero()[:, 0] + count
    return order


def _propose(choose_weights: Solver, history: History, current: _Iterate, failures: Tensor, damping: float) -> Tensor:
    """z + τ·g − Σ_i γ_i·(s_i + τ·y_i). Rows with bad steps get a larger ridge and a smaller τ, in the end γ = 0."""
    with torch.autocast(current.state.device.type, enabled=False):  # f may run in bf16, its solver does not
        return _propose_in_full_precision(choose_weights, history, current, failures, damping)


def _propose_in_full_precision(
    choose_weights: Solver, history: History, current: _Iterate, failures: Tensor, damping: float
) -> Tensor:
    step = current.error.new_full((1, 1), damping)
    ridge: Tensor | float = 10 * torch.finfo(current.error.dtype).eps
    failing = bool(failures.any())
    if failing:
        step = step * 0.5 ** failures[:, None]
        ridge = ridge * RIDGE_FACTOR ** failures.clamp_max(RIDGE_RAISES).to(current.error.dtype)[:, None]
    proposal = torch.addcmul(current.state, step, current.error)
    if history.steps.shape[1] == 0:
        return proposal
    weights = choose_weights(history, current.error, ridge)  # rows, memory
    if failing or not weights.isfinite().all():
        usable = weights.isfinite().all(dim=1) & (failures <= RIDGE_RAISES)
        weights = torch.where(usable[:, None], weights, 0)
    proposal = proposal[:, None].baddbmm_(weights[:, None], history.steps, alpha=-1)
    return proposal.baddbmm_((step * weights)[:, None], history.changes, alpha=-1)[:, 0]


def _write(
    found: FixedPoint,
    rows: Tensor,
    best: _Iterate,
    mask: Tensor | None,
    shape: torch.Size,
    evaluation: int,
    tol: float,
) -> None:
    value = _hold_masked(best.value, mask)
    found.state[rows, : shape[1]] = best.state.reshape(-1, *shape[1:]).to(found.state.dtype)
    found.value[rows, : shape[1]] = value.reshape(-1, *shape[1:]).to(found.value.dtype)
    found.residual[rows] = best.residual
    found.nfe[rows] = evaluation
    found.converged[rows] = best.residual < tol


def _precision(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 if that is what the state is in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def measure_residual(state: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖f(z) − z‖ / ‖f(z)‖ of every row over its unmasked positions, given z and f(z)."""
    precision = _precision(state)
    mask = None if mask is None else mask.bool()
    state, value = state.to(precision).flatten(1), value.to(precision).flatten(1)
    return _Iterate.measure(_hold_masked(state, mask), value, mask).residual


def _relative_size(error: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """‖error‖ / ‖value‖ of every row. The error is zero at masked positions already, the value need not be."""
    if mask is None:
        size = torch.linalg.vector_norm(value, dim=1)
    else:
        positions = torch.linalg.vector_norm(value.view(*mask.shape, -1), dim=2)
        size = torch.linalg.vector_norm(positions.masked_fill(~mask, 0), dim=1)
    return torch.linalg.vector_norm(error, dim=1) / size.clamp_min(1e-12)  # a fixed point at zero is one, too


def _hold_masked(value: Tensor, mask: Tensor | None) -> Tensor:
    """Zero at masked positions; value is rows × (positions · features), mask rows × positions."""
    if mask is None:
        return value
    return value.reshape(*mask.shape, -1).masked_fill(~mask[:, :, None], 0).flatten(1)


def _refuse_non_finite(residual: Tensor, rows: Tensor) -> None:
    if not residual.isfinite().all():
        raise FloatingPointError(
            f"The function is not finite at the initial state of row(s) {rows[~residual.isfinite()].tolist()}; "
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


def _check_state(initial: Tensor, mask: Tensor | None) -> None:
    if initial.dim() < 2 or initial.numel() == 0:
        raise ValueError(
            f"The initial state must have rows and something in them, but its shape is {tuple(initial.shape)}."
        )
    if not initial.is_floating_point():
        raise ValueError(f"The initial state must be floating point, not {initial.dtype}.")
    if mask is not None:
        if mask.shape != initial.shape[:2]:
            raise ValueError(
                f"The mask is {tuple(mask.shape)} but the state has rows × positions = {tuple(initial.shape[:2])}."
            )
        if not mask.any(dim=1).all():
            empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
            raise ValueError(f"Row(s) {empty} are masked everywhere; remove them, there is nothing to solve.")

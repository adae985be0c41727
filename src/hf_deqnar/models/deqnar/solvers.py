"""Solvers of fixed points: Picard, Anderson and Broyden. Each chooses the next state from the recent steps of a row.

With g(z) = f(z) − z and the recent steps

    s_i = z_{i+1} − z_i,   y_i = g_{i+1} − g_i,

a solver returns the weights γ of the next proposal

    z ← z + τ·g(z) − Σ_i γ_i·(s_i + τ·y_i).

Picard has γ = 0; Anderson and Broyden are two ways to choose γ so that the next residual is small. `fixed_point.solve`
evaluates f, and calls a solver after every evaluation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import torch
from torch import Tensor

# Smallest pivot; below the square of any step.
TINY = 1e-300
NUMPY_TYPES = {torch.float32: numpy.float32, torch.float64: numpy.float64}
# Up to this many rows, solving the systems row by row is faster than batched.
FEW_ROWS = 4
Ridge = Sequence[float] | Tensor  # a number for every row; a tensor where the host must not read values


class Iterate(Protocol):
    """z, f(z) and f(z) − z of every row: rows × 1 × size."""

    state: Tensor
    value: Tensor
    error: Tensor


@dataclass
class History:
    """The last `memory` steps of every row. After a failed step the slots of its row are zero."""

    errors: Tensor  # rows, 1 + memory, size: the current g, then the changes y_i
    moves: Tensor  # rows, memory, size: s_i + τ·y_i
    created_at: list[int]  # for every used slot, the evaluation it was written in; slots are filled in order
    zero_filled: bool  # unused slots are zero, so they need not be excluded

    def __post_init__(self) -> None:
        self.columns = self.errors.mT
        self.error_slots, self.move_slots = self.errors.split(1, dim=1), self.moves.split(1, dim=1)

    @classmethod
    def empty(cls, state: Tensor, memory: int) -> "History":
        """For a few rows, zero-filled slots cost less than slicing off unused ones in every evaluation."""
        rows, _, size = state.shape
        zero_filled = rows <= FEW_ROWS
        new = state.new_zeros if zero_filled else state.new_empty
        return cls(new((rows, 1 + memory, size)), new((rows, memory, size)), [], zero_filled)

    def active(self) -> tuple[Tensor, Tensor, Tensor]:
        """Errors, errors transposed, and moves of the valid slots."""
        used = len(self.created_at)
        if self.zero_filled or used == len(self.move_slots):
            return self.errors, self.columns, self.moves
        return self.errors[:, : 1 + used], self.columns[:, :, : 1 + used], self.moves[:, :used]

    def record(self, current: Iterate, previous: Iterate, evaluation: int, step: Tensor | float) -> None:
        slot = (evaluation - 2) % len(self.move_slots)  # the first step is known after the second evaluation
        self.created_at[slot : slot + 1] = [evaluation]
        self.error_slots[0].copy_(current.error)
        change, move = self.error_slots[1 + slot], self.move_slots[slot]
        torch.sub(current.error, previous.error, out=change)
        if isinstance(step, float) and step == 1:  # z + g(z) is f(z)
            torch.sub(current.value, previous.value, out=move)
        else:
            torch.sub(current.state, previous.state, out=move).add_(step * change)

    def select(self, order: Tensor) -> "History":
        """Row i of the result is row order[i]. In place: only rows with a new index are copied."""
        moved = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
        if len(moved):
            self.errors[moved] = self.errors[order[moved]]
            self.moves[moved] = self.moves[order[moved]]
        return History(self.errors[: len(order)], self.moves[: len(order)], self.created_at, self.zero_filled)

    def reset(self, rows: list[int] | Tensor) -> None:
        """Clear the slots of rows, given their numbers or a boolean for every row."""
        if isinstance(rows, Tensor):
            self.errors.masked_fill_(rows[:, None, None], 0)
            self.moves.masked_fill_(rows[:, None, None], 0)
        else:
            self.errors[rows] = 0
            self.moves[rows] = 0


def picard(history: History, step: Tensor | float, ridge: Ridge) -> None:
    """z ← z + τ·(f(z) − z), plain or damped iteration: γ = 0.

    Converges when f contracts.

    >>> from hf_deqnar import solve
    >>> solve(torch.cos, torch.ones(1, 1), solver="picard", max_nfe=50, tol=1e-5).value
    tensor([[0.7391]])
    """


def anderson(history: History, step: Tensor | float, ridge: Ridge) -> Tensor:
    """γ = argmin ‖g − Σ_i γ_i·y_i‖² + ridge: (Y Yᵀ + ridge)·γ = Y·g.

    Anderson (1965), in the difference form; TorchDEQ equations 8 and 9.

    >>> from hf_deqnar import solve
    >>> solve(torch.cos, torch.ones(1, 1), solver="anderson", tol=1e-5).value
    tensor([[0.7391]])
    """
    errors, columns, moves = history.active()
    products = torch.bmm(errors, columns)  # rows, 1 + slots, 1 + slots; g is the first
    used = len(history.created_at)
    if isinstance(ridge, Tensor):
        padded = products.new_zeros(len(products), 1, moves.shape[1])
        numbers = products.to(ridge.dtype).permute(1, 2, 0)
        padded[:, 0, :used] = torch.stack(_eliminate(numbers, used, ridge, torch.maximum), dim=1).to(padded.dtype)
        return padded
    weights: list | numpy.ndarray
    if len(products) <= FEW_ROWS:
        weights = [_eliminate(one, used, least, max) for one, least in zip(products.tolist(), ridge, strict=True)]
    else:
        on_host = products.double().cpu().permute(1, 2, 0).numpy()
        weights = numpy.stack(_eliminate(on_host, used, numpy.array(ridge), numpy.maximum), axis=1)
    filled = numpy.zeros((len(products), 1, moves.shape[1]), NUMPY_TYPES[products.dtype])
    filled[:, 0, :used] = weights
    return torch.from_numpy(filled) if products.is_cpu else torch.from_numpy(filled).to(products.device)


def broyden(history: History, step: Tensor | float, ridge: Ridge) -> Tensor:
    """(S Yᵀ + L)·γ = S·g, where L is the part of S Sᵀ that pairs a step with older ones.

    The inverse Jacobian after `memory` rank-one updates of −I (TorchDEQ equations 10 to 12), written in closed form
    (Byrd, Nocedal and Schnabel 1994, theorem 6.1) so that it needs the same two buffers as Anderson.

    >>> from hf_deqnar import solve
    >>> solve(torch.cos, torch.ones(1, 1), solver="broyden", tol=1e-5).value
    tensor([[0.7391]])
    """
    errors, columns, moves = history.active()
    changes = errors[:, 1:]
    steps = moves - step * changes
    created_at = torch.tensor(
        history.created_at + [0] * (steps.shape[1] - len(history.created_at)), device=steps.device
    )
    gram = steps @ steps.mT  # rows, slots, slots
    squares = gram.diagonal(dim1=1, dim2=2)
    system = steps @ changes.mT + gram * (created_at[:, None] > created_at[None, :])
    # The ridge is relative to the size of each slot. An unused or reset slot is a row and a column of zeros; a one on
    # its diagonal gives it γ = 0.
    ridges = ridge.to(steps.dtype) if isinstance(ridge, Tensor) else steps.new_tensor(ridge)
    shift = torch.where(squares == 0, 1, -ridges[:, None] * squares)
    system.diagonal(dim1=1, dim2=2).add_(shift)
    weights, _ = torch.linalg.solve_ex(system, (steps @ columns[:, :, :1])[:, :, 0])
    # A singular system gives γ = 0. The weights are column-major; the batched product needs them row-major.
    return torch.where(weights.isfinite().all(dim=1, keepdim=True), weights, 0).contiguous()[:, None]


Solver = Callable[[History, Tensor | float, Ridge], Tensor | None]

SOLVERS: dict[str, Solver] = {
    "picard": picard,
    "anderson": anderson,
    "broyden": broyden,
}


def _eliminate(
    products: Sequence | numpy.ndarray | Tensor, used: int, ridge: float | numpy.ndarray | Tensor, larger: Callable
) -> list:
    """The γ of Anderson by Gaussian elimination, given the products of (g, y_1, y_2, …) with one another.

    Entries are numbers, or arrays or tensors with a number for every row; γ is bitwise the same in all cases.
    The ridge is relative to the size of each slot, so that one value fits steps of all sizes; without rounding it is
    also a lower bound of the pivots. A reset slot is a row of zeros and gets γ = 0.
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

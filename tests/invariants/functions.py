"""Functions with known fixed points, in the form that the solver needs: each row has its own context."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Contraction:
    """f(z) = tanh(z·W + context); W has the given largest singular value, so f contracts below 1."""

    weight: Tensor
    context: Tensor  # rows, positions, features

    @classmethod
    def random(cls, rows: int, positions: int, features: int, strength: float, dtype=torch.float64) -> "Contraction":
        weight = torch.randn(features, features, dtype=dtype)
        weight = weight * strength / torch.linalg.matrix_norm(weight, 2)
        return cls(weight, torch.randn(rows, positions, features, dtype=dtype))

    def __call__(self, state: Tensor) -> Tensor:
        return torch.tanh(state @ self.weight + self.context)

    def select(self, rows: Tensor) -> "Contraction":
        return Contraction(self.weight, self.context[rows])

    @property
    def zeros(self) -> Tensor:
        return torch.zeros_like(self.context)


class Counting:
    """Wraps a function and counts the evaluations of every row of the original batch."""

    def __init__(self, function, rows: int):
        self.function, self.rows, self.counts = function, torch.arange(rows), torch.zeros(rows, dtype=torch.long)

    def __call__(self, state: Tensor) -> Tensor:
        assert state.shape[0] == len(self.rows)
        self.counts[self.rows] += 1
        return self.function(state)

    def select(self, rows: Tensor) -> "Counting":
        narrowed = Counting.__new__(Counting)
        narrowed.function, narrowed.rows, narrowed.counts = self.function.select(rows), self.rows[rows], self.counts
        return narrowed

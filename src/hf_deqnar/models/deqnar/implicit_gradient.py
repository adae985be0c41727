"""Gradients of a loss through the fixed point z* = f(z*).

The exact gradient is ∂L/∂θ = ∂L/∂z* · (I − ∂f/∂z*)⁻¹ · ∂f/∂θ. The functions of this module differ in the
approximation of the inverse. Each returns the value of f at the equilibrium with an autograd graph; only `unrolled`
stores the intermediate states.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint as recompute

from .fixed_point import FixedPoint, Step, measure_residual, solve

Function = Callable[[Tensor], Tensor]


@dataclass
class GradientOptions:
    """Kind of gradient and its settings; see `DeqNarConfig`."""

    kind: str = "one_step"
    steps: int = 5
    damping: float = 0.5
    solver: str = "anderson"
    max_nfe: int = 20
    tol: float = 1e-3
    checkpoint: bool = False


def equilibrium(
    function: Function, initial: Tensor, *, gradient: GradientOptions, mask: Tensor | None = None, **solver_options
) -> FixedPoint:
    """Solve z = f(z); if gradients are enabled, make the result's `value` differentiable.

    >>> weight = torch.tensor(0.5, requires_grad=True)
    >>> found = equilibrium(lambda z: weight * z + 1, torch.zeros(1, 1), gradient=GradientOptions("ift"), tol=1e-6)
    >>> torch.autograd.grad(found.value.sum(), weight)[0].round(decimals=3)  # z* = 1/(1−w), dz*/dw = 1/(1−w)²
    tensor(4.)
    """
    masked = function if mask is None else _Masked(function, mask)
    if torch.is_grad_enabled() and gradient.kind == "unrolled":
        return unrolled(masked, initial, gradient, mask, **solver_options)
    if torch.is_grad_enabled() and gradient.kind == "one_step" and solver_options.get("max_nfe") == 1:
        # The only evaluation is the one with graph; `solve` computes its residual.
        value = masked(initial if mask is None else initial.masked_fill(~mask.bool()[:, :, None], 0))
        return replace(solve(lambda state: value.detach(), initial, mask=mask, **solver_options), value=value)
    found = solve(function, initial, mask=mask, **solver_options)
    if not torch.is_grad_enabled():
        return found
    return replace(found, value=GRADIENTS[gradient.kind](masked, found.state, gradient))


@dataclass
class _Masked:
    """f with zeros at masked positions, as in `solve`."""

    function: Function
    mask: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        return self.function(state).masked_fill(~self.mask.bool()[:, :, None], 0)


def one_step(function: Function, state: Tensor, options: GradientOptions) -> Tensor:
    """(I − J)⁻¹ ≈ I: one evaluation with graph at the equilibrium. DEQNAR equation 4, the paper's default."""
    return function(state.detach())


def phantom(function: Function, state: Tensor, options: GradientOptions) -> Tensor:
    """z ← τ·f(z) + (1 − τ)·z, k times with graph, from the equilibrium. TorchDEQ equations 5 and 6.

    These k evaluations follow those of the solver, so an unconverged value differs from that without gradients.
    """
    state = state.detach()
    for _ in range(options.steps):
        state = torch.lerp(state, function(state).to(state.dtype), options.damping)
    return state


def ift(function: Function, state: Tensor, options: GradientOptions) -> Tensor:
    """v = vᵀ·∂f/∂z* + ∂L/∂z*, solved in the backward pass; v is then back-propagated through one evaluation.

    DEQNAR equation 3.
    """
    state = state.detach().requires_grad_()
    value = function(state)

    def solve_adjoint(gradient: Tensor) -> Tensor:
        def adjoint(vector: Tensor) -> Tensor:
            (product,) = torch.autograd.grad(value, state, vector, retain_graph=True)
            return product + gradient

        # Zero: nothing depends on the equilibrium. Not finite: passed on, so that a gradient scaler skips the step.
        if not gradient.any() or not gradient.isfinite().all():
            return gradient
        return solve(adjoint, gradient, solver=options.solver, max_nfe=options.max_nfe, tol=options.tol).value

    return _Adjoint.apply(value, solve_adjoint)


GRADIENTS: dict[str, Callable[[Function, Tensor, GradientOptions], Tensor]] = {
    "one_step": one_step,
    "phantom": phantom,
    "ift": ift,
}


class _Adjoint(torch.autograd.Function):
    """The identity, whose incoming gradient is replaced by the solution of the adjoint equation."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, solve_adjoint: Function) -> Tensor:
        ctx.solve_adjoint = solve_adjoint
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.solve_adjoint(gradient), None


def unrolled(
    function: Function,
    initial: Tensor,
    options: GradientOptions,
    mask: Tensor | None = None,
    *,
    max_nfe: int | None = None,
    tol: float = 1e-3,
    keep_trajectory: bool = False,
    observe: Callable | None = None,
    **solver_options: Any,
) -> FixedPoint:
    """z ← f(z), k times from the initial state with graph: the exact gradient of a weight-tied stack of depth k.

    k is `options.steps`, or `max_nfe` if that is less. It is plain iteration, independently of the solver, and no row
    stops early. Memory grows with k unless `checkpoint` recomputes every step in the backward pass.
    """
    steps = options.steps if max_nfe is None else min(options.steps, max_nfe)
    rows = torch.arange(initial.shape[0], device=initial.device)
    trajectory: list[Step] | None = [] if keep_trajectory else None
    state, value = initial, initial
    for _ in range(steps):
        state = value
        value = recompute(function, state, use_reentrant=False) if options.checkpoint else function(state)
        with torch.no_grad():
            residual = measure_residual(state, value, mask)
        if trajectory is not None:
            trajectory.append(Step(rows, value.detach(), residual))
        if observe is not None:
            observe(rows, value.detach(), residual)
    return FixedPoint(
        state=state.detach(),
        value=value,
        residual=residual,
        nfe=torch.full_like(rows, steps),
        converged=residual < tol,
        trajectory=trajectory,
    )

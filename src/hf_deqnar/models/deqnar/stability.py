"""Stability of equilibria: weight norms, regularisers, initial states and the spectral radius."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize

Function = Callable[[Tensor], Tensor]


class RescaledWeight(nn.Module):
    """W ← W ∘ min(t, g / N(W)), with a learnable scale g per output row. TorchDEQ equations 13 to 16.

    N(W) is the norm of each row (`weight`) or the largest singular value (`spectral`). The latter is updated by power
    iteration in `refresh`, once per training step, so that the weight is constant within a step.
    """

    left: Tensor
    right: Tensor

    def __init__(self, weight: Tensor, kind: str, clip: float | None) -> None:
        super().__init__()
        self.kind, self.clip = kind, clip
        self.scale = nn.Parameter(torch.ones_like(weight[:, :1]))
        if kind == "spectral":
            self.register_buffer("left", torch.ones_like(weight[:, 0]))
            self.register_buffer("right", torch.ones_like(weight[0]))

    def norm(self, weight: Tensor) -> Tensor:
        if self.kind == "weight":
            return torch.linalg.vector_norm(weight, dim=1, keepdim=True)
        # Copies: `refresh` writes in place, which would invalidate a graph built earlier in the same step.
        return torch.dot(self.left.clone(), _product(weight, self.right.clone()))

    def forward(self, weight: Tensor) -> Tensor:
        factor = self.scale / self.norm(weight)
        return weight * (factor if self.clip is None else factor.clamp_max(self.clip))

    @torch.no_grad()
    def refresh(self, weight: Tensor) -> None:
        """One power iteration towards the leading singular vectors; no-op for row norms."""
        if self.kind == "spectral":
            left, right = _power_iteration(weight, self.right, iterations=1)
            self.left.copy_(left)
            self.right.copy_(right)

    @torch.no_grad()
    def starting_values(self, weight: Tensor) -> dict[str, Tensor]:
        """Initial values of its tensors, for which the rescaled matrix equals W."""
        if self.kind == "weight":
            return {"scale": torch.linalg.vector_norm(weight, dim=1, keepdim=True)}
        left, right = _power_iteration(weight, torch.full_like(weight[0], weight.shape[1] ** -0.5), iterations=30)
        scale = torch.dot(left, _product(weight, right)).expand_as(weight[:, :1])
        return {"scale": scale, "left": left, "right": right}


def _power_iteration(weight: Tensor, right: Tensor, iterations: int) -> tuple[Tensor, Tensor]:
    for _ in range(iterations):
        left = nn.functional.normalize(_product(weight, right), dim=0)
        right = nn.functional.normalize(_product(weight.mT, left), dim=0)
    return left, right


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product in the precision of both: autocast lowers that of `@`, but not of element-wise operations."""
    return (matrix * vector).sum(dim=1)


def rescale_weights(module: nn.Module, kind: str, clip: float | None = None) -> None:
    """Reparametrise the weight of every linear layer in a module; `kind` is `none`, `weight` or `spectral`."""
    if kind == "none":
        return
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            rescaled = RescaledWeight(layer.weight, kind, clip)
            with torch.no_grad():
                for name, value in rescaled.starting_values(layer.weight).items():
                    getattr(rescaled, name).copy_(value)
            parametrize.register_parametrization(layer, "weight", rescaled, unsafe=True)


def rescaling_of(layer: nn.Module) -> tuple[RescaledWeight, Tensor] | None:
    """The rescaling of a layer's weight and its raw matrix, or None if it has none."""
    if not parametrize.is_parametrized(layer, "weight"):
        return None
    parametrizations: Any = layer.parametrizations
    return parametrizations.weight[0], parametrizations.weight.original


def remove_rescaling(module: nn.Module) -> None:
    """Make the rescaled matrices ordinary weights again; the function does not change."""
    for layer in list(module.modules()):
        if parametrize.is_parametrized(layer, "weight"):
            parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)


@contextmanager
def cached_weights(module: nn.Module, cache: bool = True) -> Iterator[None]:
    """Compute rescaled weights once per solve and its gradient, instead of in every evaluation.

    They are computed here, with graph if gradients are enabled, so that the solve and the gradient use one matrix.
    Without `cache` every evaluation computes them; checkpointing needs this, because it recomputes later.
    """
    # Runs for every layer in every solve; `rescaling_of` would raise and catch an AttributeError in each.
    layers = [layer for layer in module.modules() if "parametrizations" in layer._modules]
    rescalings = [rescaling for rescaling in map(rescaling_of, layers) if rescaling is not None]
    if module.training and torch.is_grad_enabled():
        for rescaled, weight in rescalings:
            rescaled.refresh(weight)
    cache = cache and bool(rescalings)
    with parametrize.cached() if cache else nullcontext():
        for layer in layers if cache else []:
            layer.weight  # noqa: B018  (reading it fills the cache)
        yield


def jacobian_penalty(function: Function, state: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖J‖²_F per element, estimated by ‖εᵀJ‖² with ε ~ N(0, I) (Hutchinson). TorchDEQ equations 17 and 18.

    The spectral radius of J is at most ‖J‖_F, so a small penalty means fast convergence.

    >>> jacobian_penalty(lambda z: 0.7 * z, torch.zeros(1000, 100)).round(decimals=1)  # J = 0.7·I, ‖J‖²_F / size = 0.49
    tensor(0.5000)
    """
    state = state.detach().requires_grad_()
    noise = torch.randn_like(state)
    if mask is not None:
        noise = noise * mask.to(noise.dtype)[:, :, None]
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
        (product,) = torch.autograd.grad(function(state), state, noise, create_graph=True)
        return product.pow(2).sum() / noise.ne(0).sum()


def initial_condition_loss(first: Tensor, equilibrium: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖f(z*) − f(z₀)‖₁, averaged over unmasked elements: moves the first evaluation towards the equilibrium.

    DEQNAR equation 5. The equilibrium is the target and gets no gradient.
    """
    distance = (first - equilibrium.detach()).abs().mean(dim=-1)
    return distance.mean() if mask is None else distance[mask.bool()].mean()


class RandomState:
    """Stochastic dynamic correction: one state per row, drawn uniformly from all evaluations of its trajectory.

    Pass it to `solve` as `observe`. It samples with a reservoir, so memory does not grow with the number of
    evaluations. The objective supervises the prediction made from `value` with a weight below 1 (DEQNAR appendix B.2).
    """

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.value: Tensor | None = None  # set in the first evaluation, which has all rows
        self.evaluations: Tensor | None = None
        self.generator = generator

    def __call__(self, rows: Tensor, value: Tensor, residual: Tensor) -> None:
        if self.value is None or self.evaluations is None:
            self.value = torch.zeros_like(value)
            self.evaluations = torch.zeros(value.shape[0], device=value.device)
        self.evaluations[rows] += 1
        draw = torch.rand(len(rows), generator=self.generator, device=value.device)
        chosen = draw * self.evaluations[rows] < 1
        self.value[rows[chosen], : value.shape[1]] = value[chosen]


def random_budget(max_nfe: int, generator: torch.Generator | None = None) -> int:
    """A random number of evaluations, 1 to max_nfe: trains the model for all budgets."""
    device = None if generator is None else generator.device
    return int(torch.randint(1, max_nfe + 1, (), generator=generator, device=device))


def mixed_initial_state(initial: Tensor, share: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    """Start a share of the rows from noise, so that the equilibrium does not depend on the initial state."""
    noise = torch.randn(initial.shape, generator=generator, device=initial.device, dtype=initial.dtype)
    noisy = torch.rand(initial.shape[0], generator=generator, device=initial.device) < share
    return torch.where(noisy.reshape(-1, *[1] * (initial.dim() - 1)), noise, initial)


def spectral_radius(function: Function, state: Tensor, mask: Tensor | None = None, iterations: int = 30) -> Tensor:
    """|λ|_max of ∂f/∂z for every row: below 1, plain iteration converges.

    Power iteration on Jᵀ. The growth is averaged (geometrically) over the second half of the iterations, because a
    complex pair of eigenvalues makes single steps oscillate.

    >>> spectral_radius(lambda z: z @ torch.diag(torch.tensor([0.9, 0.1])), torch.zeros(1, 2))
    tensor([0.9000])
    """
    state = state.detach().requires_grad_()
    with torch.enable_grad():
        value = function(state)
    vector = torch.randn_like(state)
    logarithms = []
    for _ in range(iterations):
        if mask is not None:
            vector = vector * mask.to(vector.dtype)[:, :, None]
        size = torch.linalg.vector_norm(vector.flatten(1), dim=1).clamp_min(torch.finfo(vector.dtype).tiny)
        logarithms.append(size.log())
        vector = vector / size.reshape(-1, *[1] * (vector.dim() - 1))
        (vector,) = torch.autograd.grad(value, state, vector, retain_graph=True)
    return torch.stack(logarithms[iterations // 2 :]).mean(dim=0).exp()

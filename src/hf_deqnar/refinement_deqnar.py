"""What a model does with a source and a canvas whatever computes f(z): check them, lay one out, solve z = f(z).

It is shared by the model in torch and by the runtime of exported graphs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .fixed_point import FixedPoint, Step, check_options, measure_residual
from .implicit_gradient import GradientOptions, equilibrium
from .landscape import held_weights
from .transition_deqnar import BoundTransition


@dataclass
class Source:
    """What a solve needs of the sentences to translate; computed once, whatever is tried with them."""

    seen: Tensor | None  # rows, source, width: what a canvas copies; None if nothing is copied
    projected: list[tuple[Tensor, Tensor]]  # keys and values of every decoder layer: rows, heads, source, features
    length_logits: Tensor | None  # rows, classes; None for CTC

    def select(self, rows: Tensor) -> "Source":
        return Source(
            seen=None if self.seen is None else self.seen[rows],
            projected=[(key[rows], value[rows]) for key, value in self.projected],
            length_logits=None if self.length_logits is None else self.length_logits[rows],
        )


def _one_evaluation(
    initial: Tensor, value: Tensor, residual: Tensor | None, converged: Tensor | None, options: dict
) -> FixedPoint:
    """What a decoder that is evaluated once found, told in the words of a solve."""
    rows = torch.arange(initial.shape[0], device=initial.device)
    trajectory = [Step(rows, value.detach(), residual)] if options["keep_trajectory"] else None
    if options["observe"] is not None:
        options["observe"](rows, value.detach(), residual)
    return FixedPoint(initial, value, residual, torch.ones_like(rows), converged, trajectory)


class RefinementMixin:
    """For a module that has `config`, and a `transition` that `bind` makes a function of the state alone."""

    def refine(
        self,
        bound: BoundTransition,
        canvas_mask: Tensor,
        *,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        keep_trajectory: bool = False,
        observe: Callable | None = None,
    ) -> FixedPoint:
        """Solve z = f(z). The result's `value` holds the features that tokens are read from, with graph if enabled."""
        config = self.config
        initial = torch.zeros_like(bound.context.injection) if initial_state is None else initial_state
        options = self.solver_options(max_nfe, tol, solver) | {"keep_trajectory": keep_trajectory, "observe": observe}
        max_nfe = options.pop("max_nfe")
        checkpointing = self.training and self.is_gradient_checkpointing
        gradient = self._gradient_options(checkpointing) if torch.is_grad_enabled() else GradientOptions()
        with held_weights(self.transition, cache=not checkpointing):
            if config.refinement == "stacked":
                return _one_evaluation(initial, bound(initial), None, None, options)
            if config.refinement == "explicit":
                return self._refine_explicit(bound, initial, canvas_mask, max_nfe, gradient, options)
            return equilibrium(bound, initial, gradient=gradient, mask=canvas_mask, max_nfe=max_nfe, **options)

    def solver_options(self, max_nfe: int | None, tol: float | None, solver: str | None) -> dict[str, Any]:
        """What a solve is told: what is asked for, or else the configuration's; refused if no solve can use it."""
        config = self.config
        options = {
            "max_nfe": config.max_nfe if max_nfe is None else max_nfe,
            "solver": config.solver if solver is None else solver,
            "tol": config.tol if tol is None else tol,
            "memory": config.memory,
            "damping": config.damping,
        }
        check_options(**options)
        return options

    def _gradient_options(self, checkpointing: bool) -> GradientOptions:
        config = self.config
        return GradientOptions(
            kind=config.gradient,
            steps=config.gradient_steps,
            damping=config.gradient_damping,
            solver=config.gradient_solver,
            max_nfe=config.gradient_max_nfe,
            tol=config.gradient_tol,
            checkpoint=checkpointing,
        )

    def _refine_explicit(
        self,
        bound: BoundTransition,
        initial: Tensor,
        canvas_mask: Tensor,
        max_nfe: int,
        gradient: GradientOptions,
        options: dict,
    ) -> FixedPoint:
        """An expected embedding is not what tokens are read from: the last evaluation of the budget gives features."""
        transition, context = bound.transition, bound.context
        if max_nfe > 1:
            found = equilibrium(bound, initial, gradient=gradient, mask=canvas_mask, max_nfe=max_nfe - 1, **options)
            return replace(found, value=transition.features(found.value, context), nfe=found.nfe + 1)
        features = transition.features(initial, context)
        with torch.no_grad():
            value = transition.next_state(features, context)
            residual = measure_residual(initial, value, canvas_mask)
        return replace(_one_evaluation(initial, value, residual, residual < options["tol"], options), value=features)

    def canvas_lengths(self, source_mask: Tensor, labels: Tensor | None, length_logits: Tensor | None) -> Tensor:
        """How long the canvas of every row is: fixed by CTC, known from labels, or predicted."""
        source_lengths = source_mask.sum(dim=1)
        if self.config.length == "ctc":
            return source_lengths * self.config.ctc_upsampling
        if labels is not None:
            return (labels >= 0).sum(dim=1)
        lengths = self.predicted_lengths(length_logits, source_lengths)[:, 0]
        return lengths.clamp_max(self.config.max_position_embeddings)

    def predicted_lengths(self, length_logits: Tensor, source_lengths: Tensor, count: int = 1) -> Tensor:
        """The `count` likeliest lengths of every row, at least 1 each: rows × count."""
        offset = length_logits.topk(count, dim=-1).indices - self.config.length_offsets
        return (source_lengths[:, None] + offset).clamp_min(1)

    def masked_canvas(self, lengths: Tensor, width: int | None = None) -> Tensor:
        """`<mask>` up to each row's length, padding behind it: rows × width, the longest row's if not given."""
        width = int(lengths.max()) if width is None else width
        position = torch.arange(width, device=lengths.device)[None]
        return torch.where(position < lengths[:, None], self.config.mask_token_id, self.config.pad_token_id)

    def check_source(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, encoder_outputs: BaseModelOutput | None
    ) -> Tensor:
        """The source's mask, after making sure that there is a source in every row."""
        if input_ids is None and (encoder_outputs is None or attention_mask is None):
            raise ValueError("Give input_ids, or encoder_outputs together with the attention_mask they belong to.")
        if attention_mask is None:
            attention_mask = input_ids != self.config.pad_token_id
        shape = input_ids.shape if input_ids is not None else encoder_outputs[0].shape[:2]
        if attention_mask.shape != shape:
            raise ValueError(f"The source is {tuple(shape)} but its mask is {tuple(attention_mask.shape)}.")
        return self._check_mask(attention_mask.bool(), "source")

    def check_labels(self, labels: Tensor) -> Tensor:
        """Where labels stand, after making sure that every row has some and that padding (−100) is behind them."""
        return self._check_mask(labels >= 0, "labels")

    def check_canvas(self, canvas: Tensor, canvas_mask: Tensor | None) -> Tensor:
        """The canvas's mask, after making sure that every row has something to fill in."""
        mask = (canvas != self.config.pad_token_id) if canvas_mask is None else canvas_mask.bool()
        if mask.shape != canvas.shape:
            raise ValueError(f"The canvas is {tuple(canvas.shape)} but its mask is {tuple(mask.shape)}.")
        return self._check_mask(mask, "canvas")

    def _check_mask(self, mask: Tensor, what: str) -> Tensor:
        if mask.dim() != 2:
            raise ValueError(f"The {what} must be rows × length, but its shape is {tuple(mask.shape)}.")
        if mask.numel() == 0:
            raise ValueError(f"The {what} is empty: its shape is {tuple(mask.shape)}, rows × length.")
        if mask.shape[1] > self.config.max_position_embeddings:
            raise ValueError(
                f"The {what} is {mask.shape[1]} positions long, but max_position_embeddings is "
                f"{self.config.max_position_embeddings}; shorten the text or split it into sentences."
            )
        if mask.all():
            return mask
        if not mask[:, 0].all():
            empty = (~mask.any(dim=1)).nonzero()[:, 0].tolist()
            if empty:
                raise ValueError(f"Row(s) {empty} of the {what} are all padding; remove them from the batch.")
            raise ValueError(f"The {what} is padded on the left; set tokenizer.padding_side = 'right'.")
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            holes = (mask[:, 1:] & ~mask[:, :-1]).any(dim=1).nonzero()[:, 0].tolist()
            raise ValueError(f"Row(s) {holes} of the {what} have padding between tokens; it must all be at the end.")
        return mask

"""The path of a sentence through the model: `prepare`, `lay_out` and `solve`, for torch and for exported graphs.

source = model.prepare(input_ids, attention_mask)    # encoder states, keys and values, length logits
canvas = model.lay_out(source)                       # the length model decides positions and tokens on them
found = model.solve(source, canvas)                  # z = f(z)
logits = model.read(found)
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from .fixed_point import FixedPoint, check_options
from .implicit_gradient import GradientOptions
from .layers_deqnar import Record
from .lengths import LENGTH_MODELS, LengthModel
from .shortlist import Words
from .stability import cached_weights
from .transition_deqnar import BoundTransition, Observer


@dataclass
class Source:
    """What decoding needs of the source sentences; computed once, however many canvases are solved with it."""

    mask: Tensor  # (batch, source)
    encoder_states: Tensor | None  # (batch, source, d_model), with latents if any; None if an export does not need it
    keys_values: list[tuple[Tensor, Tensor]]  # cross-attention of every layer: (batch, heads, source, head_dim) each
    length_logits: Tensor | None = None  # (batch, offsets); None if no length is predicted
    latent_kl: Tensor | None = None  # (batch): KL(q ‖ p) of the latents; None without labels
    encoder_last_hidden_state: Tensor | None = None  # (batch, source, d_model): without latents
    words: Words | None = None  # the shortlist of the sentences; None for the whole vocabulary

    @property
    def lengths(self) -> Tensor:
        """Tokens of every source, (batch)."""
        return self.mask.sum(dim=1)

    def select(self, rows: Tensor) -> "Source":
        """The source of some rows; a row may be repeated."""

        def pick(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return Source(
            mask=self.mask[rows],
            encoder_states=pick(self.encoder_states),
            keys_values=[(key[rows], value[rows]) for key, value in self.keys_values],
            length_logits=pick(self.length_logits),
            latent_kl=pick(self.latent_kl),
            encoder_last_hidden_state=pick(self.encoder_last_hidden_state),
            words=None if self.words is None else self.words.select(rows),
        )

    def rows(self, rows: Tensor, length: int) -> "Source":
        """Sentences of one length, without padding; a single one with a shortlist of its own."""
        some = self.select(rows)
        words = some.words if some.words is None or len(rows) > 1 else some.words.of_row(0)
        return replace(
            some,
            mask=some.mask[:, :length],
            encoder_states=None if some.encoder_states is None else some.encoder_states[:, :length],
            keys_values=[(key[:, :, :length], value[:, :, :length]) for key, value in some.keys_values],
            words=words,
        )


@dataclass
class Canvas:
    """The positions that a solve fills in: `<mask>` where a token is to be found, tokens where it is known."""

    tokens: Tensor  # (batch, canvas); padding behind the end
    mask: Tensor  # (batch, canvas)

    @property
    def lengths(self) -> Tensor:
        """Positions of every canvas, (batch)."""
        return self.mask.sum(dim=1)

    def reveal(self, positions: Tensor, tokens: Tensor) -> "Canvas":
        """The canvas with tokens at some positions."""
        return Canvas(torch.where(positions, tokens, self.tokens), self.mask)


class RefinementMixin:
    """For a module with a `config` and a `transition`, and with `bind`, which makes the latter a function of z."""

    config: Any
    transition: Any
    training: bool
    is_gradient_checkpointing: bool

    @property
    def length_model(self) -> LengthModel:
        """How the length of a canvas is chosen, what is trained on it and how it is read."""
        return LENGTH_MODELS[self.config.length](self.config)

    @torch.compiler.disable  # the width of a canvas depends on the lengths in the batch
    def lay_out(
        self, source: Source, labels: Tensor | None = None, lengths: Tensor | None = None, tokens: Tensor | None = None
    ) -> Canvas:
        """A canvas for every source.

        Args:
            labels: targets whose lengths are used where the length model predicts one.
            lengths: of the canvases, (batch), instead of those that the length model chooses.
            tokens: what stands on the canvases, (batch, canvas), instead of `<mask>`.
        """
        if tokens is None:
            width = None if lengths is not None else self.length_model.canvas_width(labels)
            lengths = self.length_model.canvas_lengths(source, labels) if lengths is None else lengths
            tokens = self._masked_canvas(lengths, width)
        return Canvas(tokens, self.check_canvas(tokens, None))

    def _masked_canvas(self, lengths: Tensor, width: int | None = None) -> Tensor:
        """`<mask>` up to each row's length, padding behind it: (batch, width), by default that of the longest row."""
        width = int(lengths.max()) if width is None else width
        position = torch.arange(width, device=lengths.device)[None]
        return torch.where(position < lengths[:, None], self.config.mask_token_id, self.config.pad_token_id)

    @torch.compiler.disable  # the number of evaluations, and the rows in each, depend on the states
    def solve(
        self,
        source: Source,
        canvas: Canvas,
        *,
        initial_state: Tensor | None = None,
        max_nfe: int | None = None,
        tol: float | None = None,
        solver: str | None = None,
        keep_trajectory: bool = False,
        observe: Observer | None = None,
        observe_features: Observer | None = None,
        record: Record | None = None,
    ) -> FixedPoint:
        """Solve z = f(z) for every row, with a graph if gradients are enabled.

        The result's `value` holds the features that tokens are read from, and its `function` is f.

        Args:
            initial_state: where the solver starts; zeros if not given, so that the first evaluation sees the canvas.
            max_nfe, tol, solver: override the configuration.
            keep_trajectory: keep every evaluation in the result.
            observe, observe_features: called after every evaluation with the rows that took part, their states or
                features, and their residuals; may return which of them stop.
            record: collects hidden states and attentions of the last evaluation.
        """
        function = self.bind(source, canvas)
        function.record = record
        initial = torch.zeros_like(function.context.injection) if initial_state is None else initial_state
        options = self.solver_options(max_nfe, tol, solver) | {"keep_trajectory": keep_trajectory}
        checkpointing = self.training and self.is_gradient_checkpointing
        gradient = self._gradient_options(checkpointing) if torch.is_grad_enabled() else GradientOptions()
        with cached_weights(self.transition, cache=not checkpointing):
            found = self.transition.solve(
                function,
                initial,
                mask=canvas.mask,
                gradient=gradient,
                observe=observe,
                observe_features=observe_features,
                **options,
            )
        function.record = None
        return replace(found, function=function)

    def bind(self, source: Source, canvas: Canvas) -> BoundTransition:
        """The transition as a function of the state alone; dropout masks are drawn here.

        `solve` calls it. Other code needs it only for losses at states that no solver visits (`objectives/states.py`).
        """
        raise NotImplementedError

    def solver_options(self, max_nfe: int | None, tol: float | None, solver: str | None) -> dict[str, Any]:
        """The given options, or else those of the configuration; impossible ones are refused."""
        config = self.config
        options = {
            "max_nfe": config.max_nfe if max_nfe is None else max_nfe,
            "solver": config.solver if solver is None else solver,
            "tol": config.tol if tol is None else tol,
            "memory": config.memory,
            "damping": config.damping,
            "check_interval": config.check_interval,
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

    def check_source(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, encoder_outputs: BaseModelOutput | None
    ) -> Tensor:
        """The mask of the source, (batch, source), after checking that no row is empty."""
        if input_ids is not None:
            shape = input_ids.shape
            attention_mask = input_ids != self.config.pad_token_id if attention_mask is None else attention_mask
        elif encoder_outputs is not None and attention_mask is not None:
            shape = encoder_outputs[0].shape[:2]
        else:
            raise ValueError("Give input_ids, or encoder_outputs together with the attention_mask they belong to.")
        if attention_mask.shape != shape:
            raise ValueError(f"The source is {tuple(shape)} but its mask is {tuple(attention_mask.shape)}.")
        return self._check_mask(attention_mask.bool(), "source")

    def check_labels(self, labels: Tensor) -> Tensor:
        """Which labels are not padding; −100 must follow the labels of a row, and no row may be empty."""
        return self._check_mask(labels >= 0, "labels")

    def check_canvas(self, canvas: Tensor, canvas_mask: Tensor | None) -> Tensor:
        """The mask of the canvas, (batch, canvas), after checking that no row is empty."""
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

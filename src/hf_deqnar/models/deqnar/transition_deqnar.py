"""Transition functions f(z) = F(z + u, x) or F(W·z + u, x), whose fixed points are translations.

A transition is a subclass of `Transition` and a line in `TRANSITIONS`. It defines what one evaluation computes
(`features`, `next_state`) and how its fixed point is found (`solve`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .configuration_deqnar import DeqNarConfig
from .ctc import likeliest
from .dag import passing
from .fixed_point import FixedPoint, Step, measure_residual
from .implicit_gradient import GradientOptions, equilibrium
from .layers_deqnar import DecoderLayer, Record, RecurrentStack
from .shortlist import Words

# (rows, state or features, residual) after an evaluation → which of the rows stop, or None
Observer = Callable[[Tensor, Tensor, Tensor | None], Tensor | None]


@dataclass
class Context:
    """All that f(z) depends on besides z and the weights; constant during a solve."""

    injection: Tensor  # (batch, canvas, d_model): u
    canvas_mask: Tensor | None  # (batch, 1, 1, canvas), additive
    keys_values: list[tuple[Tensor, Tensor]]  # cross-attention of every layer: (batch, heads, source, head_dim) each
    source_mask: Tensor | None  # (batch, 1, 1, source), additive
    source_lengths: Tensor | None  # (batch)
    dropout_masks: list[Tensor] | None  # of every layer: (batch, 3, canvas, d_model), scaled to keep the mean
    embedding: Tensor | None  # (vocabulary or words, d_model); None where an exported graph contains it
    scale: float  # factor of the input embeddings
    words: Words | None = None  # the tokens that may be predicted; None for the whole vocabulary
    links: nn.Module | None = None  # features and canvas mask → log E of a graph; None if there are no links

    def select(self, rows: Tensor) -> "Context":
        """The context of some rows, with the source cut to the longest of them."""
        source_lengths = self.source_lengths[rows]
        source = int(source_lengths.max())
        return replace(
            self,
            injection=self.injection[rows],
            canvas_mask=None if self.canvas_mask is None else self.canvas_mask[rows],
            keys_values=[(key[rows, :, :source], value[rows, :, :source]) for key, value in self.keys_values],
            source_mask=None if self.source_mask is None else self.source_mask[rows, :, :, :source],
            source_lengths=source_lengths,
            dropout_masks=None if self.dropout_masks is None else [mask[rows] for mask in self.dropout_masks],
            words=None if self.words is None else self.words.select(rows),
        )

    def trim(self, positions: int) -> "Context":
        """The context of the first positions of the canvas."""
        masks = self.dropout_masks
        return replace(
            self,
            injection=self.injection[:, :positions],
            canvas_mask=None if self.canvas_mask is None else self.canvas_mask[..., :positions],
            dropout_masks=None if masks is None else [mask[:, :, :positions] for mask in masks],
        )


class Feedback(nn.Linear):
    """W·z. W = 0 at first, so that an equilibrium model made from a stack starts as that stack."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config.d_model, config.d_model, bias=False)


class SelfConditioning(nn.Module):
    """V·E[emb | p], where p = softmax(emb·z) is what the state predicts; V = 0 at first.

    Under a factorised likelihood, iterating a deterministic map cannot learn dependencies between target tokens (MPLE
    paper, theorem 1). The state must carry a hypothesis, and training must show states that contain part of the truth;
    then an evaluation learns tokens given others. `expected` feeds back the expected embedding of the predicted token,
    `argmax` the embedding of the likeliest one. A position whose state is zero, the initial one, predicts nothing.

    In a graph, the encoded position in the path of every vertex, which is expected under the links, is added to its
    embedding.

    Reference: Huang et al. 2022 (DSLP), https://arxiv.org/abs/2110.07515; Nozaki and Komatsu 2021 (self-conditioned
    CTC), https://arxiv.org/abs/2104.02724.
    """

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__()
        self.embed, self.embed_prediction = EMBEDDED_PREDICTIONS[config.self_conditioning]
        count = layers if config.self_conditioning_layers == "all" else 1
        self.feedback = nn.ModuleList(Feedback(config) for _ in range(count))  # of the first layers

    def forward(self, state: Tensor, context: "Context") -> Tensor | None:
        """Embedded prediction of a state, (batch, canvas, d_model); None if no position predicts anything."""
        if state.is_cpu and not torch.compiler.is_compiling() and not state.any():
            return None  # the first evaluation
        predicts = (state != 0).any(dim=-1, keepdim=True)
        embedded = self.embed(state, context)
        if context.links is not None:
            mask = None if context.canvas_mask is None else context.canvas_mask[:, 0, 0] == 0
            _, places = passing(context.links(state, mask))
            embedded = embedded + encode_places(places, embedded)
        return embedded * predicts

    def add(self, hidden: Tensor, embedded: Tensor | None, layer: int) -> Tensor:
        """The input of a layer with the prediction fed back into it."""
        if embedded is None or layer >= len(self.feedback):
            return hidden
        return hidden + self.feedback[layer](embedded)


def encode_places(places: Tensor, like: Tensor) -> Tensor:
    """Sinusoidal encoding of real-valued positions: (batch, canvas) → (batch, canvas, d_model)."""
    width = like.shape[-1]
    steps = torch.arange(0, width, 2, device=places.device, dtype=places.dtype)
    angles = places[..., None] * (steps * (-math.log(10000.0) / width)).exp()
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(like.dtype)


def expected_embedding(features: Tensor, context: "Context") -> Tensor:
    """Σ_v p(v)·emb(v) of every position, scaled as inputs are: (batch, canvas, d_model)."""
    return predict(features, context).softmax(dim=-1) @ context.embedding * context.scale


def likeliest_embedding(features: Tensor, context: "Context") -> Tensor:
    """The embedding of the likeliest token of every position, scaled as inputs are: (batch, canvas, d_model)."""
    with torch.no_grad():
        logits = predict(features, context)
        tokens = likeliest(logits) if context.words is None else logits.argmax(dim=-1)  # a shortlist is short
    return functional.embedding(tokens, context.embedding) * context.scale


# How predictions are embedded: those of features, and those that a loss has computed already (not scaled).
EMBEDDED_PREDICTIONS: dict[str, tuple[Callable[[Tensor, "Context"], Tensor], Callable[[Any, Tensor], Tensor]]] = {
    "expected": (expected_embedding, lambda prediction, embedding: prediction.expected.to(embedding.dtype)),
    "argmax": (
        likeliest_embedding,
        lambda prediction, embedding: functional.embedding(prediction.scores.tokens, embedding),
    ),
}


class Transition(nn.Module):
    """f(z) = F(z + u, x) or F(W·z + u, x), with decoder layers F; self-conditioned F(W·z + V·E[emb | p(z)] + u, x)."""

    seeks_equilibrium = True
    state_is_features = True  # tokens are read from the state
    denoises_first = False  # training has a first stage of single evaluations (DEQNAR section 3.5)

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.feedback = Feedback(config) if config.feedback == "learned" else nn.Identity()
        self.self_conditioning = SelfConditioning(config, layers) if config.is_self_conditioned else None
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        # Without it the state of a pre-norm layer is a sum that grows with every evaluation.
        self.final_norm = nn.LayerNorm(config.d_model) if config.layer_norm == "pre" else nn.Identity()

    @property
    def predicts_tokens(self) -> bool:
        """Whether an evaluation predicts tokens, and needs the embedding matrix for that."""
        return self.self_conditioning is not None

    def features(
        self,
        state: Tensor,
        context: Context,
        record: Record | None = None,
        embedded: Tensor | None = None,
    ) -> Tensor:
        """F of state and injection, from which tokens are predicted: (batch, canvas, d_model).

        Args:
            embedded: what a self-conditioned transition feeds back instead of the prediction of the state, (batch,
                canvas, d_model); training replaces part of a prediction by the truth.
        """
        hidden = self.feedback(state) + context.injection
        if self.self_conditioning is not None and embedded is None:
            embedded = self.self_conditioning(state, context)
        weights = (None, None) if record is None else record.attention_weights
        for index, layer in enumerate(self.layers):
            if self.self_conditioning is not None:
                hidden = self.self_conditioning.add(hidden, embedded, index)
            if record is not None:
                record.hidden_states.append(hidden)
            dropout_mask = None if context.dropout_masks is None else context.dropout_masks[index]
            masks = (context.canvas_mask, context.source_mask)
            hidden = layer(hidden, *context.keys_values[index], *masks, dropout_mask, *weights)
        return self.final_norm(hidden)

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        """The state that follows from the features; here the features themselves."""
        return features

    def forward(self, state: Tensor, context: Context, record: Record | None = None) -> Tensor:
        """f(z)."""
        return self.next_state(self.features(state, context, record), context)

    def draw_dropout_masks(self, injection: Tensor) -> list[Tensor] | None:
        """The dropout masks of one solve; f has a fixed point only if they are the same in every evaluation."""
        if not self.training or self.dropout == 0:
            return None
        rows, canvas, width = injection.shape
        return [draw_dropout_mask(injection, (rows, 3, canvas, width), self.dropout) for _ in range(len(self.layers))]

    @staticmethod
    def solve(
        function: "BoundTransition",
        initial: Tensor,
        *,
        mask: Tensor,
        max_nfe: int,
        gradient: GradientOptions,
        observe: Observer | None,
        observe_features: Observer | None,
        **options: Any,
    ) -> FixedPoint:
        """Find z = f(z). The result's `value` holds the features at the fixed point, with graph if enabled.

        Args:
            observe: called with the state after every evaluation.
            observe_features: called with the features after every evaluation.
        """
        if observe is not None and observe_features is not None:
            raise ValueError("A solve has one observer: of states or of features.")
        observer = observe_features if observe is None else observe
        found = equilibrium(
            function, initial, gradient=gradient, mask=mask, max_nfe=max_nfe, observe=observer, **options
        )
        if function.record is not None and not torch.is_grad_enabled():
            function(found.state)  # rows that converged early had no part in the last evaluation
        return found


class ImplicitTransition(Transition):
    """f = F: the state is the output of the decoder layers."""


class StackedTransition(Transition):
    """An ordinary decoder, evaluated once."""

    seeks_equilibrium = False

    @staticmethod
    def solve(
        function: "BoundTransition",
        initial: Tensor,
        *,
        observe: Observer | None,
        observe_features: Observer | None,
        keep_trajectory: bool,
        **options: Any,
    ) -> FixedPoint:
        value = function(initial)
        rows = torch.arange(initial.shape[0], device=initial.device)
        for observer in (observe, observe_features):
            if observer is not None:
                observer(rows, value.detach(), None)
        trajectory = [Step(rows, value.detach(), None)] if keep_trajectory else None
        return FixedPoint(initial, value, None, torch.ones_like(rows), None, trajectory)


class ExplicitTransition(Transition):
    """f = E[emb] ∘ softmax ∘ F: the state is the expected embedding of the predicted token. DEQNAR equation 2.

    Tokens are read from features, not from the state, so the last evaluation of the budget computes features only.
    """

    state_is_features = False
    predicts_tokens = True
    denoises_first = True

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        return expected_embedding(features, context)

    @staticmethod
    def solve(
        function: "BoundTransition",
        initial: Tensor,
        *,
        mask: Tensor,
        max_nfe: int,
        gradient: GradientOptions,
        observe: Observer | None,
        observe_features: Observer | None,
        **options: Any,
    ) -> FixedPoint:
        rows = torch.arange(initial.shape[0], device=initial.device)
        if max_nfe == 1:
            features = function.features(initial)
            with torch.no_grad():
                state = function.next_state(features)
                residual = measure_residual(initial, state, mask)
            if observe is not None:
                observe(rows, state.detach(), residual)
            if observe_features is not None:
                observe_features(rows, features.detach(), residual)
            trajectory = [Step(rows, state.detach(), residual)] if options["keep_trajectory"] else None
            converged = residual < options["tol"]
            return FixedPoint(initial, features, residual, torch.ones_like(rows), converged, trajectory)
        recorded = _RecordedFeatures(function)

        def observer(rows: Tensor, state: Tensor, residual: Tensor | None) -> Tensor | None:
            stopped = None if observe is None else observe(rows, state, residual)
            if observe_features is not None:
                stopped = observe_features(rows, recorded.latest[0], residual)
            return stopped

        watched = observe is not None or observe_features is not None
        found = equilibrium(
            recorded,
            initial,
            gradient=gradient,
            mask=mask,
            max_nfe=max_nfe - 1,
            observe=observer if watched else None,
            **options,
        )
        features = function.features(found.value)
        if observe_features is not None:
            observe_features(rows, features.detach(), found.residual)
        return replace(found, value=features, nfe=found.nfe + 1)


class MixedTransition(Transition):
    """f = σ(F, emb ∘ argmax ∘ softmax ∘ F): features fused with the predicted token. DEQNAR section 3.3.

    The fusion σ is residual, so that tokens can be read from the state: σ(h, e) = h + MLP(h, e).
    """

    predicts_tokens = True

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__(config, layers)
        self.fusion = nn.Sequential(
            nn.Linear(2 * config.d_model, config.d_model),
            ACT2FN[config.activation_function],
            nn.Linear(config.d_model, config.d_model),
        )

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        embedded = likeliest_embedding(features, context)
        return features + self.fusion(torch.cat([features, embedded], dim=-1))


class RecurrentTransition(StackedTransition):
    """A bidirectional LSTM over the canvas, for `stacked` models; the source reaches it as a copy on the canvas."""

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__(config, 0)
        self.stack = RecurrentStack(config, layers)

    def features(
        self, state: Tensor, context: Context, record: Record | None = None, embedded: Tensor | None = None
    ) -> Tensor:
        features = self.stack(state + context.injection, context.canvas_mask, record)
        if record is not None:
            record.hidden_states.pop()  # the output is not one of the inputs of layers
        return features


TRANSITIONS: dict[str, type[Transition]] = {
    "stacked": StackedTransition,
    "implicit": ImplicitTransition,
    "explicit": ExplicitTransition,
    "mixed": MixedTransition,
}


def transition_class(config: DeqNarConfig) -> type[Transition]:
    """The transition of a model with this configuration."""
    return RecurrentTransition if config.is_recurrent else TRANSITIONS[config.refinement]


def predict(features: Tensor, context: Context) -> Tensor:
    """Logits through the tied embedding: (batch, canvas, vocabulary or words)."""
    logits = functional.linear(features, context.embedding)
    return logits if context.words is None else context.words.hide(logits)


def draw_dropout_mask(like: Tensor, shape: tuple[int, ...], dropout: float) -> Tensor:
    """0 with probability `dropout`, elsewhere the factor that keeps the mean.

    A CPU draws numbers one by one, so four elements share a draw and the probability is rounded to 16 bits.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - dropout).div_(1 - dropout)
    count, levels = math.prod(shape), 2**16
    valid = max(1, round((1 - dropout) * levels))
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return (draws[:count].view(shape) <= valid - 1 - levels // 2).to(like.dtype).mul_(levels / valid)


@dataclass
class BoundTransition:
    """f(z) for one batch: a function of the state alone, which `solve` can restrict to some rows or positions."""

    transition: Transition
    context: Context
    record: Record | None = None  # collects hidden states and attentions of the latest evaluation

    def __call__(self, state: Tensor) -> Tensor:
        if self.record is None:
            return self.transition(state, self.context)
        self.record.clear()
        return self.transition(state, self.context, self.record)

    def features(self, state: Tensor, embedded: Tensor | None = None) -> Tensor:
        """What tokens are read from after an evaluation at `state`; `embedded` as for `Transition.features`."""
        options = {} if embedded is None else {"embedded": embedded}
        if self.record is not None:
            self.record.clear()
            options["record"] = self.record
        return self.transition.features(state, self.context, **options)

    def next_state(self, features: Tensor) -> Tensor:
        """The state that follows from the features."""
        return self.transition.next_state(features, self.context)

    def select(self, rows: Tensor) -> "BoundTransition":
        """f of some rows."""
        return replace(self, context=self.context.select(rows), record=None)

    def trim(self, positions: int) -> "BoundTransition":
        """f of the first positions of the canvas."""
        return replace(self, context=self.context.trim(positions), record=None)


@dataclass
class _RecordedFeatures:
    """f of an explicit transition that remembers the features of its latest evaluation, for observers."""

    function: BoundTransition
    latest: list[Tensor] = field(default_factory=lambda: [torch.empty(0)])  # shared with all restrictions

    def __call__(self, state: Tensor) -> Tensor:
        features = self.function.features(state)
        self.latest[0] = features.detach()
        return self.function.next_state(features)

    def select(self, rows: Tensor) -> "_RecordedFeatures":
        return replace(self, function=self.function.select(rows))

    def trim(self, positions: int) -> "_RecordedFeatures":
        return replace(self, function=self.function.trim(positions))

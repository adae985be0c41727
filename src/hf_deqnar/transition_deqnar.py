"""Transition functions f(z) = F(z + u, x) or F(W·z + u, x): what is applied until the sentence stops changing."""

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from .alignment import likeliest
from .configuration_deqnar import DeqNarConfig
from .layers_deqnar import DecoderLayer, Record, RecurrentStack
from .shortlist_deqnar import Words


@dataclass
class Context:
    """All that f(z) depends on besides z and the weights; fixed for the length of a solve."""

    injection: Tensor  # rows, canvas, width: u
    canvas_mask: Tensor | None  # rows, 1, 1, canvas; additive
    memory: list[tuple[Tensor, Tensor]]  # keys and values of every layer: rows, heads, source, features
    memory_mask: Tensor | None  # rows, 1, 1, source; additive
    source_lengths: Tensor  # rows
    kept: list[Tensor] | None  # held dropout of every layer: rows, branch, canvas, width; scaled to keep the mean
    embedding: Tensor | None  # vocabulary, width; only the words if there are any; None where a graph holds it
    scale: float  # what a token's embedding is multiplied by on its way in
    words: Words | None = None  # all that may be predicted, if not every token may
    latest: dict[str, Tensor] = field(default_factory=dict)  # shared by all that is narrowed from here

    def select(self, rows: Tensor) -> "Context":
        """Only these rows, and only as much of the source as they need."""
        source_lengths = self.source_lengths[rows]
        source = int(source_lengths.max())
        return replace(
            self,
            injection=self.injection[rows],
            canvas_mask=None if self.canvas_mask is None else self.canvas_mask[rows],
            memory=[(key[rows, :, :source], value[rows, :, :source]) for key, value in self.memory],
            memory_mask=None if self.memory_mask is None else self.memory_mask[rows, :, :, :source],
            source_lengths=source_lengths,
            kept=None if self.kept is None else [kept[rows] for kept in self.kept],
            words=None if self.words is None else self.words.select(rows),
        )

    def trim(self, positions: int) -> "Context":
        """Only the first positions of the canvas."""
        return replace(
            self,
            injection=self.injection[:, :positions],
            canvas_mask=None if self.canvas_mask is None else self.canvas_mask[..., :positions],
            kept=None if self.kept is None else [kept[:, :, :positions] for kept in self.kept],
        )


class Feedback(nn.Linear):
    """W·z, what a layer sees of the state; nothing at first, so that a decoder begins as the stack that it was."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__(config.d_model, config.d_model, bias=False)


class Transition(nn.Module):
    """f(z) = F(z + u, x), or F(W·z + u, x). What follows the decoder layers F tells the kinds of refinement apart."""

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.feedback = Feedback(config) if config.feedback == "learned" else nn.Identity()
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(layers))
        # Without it the state of a pre-norm layer is a sum that grows with every evaluation.
        self.final_norm = nn.LayerNorm(config.d_model) if config.layer_norm == "pre" else nn.Identity()

    def features(self, state: Tensor, context: Context, record: Record | None = None) -> Tensor:
        """F of state and injection: rows × canvas × width."""
        hidden = self.feedback(state) + context.injection
        weights = (None, None) if record is None else (record.self_attentions, record.cross_attentions)
        for index, layer in enumerate(self.layers):
            if record is not None:
                record.hidden_states.append(hidden)
            kept = None if context.kept is None else context.kept[index]
            masks = (context.canvas_mask, context.memory_mask)
            hidden = layer(hidden, *context.memory[index], *masks, kept, *weights)
        hidden = self.final_norm(hidden)
        if record is not None:
            record.hidden_states.append(hidden)
        return hidden

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        """What becomes of the features: here, they are the state."""
        return features

    def forward(self, state: Tensor, context: Context) -> Tensor:
        """f(z)."""
        return self.next_state(self.features(state, context), context)

    def hold_dropout(self, injection: Tensor) -> list[Tensor] | None:
        """Draw the masks of one solve; f has a fixed point only if they stay the same in every evaluation."""
        if not self.training or self.dropout == 0:
            return None
        rows, canvas, width = injection.shape
        return [draw_kept(injection, (rows, 3, canvas, width), self.dropout) for _ in range(len(self.layers))]


class ImplicitTransition(Transition):
    """f = F: the state is what the decoder layers compute. Also the whole decoder of a `stacked` model."""


class ExplicitTransition(Transition):
    """f = E[emb] ∘ softmax ∘ F: the state is the expected embedding of the predicted token. DEQNAR equation 2.

    Tokens are read from F, which the state no longer shows: the latest features are kept for those who watch.
    """

    def features(self, state: Tensor, context: Context, record: Record | None = None) -> Tensor:
        features = super().features(state, context, record)
        if not torch.is_grad_enabled():
            context.latest["features"] = features
        return features

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        return predict(features, context).softmax(dim=-1) @ context.embedding * context.scale


class MixedTransition(Transition):
    """f = σ(F, emb ∘ argmax ∘ softmax ∘ F): features fused with the predicted token. DEQNAR section 3.3.

    The fusion σ is residual, so that the state stays readable as features: σ(h, e) = h + MLP(h, e).
    """

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__(config, layers)
        self.fusion = nn.Sequential(
            nn.Linear(2 * config.d_model, config.d_model),
            ACT2FN[config.activation_function],
            nn.Linear(config.d_model, config.d_model),
        )

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        with torch.no_grad():
            logits = predict(features, context)
            tokens = likeliest(logits) if context.words is None else logits.argmax(dim=-1)  # words are few
        embedded = functional.embedding(tokens, context.embedding) * context.scale
        return features + self.fusion(torch.cat([features, embedded], dim=-1))


class RecurrentTransition(Transition):
    """A bidirectional LSTM over the canvas, for `stacked` models: it sees the source as copied there."""

    def __init__(self, config: DeqNarConfig, layers: int) -> None:
        super().__init__(config, 0)
        self.stack = RecurrentStack(config, layers)

    def features(self, state: Tensor, context: Context, record: Record | None = None) -> Tensor:
        return self.stack(state + context.injection, context.canvas_mask, record)


TRANSITIONS: dict[str, type[Transition]] = {
    "stacked": ImplicitTransition,
    "implicit": ImplicitTransition,
    "explicit": ExplicitTransition,
    "mixed": MixedTransition,
}


def predict(features: Tensor, context: Context) -> Tensor:
    """Logits through the tied embedding: rows × canvas × vocabulary, or words."""
    logits = functional.linear(features, context.embedding)
    return logits if context.words is None else context.words.hide(logits)


def draw_kept(like: Tensor, shape: tuple[int, ...], dropout: float) -> Tensor:
    """A dropout mask: 0 with the given chance, else what keeps the mean.

    On a CPU numbers are drawn one by one, so four elements share a draw and the chance is rounded to 16 bits.
    """
    if like.device.type != "cpu":
        return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(1 - dropout).div_(1 - dropout)
    count, levels = math.prod(shape), 2**16
    kept = max(1, round((1 - dropout) * levels))
    draws = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    return (draws[:count].view(shape) <= kept - 1 - levels // 2).to(like.dtype).mul_(levels / kept)


@dataclass
class BoundTransition:
    """f(z) for one batch, in the form `solve` wants: a function of the state that can be narrowed."""

    transition: Transition
    context: Context

    def __call__(self, state: Tensor) -> Tensor:
        return self.transition(state, self.context)

    def select(self, rows: Tensor) -> "BoundTransition":
        return replace(self, context=self.context.select(rows))

    def trim(self, positions: int) -> "BoundTransition":
        return replace(self, context=self.context.trim(positions))

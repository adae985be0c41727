"""Losses at several states of a path, some of which contain part of the truth.

z_1 = f(0), and for every further segment z_{k+1} = f(z_k, e_k), where e_k is the embedded prediction of z_k in which
some wrong positions show the true token and some others a damaged one. The loss is taken at the end of every segment;
the state is detached between segments, or the gradient flows through all of them (`detach=False`).

Iterating a deterministic map under a factorised likelihood gains depth, but no dependency between target tokens (MPLE
paper, theorem 1). From states that contain part of the truth, an evaluation learns tokens given other tokens.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ..models.deqnar.losses_deqnar import OwnWords, StatePrediction, Targets
from ..models.deqnar.transition_deqnar import BoundTransition, encode_places

if TYPE_CHECKING:
    from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration


@dataclass(frozen=True)
class SupervisedStates:
    """Which states of the path are supervised, and what is shown in them.

    Learns: the target from the source (first segment) and from hypotheses that are partly right (further segments).
    Inputs: source and target.
    Requirements: a self-conditioned model; not with `gradient="ift"`, which needs a fixed point.
    Example: `hf-deqnar train --config refinement=implicit feedback=learned self_conditioning=expected length=ctc
        --objective ctc --state_weights 0.2 0.4 0.4 --truth_share 0.3`.
    Reference: Huang et al. 2022 (DSLP): a loss at every layer, 30 % of the predictions replaced by the truth;
        Jolicoeur-Martineau 2025 (TRM): full gradient through n evaluations, state detached and carried on.

    Attributes:
        weights: weight of the loss at the end of every segment; their number is the number of segments.
        segment_nfe: evaluations of a segment, with the full gradient through all of them.
        truth_share: least and largest share of the wrong positions that show the truth, drawn for every sentence.
        damage_share: share of all positions that are damaged: another token of the batch, a blank, or the prediction of
            the position before.
        detach: whether the state is detached between segments. Otherwise an evaluation also learns features that help
            the following ones, as a layer of a stack does, and all segments are kept in memory for the backward pass.
        random_segments: draw the number of segments from 1 to all; the last weight is that of the last one drawn.
    """

    weights: tuple[float, ...] = (0.2, 0.4, 0.4)
    segment_nfe: int = 1
    truth_share: tuple[float, float] = (0.3, 0.3)
    damage_share: float = 0.0
    detach: bool = True
    random_segments: bool = False

    def draw_weights(self, generator: torch.Generator | None) -> tuple[float, ...]:
        """The weights of the segments of one update; they add up to the same number whatever is drawn."""
        if not self.random_segments:
            return self.weights
        device = None if generator is None else generator.device
        count = int(torch.randint(1, len(self.weights) + 1, (), generator=generator, device=device))
        chosen = (*self.weights[: count - 1], self.weights[-1])
        return tuple(weight * sum(self.weights) / sum(chosen) for weight in chosen)


@dataclass
class StateLoss:
    """The loss at the end of a segment."""

    total: Tensor
    count: Tensor
    weight: float
    features: Tensor  # (batch, canvas, d_model), from which the loss was computed


def supervise_states(
    model: "DeqNarForConditionalGeneration",
    function: BoundTransition,
    targets: Targets,
    states: SupervisedStates,
    generator: torch.Generator | None = None,
) -> list[StateLoss]:
    """The losses of all segments of a path that starts at zero.

    Args:
        function: f of the batch.
        targets: what is to be predicted.
        states: which states are supervised.
        generator: of the random choices.
    """
    lengths, losses = model.length_model, []
    state = torch.zeros_like(function.context.injection)
    embedded: Tensor | None = None  # the first evaluation is told nothing
    weights = states.draw_weights(generator)
    for segment, weight in enumerate(weights):
        state = function.next_state(function.features(state, embedded))  # from which tokens are read
        for _ in range(states.segment_nfe - 1):
            state = function(state)
        total, count, prediction = lengths.loss_and_prediction(model, state, targets)
        if not total.isfinite():
            raise FloatingPointError(
                f"The loss at state {segment + 1} of {len(weights)}, after {(segment + 1) * states.segment_nfe} "
                "evaluations, is not finite."
            )
        losses.append(StateLoss(total, count, weight, state))
        if segment + 1 < len(weights):
            if states.detach:
                state = state.detach()
            embedded = proxy_prediction(model, prediction, targets, states, generator)
    return losses


@torch.no_grad()
def proxy_prediction(
    model: "DeqNarForConditionalGeneration",
    prediction: StatePrediction,
    targets: Targets,
    states: SupervisedStates,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The embedded prediction of a state with truth at some wrong positions and damage at some others.

    Returns:
        (batch, canvas, d_model), scaled as `SelfConditioning` does.
    """
    config, embedding, mask = model.config, model.model.shared.weight, targets.canvas_mask
    tokens, scale = prediction.scores.tokens, model.model.embedding_scale
    own = OwnWords.of(targets.labels, config.blank_token_id)
    aligned = model.length_model.align(prediction.scores, own.labels, mask.sum(dim=1), (targets.labels >= 0).sum(dim=1))
    truth = own.tokens(aligned.clamp_min(0))
    on_target = mask & (aligned >= 0)
    low, high = states.truth_share
    draws = torch.rand(3, *mask.shape, generator=generator, device=mask.device)
    share = low + (high - low) * torch.rand(len(mask), 1, generator=generator, device=mask.device)
    shown = (tokens != truth) & on_target & (draws[0] < share)
    replacement, replaced = truth, shown
    if states.damage_share:
        damaged = mask & ~shown & (draws[1] < states.damage_share)
        replacement = torch.where(damaged, damage(tokens, draws[2], mask, config.blank_token_id, generator), truth)
        replaced = shown | damaged
    embedded = model.model.transition.self_conditioning.embed_prediction(prediction, embedding)
    embedded = torch.where(replaced[:, :, None], functional.embedding(replacement, embedding), embedded) * scale
    return embedded if prediction.places is None else embedded + encode_places(prediction.places, embedded)


def damage(tokens: Tensor, draws: Tensor, mask: Tensor, blank: int, generator: torch.Generator | None = None) -> Tensor:
    """Wrong tokens for every position: another token of the batch, a blank, or the token before, each with 1/3.

    Args:
        tokens: predictions, (batch, canvas).
        draws: uniform random numbers, (batch, canvas).
    """
    pool = tokens[mask]
    picked = torch.randint(len(pool), tokens.shape, generator=generator, device=tokens.device)
    before = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
    return torch.where(draws < 1 / 3, pool[picked], torch.where(draws < 2 / 3, torch.full_like(tokens, blank), before))

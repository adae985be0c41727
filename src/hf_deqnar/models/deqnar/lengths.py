"""Length models: how long the canvas of a sentence is, which loss is trained on it and how text is read from it.

A length model is a small class. To add one, write a subclass of `LengthModel` and a line in `LENGTH_MODELS`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .configuration_deqnar import DeqNarConfig
from .constraints import ForcedSearch
from .ctc import ctc_of_log_probs, full_precision, needed_canvas, starts_of_runs, viterbi_path
from .losses_deqnar import (
    OwnWords,
    StatePrediction,
    Targets,
    TargetScores,
    cross_entropy_total,
    ctc_total,
    overlap_total,
    predict_state,
)


class LengthHead(nn.Module):
    """Classifies target length − source length from the mean of the encoder states."""

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        self.offsets = config.length_offsets
        self.classifier = nn.Linear(config.d_model, 2 * config.length_offsets)

    def forward(self, encoder_states: Tensor, source_mask: Tensor) -> Tensor:
        """Logits of the offsets, (batch, 2 · length_offsets)."""
        weights = source_mask.to(encoder_states.dtype)[:, :, None]
        return self.classifier((encoder_states * weights).sum(dim=1) / weights.sum(dim=1))

    def loss(self, logits: Tensor, source_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """Cross-entropy of the true offsets, averaged over the batch."""
        offset = (target_lengths - source_lengths).clamp(-self.offsets, self.offsets - 1)
        return functional.cross_entropy(full_precision(logits), offset + self.offsets)


class LengthModel:
    """What depends on how the length of a translation is found.

    `source` is a `Source` in all methods; labels are (batch, length) with −100 at padding.
    """

    likelihood: str  # the likelihood in the name of an objective that fits, such as ctc in 'ctc+glat'
    beam_option: str  # the generation option that sets the number of candidates of a sentence
    has_own_alignment: bool  # a target token has no fixed position until it is aligned with the predictions
    has_overlap_loss = False  # whether there is an `overlap_loss`
    has_sampled_loss = False  # whether `loss` can be normalised over `Targets.sampled`

    def __init__(self, config: DeqNarConfig) -> None:
        self.config = config

    def make_head(self) -> nn.Module | None:
        """The module that predicts lengths from encoder states; None if there is nothing to predict."""
        return None

    def canvas_lengths(self, source: Any, labels: Tensor | None = None) -> Tensor:
        """Positions of every canvas, (batch)."""
        raise NotImplementedError

    def canvas_width(self, labels: Tensor | None) -> int | None:
        """The width that canvases are padded to; None for that of the longest."""
        return None

    def candidate_lengths(self, source: Any, settings: Any) -> Tensor:
        """Lengths of all canvases that `generate` tries for a sentence, (batch, candidates)."""
        raise NotImplementedError

    def room_for(self, lengths: Tensor, needed: Tensor) -> Tensor:
        """Canvas lengths that have room for at least `needed` tokens, if the length model can choose them."""
        return lengths

    def forced_search(self, terms: list[list[int]], word_starts: Tensor | None) -> ForcedSearch:
        """The search for the most likely tokens of a canvas whose text contains terms (`forced_tokens`)."""
        raise ValueError(f"forced_tokens is not supported by config.length='{self.config.length}'; leave it out.")

    def fits(self, labels: Tensor, canvas_lengths: Tensor) -> Tensor:
        """Which targets can be written on their canvas, (batch)."""
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)

    def loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """−log P(target | canvas, source) summed over the batch, and the number of target tokens in the sum."""
        raise NotImplementedError

    def loss_and_prediction(
        self, model: Any, features: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor, StatePrediction]:
        """`loss`, and what the features predict, which the next evaluation of a self-conditioned model is told."""
        own = OwnWords.of(targets.labels, self.config.blank_token_id)
        prediction = predict_state(features, targets.canvas_mask, model.lm_head.weight, own.words)
        return *self.loss(model, features, targets), prediction

    def overlap_loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Σ (1 − expected n-gram overlap with the target), and the number of sentences in the sum."""
        raise NotImplementedError

    def length_loss(self, model: Any, source: Any, target_lengths: Tensor) -> Tensor | None:
        """Loss of the length head, averaged over the batch; None if there is none."""
        return None

    def sentence_losses(self, scores: TargetScores, own: OwnWords, canvas_mask: Tensor) -> Tensor:
        """−log P(target | source) of every row, without label smoothing; ∞ where the target does not fit."""
        raise NotImplementedError

    def align(self, scores: TargetScores, labels: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """The target position by position: own-word numbers, (batch, canvas)."""
        raise NotImplementedError

    def unaligned(self, labels: Tensor, canvas: Tensor) -> Tensor:
        """What could be revealed on a canvas before any alignment: token ids, (batch, canvas)."""
        raise NotImplementedError

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        """Which positions of a canvas are part of the text, (batch, canvas)."""
        raise NotImplementedError

    def check_options(self, settings: Any) -> None:
        """Refuse generation options that do not apply to this length model, naming those that do."""
        raise NotImplementedError


class PredictedLength(LengthModel):
    """The length is classified before decoding; one canvas position is one token of the translation."""

    likelihood = "ce"
    beam_option = "length_beams"
    has_own_alignment = False

    def make_head(self) -> LengthHead:
        return LengthHead(self.config)

    def canvas_lengths(self, source: Any, labels: Tensor | None = None) -> Tensor:
        if labels is not None:
            return (labels >= 0).sum(dim=1)
        return self.likeliest_lengths(source, 1)[:, 0].clamp_max(self.config.max_position_embeddings)

    def likeliest_lengths(self, source: Any, count: int) -> Tensor:
        """The `count` likeliest lengths of every sentence, at least 1 each, (batch, count)."""
        offsets = source.length_logits.topk(count, dim=-1).indices - self.config.length_offsets
        return (source.lengths[:, None] + offsets).clamp_min(1)

    def canvas_width(self, labels: Tensor | None) -> int | None:
        return None if labels is None else labels.shape[1]

    def candidate_lengths(self, source: Any, settings: Any) -> Tensor:
        longest = min(settings.max_length, self.config.max_position_embeddings)
        return self.likeliest_lengths(source, settings.length_beams).clamp_max(longest)

    def room_for(self, lengths: Tensor, needed: Tensor) -> Tensor:
        return torch.maximum(lengths, needed[:, None])

    def forced_search(self, terms: list[list[int]], word_starts: Tensor | None) -> ForcedSearch:
        return ForcedSearch(terms, self.config.blank_token_id, merge=False, word_starts=word_starts)

    def loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """−Σ log P(y_i | canvas, source) over tokens that were not revealed; (1 − ε) on the token, ε spread evenly."""
        if features.shape[:2] != targets.labels.shape:
            raise ValueError(
                f"The canvas is {tuple(features.shape[:2])} but the labels are {tuple(targets.labels.shape)}; "
                "a model with length='predict' needs one canvas position per label."
            )
        hidden = targets.labels >= 0
        if targets.revealed is not None:
            hidden = hidden & ~targets.revealed
        total = cross_entropy_total(
            features[hidden], model.lm_head.weight, targets.labels[hidden], targets.label_smoothing
        )
        return total, hidden.sum()

    def length_loss(self, model: Any, source: Any, target_lengths: Tensor) -> Tensor:
        return model.model.length_head.loss(source.length_logits, source.lengths, target_lengths)

    def sentence_losses(self, scores: TargetScores, own: OwnWords, canvas_mask: Tensor) -> Tensor:
        chosen = scores.log_probs.gather(2, own.labels.clamp_min(0)[:, :, None])[:, :, 0]
        return -(chosen * (own.labels >= 0)).sum(dim=1)

    def align(self, scores: TargetScores, labels: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return labels

    def unaligned(self, labels: Tensor, canvas: Tensor) -> Tensor:
        return labels.clamp_min(0)

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        # A blank is the empty token that a model trained with AXE predicts where it has no token.
        positions = mask & (tokens != self.config.blank_token_id)
        return positions & starts_of_runs(tokens, mask.sum(dim=1)) if merge_repetitions else positions

    def check_options(self, settings: Any) -> None:
        if settings.ctc_beam_size > 1:
            raise ValueError(
                f"ctc_beam_size={settings.ctc_beam_size} needs config.length='ctc', but this model predicts "
                "lengths; use length_beams instead."
            )
        if settings.length_beams > 2 * self.config.length_offsets:
            raise ValueError(
                f"length_beams={settings.length_beams}, but only {2 * self.config.length_offsets} lengths exist."
            )


class CtcLength(LengthModel):
    """A canvas of `ctc_upsampling` × source length; the text is its path without repetitions and blanks."""

    likelihood = "ctc"
    beam_option = "ctc_beam_size"
    has_own_alignment = True
    has_overlap_loss = True
    has_sampled_loss = True

    def canvas_lengths(self, source: Any, labels: Tensor | None = None) -> Tensor:
        return source.lengths * self.config.ctc_upsampling

    def candidate_lengths(self, source: Any, settings: Any) -> Tensor:
        return self.canvas_lengths(source)[:, None]

    def fits(self, labels: Tensor, canvas_lengths: Tensor) -> Tensor:
        return needed_canvas(labels, (labels >= 0).sum(dim=1)) <= canvas_lengths

    def forced_search(self, terms: list[list[int]], word_starts: Tensor | None) -> ForcedSearch:
        return ForcedSearch(terms, self.config.blank_token_id, merge=True, word_starts=word_starts)

    def loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """−log Σ_paths P(path | canvas, source); targets longer than their canvas are left out."""
        return self._ctc(model, features, targets, predict=False)[:2]

    def loss_and_prediction(
        self, model: Any, features: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor, StatePrediction]:
        total, count, prediction = self._ctc(model, features, targets, predict=True)
        assert prediction is not None
        return total, count, prediction

    def overlap_loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Σ (1 − expected bigram overlap), `bigram_overlap`, which makes texts as long as their targets."""
        blank, weight = self.config.blank_token_id, model.lm_head.weight
        return overlap_total(features, targets.canvas_mask, weight, targets.labels, blank)

    def _ctc(
        self, model: Any, features: Tensor, targets: Targets, *, predict: bool
    ) -> tuple[Tensor, Tensor, StatePrediction | None]:
        if targets.label_smoothing:
            raise ValueError(f"label_smoothing={targets.label_smoothing} has no meaning for CTC; set it to 0.")
        blank, weight = self.config.blank_token_id, model.lm_head.weight
        total, fits, prediction = ctc_total(
            features, targets.canvas_mask, weight, targets.labels, blank, predict, targets.sampled
        )
        return total, ((targets.labels >= 0).sum(dim=1) * fits).sum(), prediction

    def sentence_losses(self, scores: TargetScores, own: OwnWords, canvas_mask: Tensor) -> Tensor:
        lengths, canvas_lengths = (own.labels >= 0).sum(dim=1), canvas_mask.sum(dim=1)
        loss = ctc_of_log_probs(scores.log_probs, own.labels, canvas_lengths, lengths, 0)
        return torch.where(self.fits(own.labels, canvas_lengths), loss, float("inf"))

    def align(self, scores: TargetScores, labels: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        return viterbi_path(scores.log_probs, labels, canvas_lengths, target_lengths, 0)[0]

    def unaligned(self, labels: Tensor, canvas: Tensor) -> Tensor:
        return canvas

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        return mask & (tokens != self.config.blank_token_id) & starts_of_runs(tokens, mask.sum(dim=1))

    def check_options(self, settings: Any) -> None:
        for option in ("length_beams", "deduplicate"):
            if getattr(settings, option) > 1 or getattr(settings, option) is True:
                raise ValueError(
                    f"{option}={getattr(settings, option)} needs config.length='predict', but this is a CTC model: "
                    "its canvas has one length and repetitions are merged anyway; use ctc_beam_size instead."
                )


LENGTH_MODELS: dict[str, type[LengthModel]] = {"predict": PredictedLength, "ctc": CtcLength}

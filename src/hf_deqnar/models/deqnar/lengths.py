"""Length models: how long the canvas of a sentence is, which loss is trained on it and how text is read from it.

A length model is a small class. To add one, write a subclass of `LengthModel` and a line in `LENGTH_MODELS`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.utils import logging

from .configuration_deqnar import DeqNarConfig
from .constraints import ForcedSearch
from .ctc import (
    ctc_of_log_probs,
    full_precision,
    needed_canvas,
    starts_of_runs,
    viterbi_path,
)
from .ctc_beam_search import prefix_beam_search, prefix_beams_on_cpu
from .dag import (
    GatedLinks,
    best_alignment,
    dag_beam_of_sentence,
    dag_loss,
    gated_links,
    joint_viterbi,
    joint_viterbi_of_sentence,
    lookahead_path,
    passing,
)
from .generation_config_deqnar import Options
from .losses_deqnar import (
    OwnWords,
    StatePrediction,
    Targets,
    TargetScores,
    cross_entropy_total,
    ctc_total,
    dag_total,
    emitted_scores,
    fuzzy_total,
    overlap_total,
    predict_state,
    score_targets,
)

logger = logging.get_logger(__name__)

DEFAULTS = {option.name: option.default for option in fields(Options)}


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


class LinkHead(nn.Module):
    """Links of a graph, from the features of its vertices (Huang et al. 2022).

    With f_j = [h_j; p_j] of features and learned positions, every head c has A^c_ij = softmax over j > i of
    Q_c f_i · K_c f_j / √(d/C), and E_ij = Σ_c g_ic·A^c_ij with gates g_i = softmax(G f_i).
    """

    def __init__(self, config: DeqNarConfig) -> None:
        super().__init__()
        self.heads = config.dag_link_heads
        self.positions = nn.Embedding(config.max_position_embeddings, config.d_model)
        self.query_key = nn.Linear(2 * config.d_model, 2 * config.d_model)
        self.gate = nn.Linear(2 * config.d_model, config.dag_link_heads)

    def forward(self, features: Tensor, mask: Tensor | None, *, fused: bool = False) -> Tensor:
        """log E, (batch, vertices, vertices); −∞ where there is no link.

        Args:
            mask: (batch, vertices), which are not padding; None if all are vertices.
            fused: with the leaner gradient of `GatedLinks`, which cannot be differentiated again.
        """
        rows, vertices, width = features.shape
        places = self.positions.weight[:vertices].to(features.dtype).expand(rows, -1, -1)
        inputs = torch.cat([features, places], dim=-1)
        query, key = self.query_key(inputs).unflatten(-1, (2, self.heads, width // self.heads)).permute(2, 0, 3, 1, 4)
        logits = full_precision((query / math.sqrt(width // self.heads)) @ key.transpose(-1, -2))
        log_gates = full_precision(self.gate(inputs)).log_softmax(dim=-1).transpose(1, 2)
        return (GatedLinks.apply if fused else gated_links)(logits, log_gates, mask)


class LengthModel:
    """What depends on how the length of a translation is found.

    `source` is a `Source` in all methods; labels are (batch, length) with −100 at padding.
    """

    likelihood: str  # the likelihood in the name of an objective that fits, such as ctc in 'ctc+glat'
    beam_option: str  # the generation option that sets the number of candidates of a sentence
    search_option: str | None = None  # the same, if the candidates are the texts of a beam search
    has_own_alignment: bool  # a target token has no fixed position until it is aligned with the predictions
    has_overlap_loss = False  # whether there is an `overlap_loss`
    has_sampled_loss = False  # whether `loss` can be normalised over `Targets.sampled`
    reads_once: bool = False  # a canvas is solved and read once: neither passes nor sampled inputs
    same_dropout: bool = False  # the prediction that selects revealed tokens has the dropout of the one that is trained
    glancing: dict[str, Any] = {}  # options of the glancing input, where they differ from its defaults
    rule: str = ""  # name of the rule of `needed_positions`; CTC has none, as in data sets of earlier versions

    def __init__(self, config: DeqNarConfig) -> None:
        self.config = config

    def make_head(self) -> nn.Module | None:
        """The module that predicts lengths from encoder states; None if there is nothing to predict."""
        return None

    def make_links(self) -> nn.Module | None:
        """The module that predicts links between canvas positions; None if there are none."""
        return None

    def log_links(self, core: Any, features: Tensor, mask: Tensor) -> Tensor | None:
        """log E of the links between canvas positions; None if there are none."""
        return None

    def needed_positions(self, labels: Sequence[int]) -> int:
        """The shortest canvas that a target fits on."""
        return len(labels)

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

    def score_targets(self, model: Any, features: Tensor, mask: Tensor, words: Tensor) -> TargetScores:
        """What an alignment needs of a prediction, without a graph."""
        return score_targets(features, mask, model.lm_head.weight, words)

    def excluded(self, labels: Tensor, canvas_lengths: Tensor) -> Tensor | None:
        """Number of rows that are excluded from the loss, for the log; None if it is not logged."""
        return None

    def length_loss(self, model: Any, source: Any, target_lengths: Tensor) -> Tensor | None:
        """Loss of the length head, averaged over the batch; None if there is none."""
        return None

    def sentence_losses(self, scores: TargetScores, own: OwnWords, canvas_mask: Tensor) -> Tensor:
        """−log P(target | source) of every row, without label smoothing; ∞ where the target does not fit."""
        raise NotImplementedError

    def align(self, scores: TargetScores, labels: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        """The target position by position: own-word numbers, (batch, canvas); −100 where nothing of it stands."""
        raise NotImplementedError

    def unaligned(self, labels: Tensor, canvas: Tensor) -> Tensor:
        """What could be revealed on a canvas before any alignment: token ids, (batch, canvas)."""
        raise NotImplementedError

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        """Which positions of a canvas are part of the text, (batch, canvas)."""
        raise NotImplementedError

    def needs_scores(self, settings: Any) -> bool:
        """Whether `select_path` needs the log-probabilities of the likeliest tokens."""
        return False

    def select_path(
        self, tokens: Tensor, scores: Tensor | None, log_links: Tensor | None, mask: Tensor, settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The likeliest tokens with blanks where the text does not pass, and the log-probability of each of them.

        Args:
            tokens, scores: of all positions, (batch, canvas).
            log_links: of `log_links`.
        """
        return tokens, scores

    def scored_positions(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Over which positions the score of a text is averaged, (batch, canvas)."""
        return mask

    def search_beams(
        self, log_probs: Tensor, log_links: Tensor | None, lengths: Tensor, settings: Any, fluency: Any, least: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The texts of every row's beam (rows × beam × longest), their lengths, ranking and log-probability.

        Args:
            fluency: terms of n-grams, or None.
            least: minimum probability of tokens that extend a prefix.
        """
        raise NotImplementedError

    def sentence_outputs(self, settings: Any) -> list[str] | None:
        """Outputs of the sentence graph of an export that `sentence_text` takes; None if it does not support these
        settings.
        """
        return None

    def sentence_text(self, outputs: dict[str, numpy.ndarray], settings: Any) -> list[int]:
        """The text of one sentence, in numpy: for a single sentence operations of torch take longer than the text."""
        raise NotImplementedError

    def check_options(self, settings: Any) -> None:
        """Refuse generation options that do not apply to this length model, naming those that do."""
        raise NotImplementedError

    def refuse(self, settings: Any, options: Sequence[str], reason: str) -> None:
        """Raise ValueError if one of the options has another value than its default."""
        for option in options:
            if getattr(settings, option) != DEFAULTS[option]:
                raise ValueError(f"{option}={getattr(settings, option)} {reason}")


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
        self.refuse(
            settings,
            DAG_OPTIONS,
            "needs config.length='dag', but this model predicts lengths; use length_beams instead.",
        )
        if settings.length_beams > 2 * self.config.length_offsets:
            raise ValueError(
                f"length_beams={settings.length_beams}, but only {2 * self.config.length_offsets} lengths exist."
            )


class UpsampledLength(LengthModel):
    """A canvas of a multiple of the source length."""

    has_own_alignment = True

    def canvas_lengths(self, source: Any, labels: Tensor | None = None) -> Tensor:
        return source.lengths * self.config.upsampling

    def candidate_lengths(self, source: Any, settings: Any) -> Tensor:
        return self.canvas_lengths(source)[:, None]

    def unaligned(self, labels: Tensor, canvas: Tensor) -> Tensor:
        return canvas


class CtcLength(UpsampledLength):
    """A canvas of `ctc_upsampling` × source length; the text is its path without repetitions and blanks."""

    likelihood = "ctc"
    beam_option = search_option = "ctc_beam_size"
    has_overlap_loss = True
    has_sampled_loss = True

    def needed_positions(self, labels: Sequence[int]) -> int:
        """One per token, and a blank between equal tokens.

        >>> CtcLength(DeqNarConfig(length="ctc")).needed_positions([7, 7, 8])
        4
        """
        return len(labels) + sum(first == second for first, second in itertools.pairwise(labels))

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

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        return mask & (tokens != self.config.blank_token_id) & starts_of_runs(tokens, mask.sum(dim=1))

    def sentence_outputs(self, settings: Any) -> list[str]:
        return ["tokens"]

    def sentence_text(self, outputs: dict[str, numpy.ndarray], settings: Any) -> list[int]:
        path = outputs["tokens"]  # as ctc.collapse, which is slower for one sentence
        selected = path != self.config.blank_token_id
        selected[1:] &= path[1:] != path[:-1]
        return path[selected][: settings.max_length].tolist()

    def search_beams(
        self, log_probs: Tensor, log_links: Tensor | None, lengths: Tensor, settings: Any, fluency: Any, least: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        padding = self.config.pad_token_id
        assert padding is not None  # checked by the configuration
        inputs = (log_probs, lengths, self.config.blank_token_id, settings.ctc_beam_size, padding)
        if log_probs.device.type == "cpu":
            tokens, counts, ranking = prefix_beams_on_cpu(*inputs, fluency, least)
        else:
            tokens, counts, ranking = prefix_beam_search(*inputs, added=fluency, least_chance=least)
        found = ranking if fluency is None else ranking - fluency.of_text(tokens, counts)
        # Without n-grams texts are ranked per token, because sums favour short ones; token_bonus corrects for it.
        ranking = found / counts.clamp_min(1) if fluency is None else ranking + fluency.of_end(tokens, counts)
        return tokens, counts, ranking, found

    def check_options(self, settings: Any) -> None:
        for option in ("length_beams", "deduplicate"):
            if getattr(settings, option) > 1 or getattr(settings, option) is True:
                raise ValueError(
                    f"{option}={getattr(settings, option)} needs config.length='predict', but this is a CTC model: "
                    "its canvas has one length and repetitions are merged anyway; use ctc_beam_size instead."
                )
        self.refuse(
            settings, DAG_OPTIONS, "needs config.length='dag', but this is a CTC model; use ctc_beam_size instead."
        )


DAG_OPTIONS = ("dag_search", "dag_beta", "dag_length_penalty", "dag_beam_size")

# How a path is chosen: log E, scores of the likeliest tokens, lengths and settings → which vertices are passed.
DAG_SEARCHES: dict[str, Callable[[Tensor, Any, Tensor, Any], Tensor]] = {
    "greedy": lambda log_links, scores, lengths, settings: lookahead_path(log_links, None, lengths, 0.0),
    "lookahead": lambda log_links, scores, lengths, settings: lookahead_path(
        log_links, scores, lengths, settings.dag_beta
    ),
    "viterbi": lambda log_links, scores, lengths, settings: joint_viterbi(
        log_links, scores, lengths, settings.dag_length_penalty, settings.max_length
    )[0],
}


class DagLength(UpsampledLength):
    """A graph of `dag_upsampling` × source length vertices; the text is what is written on a path through it.

    The first vertex writes nothing, so that the first token can stand on different vertices. The last one ends the
    path.

    Reference: Huang et al. 2022 (DA-Transformer), https://arxiv.org/abs/2205.07459.
    """

    likelihood = "dag"
    beam_option = search_option = "dag_beam_size"
    reads_once = same_dropout = True
    has_overlap_loss = True
    glancing = {"start": 0.5, "end": 0.1, "rounded": True}
    rule = "dag "

    def make_links(self) -> LinkHead:
        return LinkHead(self.config)

    def log_links(self, core: Any, features: Tensor, mask: Tensor) -> Tensor:
        return core.link_head(features, mask)

    def needed_positions(self, labels: Sequence[int]) -> int:
        """One per token, and the first vertex, which writes nothing."""
        return len(labels) + 1

    def fits(self, labels: Tensor, canvas_lengths: Tensor) -> Tensor:
        return (labels >= 0).sum(dim=1) + 1 <= canvas_lengths

    def excluded(self, labels: Tensor, canvas_lengths: Tensor) -> Tensor:
        fits = self.fits(labels, canvas_lengths)
        if not fits.all():
            logger.warning_once("Some targets are longer than their graph; they are excluded from the loss.")
        return (~fits).sum()

    def loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """−log Σ_paths P(path, target | canvas, source); targets longer than their graph are left out."""
        if targets.label_smoothing:
            raise ValueError(f"label_smoothing={targets.label_smoothing} has no meaning for graphs; set it to 0.")
        log_links = model.model.link_head(features, targets.canvas_mask, fused=True)
        fits = self.fits(targets.labels, targets.canvas_mask.sum(dim=1))
        count = ((targets.labels >= 0).sum(dim=1) * fits).sum()
        return dag_total(features, log_links, model.lm_head.weight, targets, fits)[0], count

    def overlap_loss(self, model: Any, features: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
        """Σ (1 − BP·p₂), `fuzzy_overlap`; targets without a path are left out, as in the likelihood."""
        fits = self.fits(targets.labels, targets.canvas_mask.sum(dim=1))
        if not fits.any():
            return features.sum() * 0.0, fits.sum()
        targets = targets.select(fits)
        log_links = model.model.link_head(features[fits], targets.canvas_mask, fused=True)
        own = OwnWords.of(targets.labels, self.config.blank_token_id)
        return fuzzy_total(features[fits], log_links, model.lm_head.weight, targets, own), fits.sum()

    def loss_and_prediction(
        self, model: Any, features: Tensor, targets: Targets
    ) -> tuple[Tensor, Tensor, StatePrediction]:
        with torch.no_grad():
            own = OwnWords.of(targets.labels, self.config.blank_token_id)
            prediction = predict_state(features, targets.canvas_mask, model.lm_head.weight, own.words)
            prediction.scores.log_links = model.model.link_head(features, targets.canvas_mask)
            prediction.places = passing(prediction.scores.log_links)[1]
        return *self.loss(model, features, targets), prediction

    @torch.no_grad()
    def score_targets(self, model: Any, features: Tensor, mask: Tensor, words: Tensor) -> TargetScores:
        scores = super().score_targets(model, features, mask, words)
        scores.log_links = model.model.link_head(features, mask)
        return scores

    def sentence_losses(self, scores: TargetScores, own: OwnWords, canvas_mask: Tensor) -> Tensor:
        lengths, emitted = canvas_mask.sum(dim=1), emitted_scores(scores.log_probs, own.labels)
        assert scores.log_links is not None  # of `score_targets`
        loss, fits = dag_loss(emitted, scores.log_links, lengths, (own.labels >= 0).sum(dim=1) + 1)
        return torch.where(fits, loss, float("inf"))

    def align(self, scores: TargetScores, labels: Tensor, canvas_lengths: Tensor, target_lengths: Tensor) -> Tensor:
        assert scores.log_links is not None  # of `score_targets`
        emitted = emitted_scores(scores.log_probs, labels)
        token, _ = best_alignment(emitted, scores.log_links, canvas_lengths, target_lengths + 1)
        return labels.gather(1, (token - 1).clamp_min(0)).masked_fill(token < 1, -100)

    def needs_scores(self, settings: Any) -> bool:
        return settings.dag_search != "greedy"

    def select_path(
        self, tokens: Tensor, scores: Tensor | None, log_links: Tensor | None, mask: Tensor, settings: Any
    ) -> tuple[Tensor, Tensor | None]:
        assert log_links is not None
        passed = DAG_SEARCHES[settings.dag_search](log_links, scores, mask.sum(dim=1), settings)
        writes = passed.clone()
        writes[:, 0] = False
        path = torch.where(writes | ~mask, tokens, self.config.blank_token_id)
        if scores is None:
            return path, None
        # the vertex before each one on the path
        vertices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        latest = torch.where(passed, vertices, 0).cummax(dim=1).values
        before = functional.pad(latest, (1, 0))[:, :-1]
        link = log_links.gather(1, before[:, None])[:, 0]
        return path, torch.where(writes, scores + link, 0.0)

    def scored_positions(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return mask & (tokens != self.config.blank_token_id)

    def text_positions(self, tokens: Tensor, mask: Tensor, *, merge_repetitions: bool) -> Tensor:
        """Where tokens stand that are no blanks; of equal neighbours in the text only the first with the option."""
        written = mask & (tokens != self.config.blank_token_id)
        if not merge_repetitions:
            return written
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        latest = torch.where(written, places, -1).cummax(dim=1).values
        before = functional.pad(latest, (1, 0), value=-1)[:, :-1]
        same = (tokens.gather(1, before.clamp_min(0)) == tokens) & (before >= 0)
        return written & ~same

    def sentence_outputs(self, settings: Any) -> list[str] | None:
        if settings.dag_beam_size > 1:
            return None
        return ["tokens", "log_links", "scores"] if self.needs_scores(settings) else ["tokens", "log_links"]

    def sentence_text(self, outputs: dict[str, numpy.ndarray], settings: Any) -> list[int]:
        log_links, tokens = outputs["log_links"], outputs["tokens"].tolist()
        if settings.dag_search == "viterbi":
            vertices, _ = joint_viterbi_of_sentence(
                log_links, outputs["scores"], settings.dag_length_penalty, settings.max_length
            )
            text = [tokens[vertex] for vertex in vertices[1:]]
        else:
            if settings.dag_search == "lookahead":
                log_links = log_links + numpy.float32(settings.dag_beta) * outputs["scores"]
            following, vertex, text = log_links.argmax(axis=1).tolist(), 0, []
            while vertex < len(tokens) - 1:
                vertex = following[vertex]
                text.append(tokens[vertex])
        if settings.deduplicate:
            text = [token for token, _ in itertools.groupby(text)]
        return text[: settings.max_length]

    def search_beams(
        self, log_probs: Tensor, log_links: Tensor | None, lengths: Tensor, settings: Any, fluency: Any, least: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert log_links is not None
        added = of_end = None
        if fluency is not None:
            added, term_of_end = fluency.one_by_one()
            of_end = end_of(term_of_end, fluency.end)
        beam, rows = settings.dag_beam_size, []
        for scores, links, length in zip(
            full_precision(log_probs).cpu().numpy(), log_links.cpu().numpy(), lengths.tolist(), strict=True
        ):
            texts = dag_beam_of_sentence(
                scores[:length],
                links[:length, :length],
                beam,
                settings.dag_length_penalty if fluency is None else 0.0,
                longest=settings.max_length,
                added=added,
                of_end=of_end,
                most_added=settings.token_bonus,
                least_chance=least,
            )
            rows.append([*texts, *[((), float("-inf"), float("-inf"))] * (beam - len(texts))])
        longest = max(1, max(len(text) for row in rows for text, _, _ in row))
        padding = self.config.pad_token_id
        tokens = [[[*text, *[padding] * (longest - len(text))] for text, _, _ in row] for row in rows]
        figures = torch.tensor([[one[1:] for one in row] for row in rows], device=log_probs.device)
        counts = torch.tensor([[len(text) for text, _, _ in row] for row in rows], device=log_probs.device)
        return torch.tensor(tokens, device=log_probs.device), counts, figures[..., 0], figures[..., 1]

    def check_options(self, settings: Any) -> None:
        self.refuse(
            settings, ["length_beams", "ctc_beam_size"], "does not apply to a graph (length='dag'); use dag_beam_size."
        )
        self.refuse(
            settings,
            ["refinement_passes", "input_sampling"],
            "does not apply to a graph (length='dag'), which is read once; leave it out.",
        )
        searched = settings.dag_beam_size > 1
        if searched:
            self.refuse(settings, ["dag_search", "dag_beta"], "has no effect with dag_beam_size above 1; leave it out.")
            self.refuse(settings, ["deduplicate"], "does not apply to the beam search of a graph; set dag_beam_size=1.")
        if settings.dag_search != "lookahead":
            self.refuse(settings, ["dag_beta"], "needs dag_search='lookahead'; leave one of them out.")
        if not searched and settings.dag_search != "viterbi":
            self.refuse(
                settings,
                ["dag_length_penalty"],
                "needs dag_search='viterbi' or dag_beam_size above 1; set one of them.",
            )
        if settings.ngram_weight:
            self.refuse(
                settings, ["dag_length_penalty"], "has no effect with n-grams; token_bonus controls the length."
            )


def end_of(of_end: Callable[[tuple[int, ...]], float], end: int) -> Callable[[tuple[int, ...]], float]:
    """The term of the end of a text; none if its last token is the end, whose term it has already."""

    def term(text: tuple[int, ...]) -> float:
        return 0.0 if text and text[-1] == end else of_end(text)

    return term


LENGTH_MODELS: dict[str, type[LengthModel]] = {"predict": PredictedLength, "ctc": CtcLength, "dag": DagLength}

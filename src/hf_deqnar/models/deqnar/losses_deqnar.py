"""Losses computed from features, without keeping the logits of the whole vocabulary.

The projection to the vocabulary takes most of a small model's training time. A likelihood needs, of all the logits of a
position, their normaliser and those of the sentence's own words. Logits are therefore computed in chunks, for unpadded
positions only, and the gradients are computed while a chunk is in memory.

CTC, graphs, Viterbi alignment, AXE and OaXE work on a vocabulary of the sentence's own words: number 0 is the blank,
and number i + 1 is word i of the target, or an earlier word that equals it.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from .ctc import bigram_overlap, ctc_of_log_probs, full_precision, likeliest, needed_canvas
from .dag import fuzzy_overlap, path_sum

CHUNK = 2**20  # logits made at a time; measured on two cores, where 2^18 to 2^22 differ little
# A graph has several times the positions of a CTC canvas, and its sum over paths is faster for several rows at once.
GRAPH_CHUNKS = 4  # in units of CHUNK


@dataclass
class OwnWords:
    """The vocabulary of every row's own words, and the row's labels in it."""

    words: Tensor  # rows, 1 + length: token ids, the blank first
    labels: Tensor  # rows, length: places in `words`; −100 at padding

    @classmethod
    def of(cls, labels: Tensor, blank: int) -> "OwnWords":
        """Equal words have one place, that of the first: CTC must see that they are equal.

        >>> OwnWords.of(torch.tensor([[7, 8, 7, -100]]), blank=5).labels
        tensor([[   1,    2,    1, -100]])
        """
        words = labels.clamp_min(0)
        first = (words[:, :, None] == words[:, None, :]).int().argmax(dim=2)
        blanks = torch.full_like(words[:, :1], blank)
        return cls(torch.cat([blanks, words], dim=1), (first + 1).masked_fill(labels < 0, -100))

    def tokens(self, places: Tensor) -> Tensor:
        """Token ids of places in the vocabulary; −100 stays."""
        return self.words.gather(1, places.clamp_min(0)).masked_fill(places < 0, -100)


@dataclass
class TargetScores:
    """A model's prediction at every position of a canvas, as far as a target needs it; 0 at padding."""

    tokens: Tensor  # (batch, canvas): the likeliest token
    log_probs: Tensor  # (batch, canvas, 1 + length): of the row's own words
    log_links: Tensor | None = None  # (batch, canvas, canvas): of a graph


@dataclass
class StatePrediction:
    """What the features of an evaluation predict, without a graph; 0 at padding."""

    scores: TargetScores
    expected: Tensor  # (batch, canvas, d_model): Σ_v p(v)·emb(v), not scaled
    places: Tensor | None = None  # (batch, canvas): expected position in the path, of a graph


@dataclass
class SampledWords:
    """The words over which the loss of a batch is normalised: its own ones and a sample of all others.

    Z = Σ_own exp(l_v) + (others / sample)·Σ_sample exp(l_v) is an unbiased estimate of the sum over the vocabulary
    (Jean et al. 2015) and takes a fraction of its time.
    """

    tokens: Tensor  # (words): token ids
    offsets: Tensor  # (words): log of the number of words that each stands for; 0 for own words
    places: Tensor  # (vocabulary): place in `tokens`; −1 for words that are left out

    @classmethod
    def draw(
        cls, labels: Tensor, vocabulary: int, blank: int, count: int, generator: torch.Generator | None = None
    ) -> "SampledWords":
        """The words of `labels`, the blank, and `count` others, each with the same probability."""
        own = torch.zeros(vocabulary, dtype=torch.bool, device=labels.device)
        own[labels[labels >= 0]] = True
        own[blank] = True
        others = int((~own).sum())
        count = min(count, others)
        draws = torch.rand(vocabulary, generator=generator, device=labels.device).masked_fill(own, 2.0)
        sample = draws.topk(count, largest=False).indices
        tokens = torch.cat([own.nonzero()[:, 0], sample])
        offsets = torch.zeros(len(tokens), device=labels.device)
        offsets[len(tokens) - count :] = math.log(others / count) if count else 0.0
        places = torch.full_like(own, -1, dtype=torch.long)
        places[tokens] = torch.arange(len(tokens), device=labels.device)
        return cls(tokens, offsets, places)


@dataclass
class Targets:
    """What is to be predicted on a canvas."""

    labels: Tensor  # (batch, length); −100 at padding
    canvas_mask: Tensor  # (batch, canvas)
    revealed: Tensor | None = None  # (batch, canvas): positions where the canvas shows the token
    label_smoothing: float = 0.0
    shown: Tensor | None = None  # (batch, canvas): the tokens that stand on the canvas
    sampled: SampledWords | None = None  # words over which a CTC loss is normalised; None for the whole vocabulary

    def select(self, rows: Tensor) -> "Targets":
        """The targets of some rows."""
        return replace(
            self,
            labels=self.labels[rows],
            canvas_mask=self.canvas_mask[rows],
            revealed=None if self.revealed is None else self.revealed[rows],
            shown=None if self.shown is None else self.shown[rows],
        )


@torch.no_grad()
def score_targets(features: Tensor, mask: Tensor, weight: Tensor, words: Tensor) -> TargetScores:
    """Project features (batch, canvas, d_model) to the vocabulary; keep the likeliest token and the row's own words."""
    row = mask.nonzero()[:, 0]
    packed = features[mask]
    tokens = torch.zeros(mask.shape, dtype=torch.long, device=mask.device)
    shape = (*mask.shape, words.shape[1])
    own = torch.zeros(shape, dtype=torch.promote_types(features.dtype, torch.float32), device=mask.device)
    best, own_log_probs = [], []
    for part in _chunks(len(packed), weight.shape[0]):
        logits = _logits(packed[part], weight)
        best.append(likeliest(logits))
        own_log_probs.append(logits.gather(1, words[row[part]]) - logits.logsumexp(dim=-1, keepdim=True))
    tokens[mask], own[mask] = torch.cat(best), torch.cat(own_log_probs)
    return TargetScores(tokens, own)


@torch.no_grad()
def predict_state(features: Tensor, mask: Tensor, weight: Tensor, words: Tensor) -> StatePrediction:
    """Project features (batch, canvas, d_model) to the vocabulary and back: `score_targets` and expected embeddings."""
    expected = torch.zeros(features.shape, dtype=torch.promote_types(features.dtype, torch.float32))
    expected = expected.to(features.device)
    packed = features[mask]
    parts = [
        _product(_logits(packed[part], weight).softmax(dim=-1), weight)
        for part in _chunks(len(packed), weight.shape[0])
    ]
    expected[mask] = torch.cat(parts)
    return StatePrediction(score_targets(features, mask, weight, words), expected)


def cross_entropy_total(features: Tensor, weight: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """−Σ_i log p(t_i), with p = softmax(features · weightᵀ) and (1 − ε) on the token, ε spread over all.

    Args:
        features: positions × width, only those that count.
        targets: positions.
    """
    return _CrossEntropy.apply(features, weight, targets, smoothing)


def ctc_total(
    features: Tensor,
    mask: Tensor,
    weight: Tensor,
    labels: Tensor,
    blank: int,
    predict: bool = False,
    sampled: SampledWords | None = None,
) -> tuple[Tensor, Tensor, "StatePrediction | None"]:
    """The CTC loss summed over rows, which rows fit on their canvas (the others have no part in it), and predictions.

    Args:
        features: rows × canvas × width.
        labels: rows × length, −100 at padding.
        predict: whether to return the prediction of every position, which costs little beside the loss.
        sampled: words over which probabilities are normalised and predictions are made; the whole vocabulary if None.
    """
    fits = needed_canvas(labels, (labels >= 0).sum(dim=1)) <= mask.sum(dim=1)
    offsets = None
    if sampled is not None:  # from here on, words are places in the sample
        weight, offsets = weight[sampled.tokens], sampled.offsets
        labels = torch.where(labels >= 0, sampled.places[labels.clamp_min(0)], labels)
        blank = int(sampled.places[blank])
    found = _Connectionist.apply(features, weight, mask, labels, blank, fits, predict, offsets)
    if not predict:
        return found[0], fits, None
    total, tokens, log_probs, expected = found
    tokens = tokens if sampled is None else sampled.tokens[tokens]
    return total, fits, StatePrediction(TargetScores(tokens, log_probs), expected)


def overlap_total(features: Tensor, mask: Tensor, weight: Tensor, labels: Tensor, blank: int) -> tuple[Tensor, Tensor]:
    """Σ (1 − bigram overlap) over the rows with at least two target tokens, and their number; see `bigram_overlap`.

    Args:
        features: rows × canvas × width.
        labels: rows × length, −100 at padding.
    """
    counted = (labels >= 0).sum(dim=1) > 1
    own = OwnWords.of(labels, blank)

    def of_rows(features: Tensor, weight: Tensor, rows: slice) -> Tensor:
        probs = _logits(features, weight).softmax(dim=-1)
        overlap = bigram_overlap(probs, mask[rows], own.words[rows], own.labels[rows], blank)
        return ((1 - overlap) * counted[rows]).sum()

    # The logits of a chunk are computed once more in the backward pass instead of being kept.
    parts = [
        checkpoint(of_rows, features[rows], weight, rows, use_reentrant=False)
        for rows in _chunks(len(features), mask.shape[1] * weight.shape[0])
    ]
    return torch.stack(parts).sum(), counted.sum()


def emitted_scores(
    scores: Tensor, labels: Tensor, revealed: Tensor | None = None, allowed: Tensor | None = None
) -> Tensor:
    """log P(y_t | j) of a graph whose first vertex writes nothing: (rows, 1 + length, canvas).

    The target begins with an empty token, which every vertex writes with probability 1; only the first one is asked for
    it. A revealed vertex writes the token that it shows.

    Args:
        scores: log-probabilities of own words, (rows, canvas, 1 + length).
        labels: places in the own words, (rows, length), −100 at padding.
        revealed: (rows, canvas).
        allowed: (rows, length, canvas), which tokens of the target a revealed vertex shows.
    """
    written = scores.transpose(1, 2).gather(1, labels.clamp_min(0)[:, :, None].expand(-1, -1, scores.shape[1]))
    if revealed is not None:
        written = written.masked_fill(revealed[:, None] & ~allowed, float("-inf"))
    return torch.cat([torch.zeros_like(written[:, :1]), written], dim=1)


def dag_total(
    features: Tensor,
    log_links: Tensor,
    weight: Tensor,
    targets: Targets,
    fits: Tensor,
    predict: bool = False,
) -> tuple[Tensor, TargetScores | None, Tensor | None]:
    """−log Σ_paths P(path, target) summed over the rows that fit; predictions and expected embeddings if asked for.

    Tokens that are revealed have no gradient, and their vertices write nothing else (Huang et al. 2022).

    Args:
        features: rows × canvas × width.
        log_links: rows × canvas × canvas.
        weight: vocabulary × width.
        fits: which rows have a path.
    """
    found = _Graph.apply(features, weight, log_links, targets, fits, predict)
    if not predict:
        return found[0], None, None
    total, tokens, log_probs, expected = found
    return total, TargetScores(tokens, log_probs, log_links.detach()), expected


def fuzzy_total(features: Tensor, log_links: Tensor, weight: Tensor, targets: Targets, own: OwnWords) -> Tensor:
    """Σ (1 − fuzzy overlap) over rows; see `fuzzy_overlap`.

    The probabilities of own words are made in chunks; the backward pass makes their logits again.
    """
    probabilities = torch.zeros(*targets.canvas_mask.shape, own.words.shape[1], dtype=log_links.dtype)
    probabilities = probabilities.to(log_links.device)
    row = targets.canvas_mask.nonzero()[:, 0]
    packed = features[targets.canvas_mask]
    parts = []
    for part in _chunks(len(packed), weight.shape[0]):
        options = {"use_reentrant": False, "preserve_rng_state": False}
        parts.append(checkpoint(_own_probabilities, packed[part], weight, own.words[row[part]], **options))
    probabilities = probabilities.index_put((targets.canvas_mask,), torch.cat(parts))
    return (1 - fuzzy_overlap(probabilities, log_links, own.labels)[0]).sum()


def _own_probabilities(features: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    logits = _logits(features, weight)
    return (logits.gather(1, words) - logits.logsumexp(dim=-1, keepdim=True)).exp()


def _logits(features: Tensor, weight: Tensor) -> Tensor:
    return full_precision(features @ weight.T)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right in full precision; under autocast the factors are rounded, which makes it as fast as `_logits`."""
    return full_precision(left @ right.to(left.dtype))


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax, and log Σ exp read off at the likeliest word: torch's softmax is one pass, its logsumexp several."""
    probabilities = logits.softmax(dim=-1)
    return probabilities, logits.amax(dim=-1, keepdim=True) - probabilities.amax(dim=-1, keepdim=True).log()


def _chunks(count: int, logits_of_each: int, chunks: int = 1) -> list[slice]:
    size = max(1, chunks * CHUNK // logits_of_each)
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class _LinearLoss(Function):
    """A loss of softmax(features · weightᵀ) whose gradients are found in the forward pass, where the logits are."""

    @staticmethod
    def start(ctx: Any, features: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Zeros to which the gradients are added; None where none is needed."""
        dtype = torch.promote_types(features.dtype, torch.float32)
        wanted = ctx.needs_input_grad
        return (
            torch.zeros(features.shape, dtype=dtype, device=features.device) if wanted[0] else None,
            torch.zeros(weight.shape, dtype=dtype, device=weight.device) if wanted[1] else None,
        )

    @staticmethod
    def finish(ctx: Any, gradients: tuple[Tensor | None, Tensor | None], features: Tensor, weight: Tensor) -> None:
        ctx.dtypes = (features.dtype, weight.dtype)
        ctx.save_for_backward(*gradients)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            None if saved is None else (saved * gradient).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*found, *[None] * (len(ctx.needs_input_grad) - 2))


class _CrossEntropy(_LinearLoss):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        to_features, to_weight = _LinearLoss.start(ctx, features, weight)
        losses = []
        for part in _chunks(len(features), weight.shape[0]):
            logits = _logits(features[part], weight)
            probabilities, normaliser = _softmax(logits)
            chosen = logits.gather(1, targets[part, None])
            spread = logits.mean(dim=-1, keepdim=True) if smoothing else 0.0
            losses.append((normaliser - (1 - smoothing) * chosen - smoothing * spread).sum())
            if to_features is None and to_weight is None:
                continue
            # ∂loss/∂logits = p − (1 − ε)·[token] − ε/V
            slope = probabilities
            if smoothing:
                slope.sub_(smoothing / weight.shape[0])
            slope.scatter_add_(1, targets[part, None], torch.full_like(chosen, smoothing - 1))
            _pass_on(slope, features[part], weight, None if to_features is None else to_features[part], to_weight)
        _LinearLoss.finish(ctx, (to_features, to_weight), features, weight)
        return torch.stack(losses).sum() if losses else features.sum() * 0.0


class _Connectionist(_LinearLoss):
    """The loss and, if asked for, tokens, log-probabilities of own words and expected embeddings of all positions."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        mask: Tensor,
        labels: Tensor,
        blank: int,
        fits: Tensor,
        predict: bool,
        offsets: Tensor | None,
    ) -> tuple[Tensor, ...]:
        to_features, to_weight = _LinearLoss.start(ctx, features, weight)
        with_gradient = to_features is not None or to_weight is not None
        own = OwnWords.of(labels, blank)
        lengths, canvas_lengths = (labels >= 0).sum(dim=1), mask.sum(dim=1)
        losses, predictions = [], []
        for rows in _chunks(len(features), mask.shape[1] * weight.shape[0]):
            inside = mask[rows]
            row = inside.nonzero()[:, 0]
            packed = features[rows][inside]
            logits = _logits(packed, weight)
            tokens = likeliest(logits) if predict else None
            if offsets is not None:  # 0 for the sentence's own words
                logits.add_(offsets)
            probabilities, normaliser = _softmax(logits)
            columns = own.words[rows][row]
            scores = logits.new_zeros(*inside.shape, columns.shape[1])
            scores[inside] = logits.gather(1, columns) - normaliser
            with torch.enable_grad():
                scores.requires_grad_(with_gradient)
                loss = ctc_of_log_probs(scores, own.labels[rows], canvas_lengths[rows], lengths[rows], 0)
                loss = (loss * fits[rows]).sum()
            losses.append(loss.detach())
            if not with_gradient:
                if predict:
                    expected = _product(probabilities, weight)
                    predictions.append(_unpack(inside, tokens, expected, scores.detach()))
                continue
            # torch's gradient is p − γ, with γ the share of paths that pass a word here; over all logits it is the
            # same, and γ is zero for words that are not the sentence's own.
            (gradient,) = torch.autograd.grad(loss, scores)
            passing = scores.detach().exp() - gradient
            slope = probabilities.scatter_add_(1, columns, -passing[inside])
            part = _product(slope, weight) if predict or to_features is not None else None
            if predict:  # p·emb = (p − γ)·emb + γ·emb, of which the first is the gradient of the features
                of_own = torch.bmm(passing, full_precision(weight)[own.words[rows]])
                predictions.append(_unpack(inside, tokens, part + of_own[inside], scores.detach()))
            slope.mul_(fits[rows][row][:, None])
            if to_features is not None:
                to_features[rows][inside] = part * fits[rows][row][:, None]
            if to_weight is not None:
                to_weight.add_(_product(slope.T, packed))
        _LinearLoss.finish(ctx, (to_features, to_weight), features, weight)
        total = torch.stack(losses).sum()
        if not predict:
            return (total,)
        outputs = tuple(torch.cat(several) for several in zip(*predictions, strict=True))
        ctx.mark_non_differentiable(*outputs)
        return total, *outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        return _LinearLoss.backward(ctx, gradient)


class _Graph(_LinearLoss):
    """The loss of a graph and, if asked for, tokens, log-probabilities of own words and expected embeddings.

    With γ_j(w) the probability that a path passes vertex j and writes w there, and Γ_j their sum over words, the
    gradient of the logits is Γ_j·p − γ_j. Vertices of vanishing Γ_j take no part in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, weight: Tensor, log_links: Tensor, targets: Targets, fits: Tensor, predict: bool
    ) -> tuple[Tensor, ...]:
        to_features, to_weight = _LinearLoss.start(ctx, features, weight)
        with_gradient = any(ctx.needs_input_grad[:3])
        to_links = torch.zeros_like(log_links) if ctx.needs_input_grad[2] else None
        mask, labels = targets.canvas_mask, targets.labels
        own = OwnWords.of(labels, 0)  # place 0 is not part of a target
        lengths, canvas_lengths = (labels >= 0).sum(dim=1) + 1, mask.sum(dim=1)
        losses, predictions = [], []
        for rows in _chunks(len(features), mask.shape[1] * weight.shape[0], GRAPH_CHUNKS):
            inside = mask[rows]
            row = inside.nonzero()[:, 0]
            packed = features[rows][inside]
            logits = _logits(packed, weight)
            columns = own.words[rows][row]
            if with_gradient or predict:
                tokens = likeliest(logits) if predict else None
                probabilities, normaliser = _softmax(logits)
            else:
                normaliser = logits.logsumexp(dim=-1, keepdim=True)
            scores = logits.new_zeros(*inside.shape, columns.shape[1])
            scores[inside] = logits.gather(1, columns) - normaliser
            del logits
            revealed = allowed = None
            if targets.revealed is not None and targets.shown is not None:
                revealed = targets.revealed[rows]
                allowed = labels[rows][:, :, None] == targets.shown[rows][:, None]
            emitted = emitted_scores(scores, own.labels[rows], revealed, allowed)
            total, of_vertices, of_links = path_sum(emitted, log_links[rows], canvas_lengths[rows], lengths[rows])
            losses.append(-(total.masked_fill(~fits[rows], 0.0)).sum())
            if predict:
                predictions.append(_unpack(inside, tokens, _product(probabilities, weight), scores))
            if not with_gradient:
                continue
            counted = fits[rows].to(total.dtype)[:, None, None]
            if to_links is not None:
                to_links[rows] = -of_links * counted
            if to_features is None and to_weight is None:
                continue
            writing = of_vertices[:, 1:] * counted  # rows, length, canvas
            if revealed is not None:
                writing = writing.masked_fill(revealed[:, None], 0.0)
            passed = torch.zeros_like(scores).transpose(1, 2).contiguous()
            passed.scatter_add_(1, own.labels[rows].clamp_min(0)[:, :, None].expand_as(writing), writing)
            share = passed.transpose(1, 2)[inside]  # γ, positions × own words
            whole = share.sum(dim=1)  # Γ
            chosen: Tensor | slice = (whole > torch.finfo(whole.dtype).eps / 8).nonzero()[:, 0]
            if len(chosen) == len(whole):
                chosen = slice(None)  # without a copy
            slope = probabilities[chosen].mul_(whole[chosen, None])
            slope.scatter_add_(1, columns[chosen], -share[chosen])
            if to_features is not None:
                part = torch.zeros(packed.shape, dtype=to_features.dtype, device=packed.device)
                part[chosen] = _product(slope, weight)
                to_features[rows][inside] = part
            if to_weight is not None:
                to_weight.add_(_product(slope.T, packed[chosen]))
        ctx.dtypes = (features.dtype, weight.dtype, log_links.dtype)
        ctx.save_for_backward(to_features, to_weight, to_links)
        total = torch.stack(losses).sum()
        if not predict:
            return (total,)
        outputs = tuple(torch.cat(several) for several in zip(*predictions, strict=True))
        ctx.mark_non_differentiable(*outputs)
        return total, *outputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *unused: Tensor) -> tuple[Tensor | None, ...]:
        return _LinearLoss.backward(ctx, gradient)


def _unpack(inside: Tensor, tokens: Tensor, expected: Tensor, own_log_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Predictions of unpadded positions, laid out as (rows, canvas, …)."""
    all_tokens = torch.zeros(inside.shape, dtype=torch.long, device=inside.device)
    all_expected = expected.new_zeros(*inside.shape, expected.shape[1])
    all_tokens[inside], all_expected[inside] = tokens, expected
    return all_tokens, own_log_probs, all_expected


def _pass_on(
    slope: Tensor, features: Tensor, weight: Tensor, to_features: Tensor | None, to_weight: Tensor | None
) -> None:
    """From ∂loss/∂logits to features and weight; the latter is added to."""
    if to_features is not None:
        to_features.copy_(_product(slope, weight))
    if to_weight is not None:
        to_weight.add_(_product(slope.T, features))

"""The MPLE report: losses of a model under its objective, and their correlation with BLEU (Huang et al. 2022).

L_MPLE = L_NAT + L_input + L_target   (equation 8), all estimated on validation data:

L_NAT     −log P(T | Z, X) per token, which is the divergence of equation 9 because Q(T | Z, X) is a point mass
L_input   KL(Q(Z | X) ‖ P(Z | X)) per token, equation 11 and appendix E.6
L_target  −β · S(Y, T), the sentence BLEU of the proxy target against real ones, equation 14
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..models.deqnar.losses_deqnar import cross_entropy_total
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.reranking import check_scorer, teacher_forced
from ..objectives.input_predictor import (
    Batch,
    check_vanilla,
    choose_final_proxy,
    eval_mode,
    negative_log_probability,
)
from ..objectives.inputs import SMALLEST_WEIGHT, ProxyInput, conditional_masking, glancing, glancing_weights, masked
from ..objectives.objective import Objective, Proxy, Term, check_objective
from ..objectives.targets import dynamically_distilled

QUADRATURE_POINTS = 1000  # about 20 per unit of the integration variable; tested against enumeration


@dataclass
class Losses:
    """L_NAT and L_input per target token, and the proxy targets for which they were measured."""

    nat: float
    input: float
    tokens: int
    dropped: int  # sentences whose target does not fit on its canvas
    targets: list[list[int]]  # T of every sentence in the order of the batches, without blank tokens


@torch.no_grad()
def measure_losses(
    model: DeqNarForConditionalGeneration,
    objective: Objective,
    batches: Sequence[Batch],
    *,
    vanilla: DeqNarForConditionalGeneration | None = None,
    draws: int = 1,
    seed: int = 0,
) -> Losses:
    """L_NAT and L_input of a model under its objective at the end of training, without label smoothing.

    L_NAT = E_Q[−Σ_{i not revealed} log P(t_i | Z, X)]; revealed tokens are copied and have no loss (appendix E.6). For
    CTC and graphs it is −log Σ_paths P(path | Z, X). L_input = E_Q[−Σ_i log P(z_i | X) + log Q(Z | X)]; 0 if nothing is
    revealed. Latent variables add KL(q ‖ p) to L_input (appendix E.7).

    Args:
        model: with an input predictor if the objective reveals tokens.
        objective: that the model was trained with.
        batches: with `input_ids`, `attention_mask` and `labels`.
        vanilla: as for `input_predictor.negative_log_probability`.
        draws: number of samples of Z per sentence.
        seed: of the samples.
    """
    check_objective(objective, model.config)
    if objective.target is dynamically_distilled:
        raise ValueError(
            f"objective '{objective.name}' selects among candidates, which a report does not have; write the selected "
            "targets to a file and report on it with the remaining parts of the objective."
        )
    if objective.input is not masked and model.model.input_head is None:
        raise ValueError(
            f"objective '{objective.name}' reveals tokens, but the model has no input predictor; add one with "
            "fit_input_predictor."
        )
    if vanilla is not None:
        check_vanilla(model.config, vanilla.config)
    nat = input_loss = tokens = dropped = 0.0
    targets: list[list[int]] = []
    generator = torch.Generator(model.device).manual_seed(seed)
    work = list(itertools.product(range(draws), batches))
    with eval_mode(model, vanilla):
        for draw, batch in tqdm(work, desc="measuring losses", unit="batch", disable=None):
            fits, chosen = fits_canvas(model, batch), batch["labels"]
            dropped += (~fits).sum().item()
            if fits.any():
                part = {name: values[fits] for name, values in batch.items()}
                proxy, latent_loss = _draw(model, objective, part, generator)
                nat += _negative_log_likelihood(model, objective, proxy)
                input_loss += latent_loss
                if objective.input is not masked:
                    input_loss += negative_log_probability(model, part, proxy, vanilla).item()
                    input_loss += input_log_probability(objective.input, proxy).sum().item()
                tokens += (proxy.labels >= 0).sum().item()
                chosen = proxy.labels if fits.all() else chosen  # models with an own alignment do not change targets
            if draw == 0:
                targets += target_tokens(chosen, model.config.blank_token_id)
    if not tokens:
        raise ValueError("No target fits on its canvas, so there is no loss to measure; use other sentences.")
    return Losses(nat / tokens, input_loss / tokens, int(tokens) // draws, int(dropped) // draws, targets)


def _draw(
    model: DeqNarForConditionalGeneration, objective: Objective, batch: Batch, generator: torch.Generator
) -> tuple[Proxy, float]:
    """Samples of T and Z, and KL(q ‖ p) of the latent variables, if any."""
    terms: dict[str, Term] = {}
    proxy = choose_final_proxy(model, objective, batch, generator, terms)
    return proxy, terms["latent"].total.item() if "latent" in terms else 0.0


def fits_canvas(model: DeqNarForConditionalGeneration, batch: Batch) -> Tensor:
    """Whether the target of each row fits on its canvas."""
    source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
    canvas = model.lay_out(source, batch["labels"])
    return model.length_model.fits(batch["labels"], canvas.lengths)


def target_tokens(labels: Tensor, blank: int) -> list[list[int]]:
    """Targets as token ids, without padding and the blank tokens of AXE."""
    return [[token for token in row if token >= 0 and token != blank] for row in labels.tolist()]


def _negative_log_likelihood(model: DeqNarForConditionalGeneration, objective: Objective, proxy: Proxy) -> float:
    """−log P(T | Z, X), summed over a batch."""
    found = model.solve(proxy.source, proxy.canvas)
    return model.length_model.loss(model, found.value, objective.targets(proxy))[0].item()


def input_log_probability(chosen: ProxyInput, proxy: Proxy) -> Tensor:
    """log Q(Z | X) of every row: the log-probability that the rule reveals exactly these l of L positions.

    The rule determines l, except for CMLM, which draws it uniformly, 1/L each. Given l, all sets of positions have the
    probability 1/C(L, l); if tokens have weights, that of `set_log_probability`.

    Args:
        chosen: the rule.
        proxy: with the revealed positions.
    """
    rule, settings = getattr(chosen, "func", chosen), getattr(chosen, "keywords", {})
    revealed, mask = proxy.revealed, proxy.canvas.mask if proxy.target_mask is None else proxy.target_mask
    lengths, counts = mask.sum(dim=1).double(), revealed.sum(dim=1).double()
    uniform = torch.lgamma(counts + 1) + torch.lgamma(lengths - counts + 1) - torch.lgamma(lengths + 1)
    if rule is masked:
        return torch.zeros_like(lengths)
    if rule is conditional_masking:
        return uniform if settings.get("ratio") is not None else uniform - lengths.log()
    if rule is glancing:
        by = settings.get("by", "uniform")
        if by == "uniform":
            return uniform
        return set_log_probability(glancing_weights(proxy.target_probs, by), revealed, mask)
    raise ValueError(f"input_log_probability does not know the input rule {rule}; add its probability there.")


def set_log_probability(weights: Tensor, revealed: Tensor, mask: Tensor) -> Tensor:
    """Log-probability that weighted sampling without replacement draws exactly the revealed positions, in any order.

    Let position i have an exponential random time with rate w_i. The set S is drawn if all its times are before the
    first time outside it, which has the rate W = Σ_{i∉S} w_i. With t = eˢ that first time,

        P(S) = ∫ W t e^(−W t) · Π_{i∈S} (1 − e^(−w_i t)) ds   over all s.

    The integrand is log-concave in s. Its maximum is between −log W and log((1 + |S|)/W); at 40 below and 4 above this
    interval it is smaller by more than e⁻³⁸. The trapezoidal rule converges exponentially on such functions.

    Args:
        weights: rows × positions.
        revealed: the set S of every row.
        mask: positions that can be drawn.

    >>> weights, mask = torch.tensor([[3.0, 1.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    >>> set_log_probability(weights, torch.tensor([[True, False, False]]), mask).exp()
    tensor([0.6000], dtype=torch.float64)
    """
    weights = weights.double().clamp_min(SMALLEST_WEIGHT)
    rows = zip(weights, revealed, mask & ~revealed, strict=True)
    return torch.stack([_set_log_probability(row[inside], row[outside]) for row, inside, outside in rows])


def _set_log_probability(inside: Tensor, outside: Tensor) -> Tensor:
    """log P(S) from the weights inside and outside of S."""
    if not len(inside) or not len(outside):
        return torch.zeros((), dtype=inside.dtype, device=inside.device)
    rate = outside.sum()  # W
    lowest, highest = -rate.log() - 40, math.log(1 + len(inside)) - rate.log() + 4
    step = (highest - lowest) / (QUADRATURE_POINTS - 1)
    time = (lowest + step * torch.arange(QUADRATURE_POINTS, device=inside.device)).exp()
    drawn = torch.log(-torch.expm1(-time[:, None] * inside)).sum(dim=1)
    return (torch.log(rate * time) - rate * time + drawn).logsumexp(dim=0) + step.log()


def target_loss(similarities: Sequence[Sequence[float]], beta: float = 0.2) -> float:
    """L_target = −β · E_X E_Y S(Y, T) (equation 14).

    Args:
        similarities: for every sentence, the sentence BLEU (0 to 100) of its T against each real target Y.
        beta: weight β.
    """
    return -beta * sum(sum(row) / len(row) for row in similarities) / len(similarities)


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation coefficient; None for fewer than three points or if one side is constant.

    Args:
        first, second: equally many values.

    >>> pearson([1.0, 2.0, 3.0], [6.0, 4.0, 2.0])
    -1.0
    """
    if len(first) < 3:
        return None
    means = [math.fsum(values) / len(values) for values in (first, second)]
    offsets = [[value - mean for value in values] for values, mean in zip((first, second), means, strict=True)]
    variances = [math.fsum(offset**2 for offset in values) for values in offsets]
    if min(variances) == 0:
        return None
    return math.fsum(a * b for a, b in zip(*offsets, strict=True)) / math.sqrt(variances[0] * variances[1])


@dataclass
class TotalCorrelation:
    """Conditional total correlation of a corpus, in bits per token."""

    bits: float  # parallel − autoregressive
    parallel: float  # entropy under the non-autoregressive model
    autoregressive: float  # entropy under the autoregressive model
    tokens: int


@torch.no_grad()
def conditional_total_correlation(
    model: DeqNarForConditionalGeneration, autoregressive: PreTrainedModel, batches: Iterable[Batch]
) -> TotalCorrelation:
    """C = Σ_i H(y_i | X) − H(Y | X): the dependency between target tokens, which no parallel decoder can model.

    Both entropies are V-entropies (appendix B): the first is −log₂ P(Y | X) of a non-autoregressive model with a masked
    canvas of the correct length, the second that of an autoregressive model. To compare corpora, use models of the same
    size that were trained on the raw corpus.

    Args:
        model: non-autoregressive, with `length="predict"`.
        autoregressive: with the same vocabulary.
        batches: with `input_ids`, `attention_mask` and `labels`.
    """
    if model.length_model.has_own_alignment:
        raise ValueError(
            "Total correlation needs a model with length='predict', whose canvas has one position per target token."
        )
    check_scorer(autoregressive, model.config.vocab_size, "The autoregressive model")
    parallel = other = tokens = 0
    with eval_mode(model, autoregressive):
        for batch in tqdm(batches, desc="measuring entropies", unit="batch", disable=None):
            labels = batch["labels"]
            real = model.model.check_labels(labels)
            source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
            features = model.solve(source, model.lay_out(source, labels)).value
            parallel += cross_entropy_total(features[real], model.lm_head.weight, labels[real]).item()
            scores = teacher_forced(
                autoregressive, batch["input_ids"], source.mask, labels.clamp_min(0), real, "the autoregressive model"
            )
            other -= scores.sum().item()
            tokens += int(real.sum())
    bits = [entropy / tokens / math.log(2) for entropy in (parallel, other)]
    return TotalCorrelation(bits[0] - bits[1], *bits, tokens)

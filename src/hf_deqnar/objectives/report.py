"""The MPLE report: what a model learned, what that cost, and how it goes with BLEU (Huang et al. 2022).

L_MPLE = L_NAT + L_input + L_target   (equation 8), all estimated on validation data:

L_NAT     −log P(T | Z, X) per token, which is the divergence of equation 9 as Q(T | Z, X) is one point
L_input   KL(Q(Z | X) ‖ P(Z | X)) per token, equation 11 and appendix E.6
L_target  −β · S(Y, T), the sentence BLEU of the proxy target with real ones, equation 14
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..alignment import needed_canvas
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..scoring_deqnar import check_scorer, teacher_forced
from .input_predictor import Batch, check_vanilla, evaluating, features_unseen, negative_log_probability, proxy_of
from .inputs import SMALLEST_WEIGHT, ProxyInput, conditional_masking, glancing, glancing_weights, masked
from .likelihood import Question
from .objective import Objective, Proxy, Term, check_objective
from .projection import cross_entropy_total
from .targets import dynamically_distilled

QUADRATURE_POINTS = 1000  # some 20 within a unit of the integrand's argument; tested against enumeration


@dataclass
class Losses:
    """L_NAT and L_input per target token, and the proxy targets that they were measured with."""

    nat: float
    input: float
    tokens: int
    left_out: int  # sentences whose target does not fit on its CTC canvas
    targets: list[list[int]]  # T of every sentence in the order of the batches, without empty tokens


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
    """L_NAT and L_input of a model under its objective as it is at the end of training, without label smoothing.

    L_NAT = E_Q[−Σ_{i not revealed} log P(t_i | Z, X)]; revealed tokens are copied and cost nothing (appendix E.6). For
    CTC it is −log Σ_paths P(path | Z, X). L_input = E_Q[−Σ_i log P(z_i | X) + log Q(Z | X)]; 0 where nothing is
    revealed. Latent variables are an input too, with KL(q ‖ p) as its cost (appendix E.7).

    Args:
        batches: `input_ids`, `attention_mask` and `labels` each.
        vanilla: see `input_predictor.negative_log_probability`.
        draws: of Z for every sentence.
        seed: of the draws.
    """
    check_objective(objective, model.config)
    if objective.target is dynamically_distilled:
        raise ValueError(
            f"objective '{objective.name}' chooses among candidates that a report does not have; "
            "write down the targets it was trained on and report on them, with the rest of the objective."
        )
    if objective.input is not masked and model.model.input_head is None:
        raise ValueError(
            f"objective '{objective.name}' has an input to predict but the model no input predictor; "
            "give it one with fit_input_predictor."
        )
    if vanilla is not None:
        check_vanilla(model.config, vanilla.config)
    nat = cost = tokens = left_out = 0.0
    targets: list[list[int]] = []
    generator = torch.Generator(model.device).manual_seed(seed)
    turns = list(itertools.product(range(draws), batches))
    with evaluating(model, vanilla):
        for draw, batch in tqdm(turns, desc="measuring losses", unit="batch", disable=None):
            fits, chosen = fits_canvas(model, batch), batch["labels"]
            left_out += (~fits).sum().item()
            if fits.any():
                part = {name: values[fits] for name, values in batch.items()}
                proxy, latent_cost = _draw(model, objective, part, generator)
                nat += _negative_log_likelihood(model, objective, part, proxy)
                cost += latent_cost
                if objective.input is not masked:
                    cost += negative_log_probability(model, part, proxy, vanilla).item()
                    cost += input_log_probability(objective.input, proxy).sum().item()
                tokens += (proxy.labels >= 0).sum().item()
                chosen = proxy.labels if fits.all() else chosen  # CTC, which may not fit, leaves targets as they are
            if draw == 0:
                targets += spoken(chosen, model.config.blank_token_id)
    if not tokens:
        raise ValueError("No target fits on its CTC canvas, so there is no loss to measure; give other sentences.")
    return Losses(nat / tokens, cost / tokens, int(tokens) // draws, int(left_out) // draws, targets)


def _draw(
    model: DeqNarForConditionalGeneration, objective: Objective, batch: Batch, generator: torch.Generator
) -> tuple[Proxy, float]:
    """T and Z, and KL(q ‖ p) of the latent variables that come with them."""
    terms: dict[str, Term] = {}
    proxy = proxy_of(model, objective, batch, generator, terms)
    return proxy, terms["latent"].total.item() if "latent" in terms else 0.0


def fits_canvas(model: DeqNarForConditionalGeneration, batch: Batch) -> Tensor:
    """Which rows have a target that can be written on their canvas; only CTC's may be too short."""
    labels = batch["labels"]
    if model.config.length != "ctc":
        return torch.ones(len(labels), dtype=torch.bool, device=labels.device)
    source_mask = model.model.check_source(batch["input_ids"], batch.get("attention_mask"), None)
    lengths = (labels >= 0).sum(dim=1)
    return needed_canvas(labels, lengths) <= model.model.canvas_lengths(source_mask, None, None)


def spoken(labels: Tensor, blank: int) -> list[list[int]]:
    """Targets as token ids, without padding and the empty tokens of AXE."""
    return [[token for token in row if token >= 0 and token != blank] for row in labels.tolist()]


def _negative_log_likelihood(
    model: DeqNarForConditionalGeneration, objective: Objective, batch: Batch, proxy: Proxy
) -> float:
    """−log P(T | Z, X), summed over a batch."""
    source_mask = model.model.check_source(batch["input_ids"], batch.get("attention_mask"), None)
    bound = model.model.bind(proxy.canvas, proxy.canvas_mask, proxy.seen, source_mask)
    found = model.model.refine(bound, proxy.canvas_mask)
    question = Question(proxy.labels, proxy.revealed, proxy.canvas_mask, model.config.blank_token_id)
    return objective.likelihood(found.value, model.lm_head.weight, question)[0].item()


def input_log_probability(chosen: ProxyInput, proxy: Proxy) -> Tensor:
    """log Q(Z | X) of every row: how likely the rule was to reveal just these l of L positions.

    The number l follows from the rule, but for CMLM, which draws it: 1/L each. Then all sets of l positions are equally
    likely, 1/C(L, l), or those of `set_log_probability` where tokens have weights.
    """
    rule, settings = getattr(chosen, "func", chosen), getattr(chosen, "keywords", {})
    revealed, mask = proxy.revealed, proxy.canvas_mask
    lengths, counts = mask.sum(dim=1).double(), revealed.sum(dim=1).double()
    one_of_many = torch.lgamma(counts + 1) + torch.lgamma(lengths - counts + 1) - torch.lgamma(lengths + 1)
    if rule is masked:
        return torch.zeros_like(lengths)
    if rule is conditional_masking:
        return one_of_many if settings.get("ratio") is not None else one_of_many - lengths.log()
    if rule is glancing:
        by = settings.get("by", "uniform")
        if by == "uniform":
            return one_of_many
        return set_log_probability(glancing_weights(proxy.chances, by), revealed, mask)
    raise ValueError(f"The probability of the input rule {rule} is not known; add it to input_log_probability.")


def set_log_probability(weights: Tensor, revealed: Tensor, mask: Tensor) -> Tensor:
    """log-probability that drawing without replacement, by weight, takes just the revealed positions, in any order.

    Give every position an exponential clock of rate w_i: the set S is drawn if all its clocks ring before the first
    outside it, whose rate is W = Σ_{i∉S} w_i. With t = eˢ the time of that ring,

        P(S) = ∫ W t e^(−W t) · Π_{i∈S} (1 − e^(−w_i t)) ds   over all s.

    The integrand is log-concave in s. Its peak lies between −log W and log((1 + |S|)/W); 4 above that and 40 below it
    has fallen by more than e⁻³⁸. On such a function the trapezoidal rule converges exponentially.

    >>> weights, mask = torch.tensor([[3.0, 1.0, 1.0]]), torch.ones(1, 3, dtype=torch.bool)
    >>> set_log_probability(weights, torch.tensor([[True, False, False]]), mask).exp()
    tensor([0.6000], dtype=torch.float64)
    """
    weights = weights.double().clamp_min(SMALLEST_WEIGHT)
    rows = zip(weights, revealed, mask & ~revealed, strict=True)
    return torch.stack([_log_chance(row[inside], row[outside]) for row, inside, outside in rows])


def _log_chance(inside: Tensor, outside: Tensor) -> Tensor:
    """log P(S) from the weights inside and outside of S."""
    if not len(inside) or not len(outside):
        return torch.zeros((), dtype=inside.dtype, device=inside.device)
    rate = outside.sum()  # W
    lowest, highest = -rate.log() - 40, math.log(1 + len(inside)) - rate.log() + 4
    step = (highest - lowest) / (QUADRATURE_POINTS - 1)
    time = (lowest + step * torch.arange(QUADRATURE_POINTS, device=inside.device)).exp()
    rung = torch.log(-torch.expm1(-time[:, None] * inside)).sum(dim=1)
    return (torch.log(rate * time) - rate * time + rung).logsumexp(dim=0) + step.log()


def target_loss(similarities: Sequence[Sequence[float]], beta: float = 0.2) -> float:
    """L_target = −β · E_X E_Y S(Y, T) (equation 14).

    Args:
        similarities: for every sentence, the sentence BLEU (0 to 100) of its T with each real target Y.
    """
    return -beta * sum(sum(row) / len(row) for row in similarities) / len(similarities)


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Pearson's correlation r; None for fewer than three points, or where one side does not vary.

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
    """Conditional total correlation of a corpus and what it is the difference of, in bits per token."""

    bits: float
    parallel: float
    autoregressive: float
    tokens: int


@torch.no_grad()
def conditional_total_correlation(
    model: DeqNarForConditionalGeneration, autoregressive: PreTrainedModel, batches: Iterable[Batch]
) -> TotalCorrelation:
    """C = Σ_i H(y_i | X) − H(Y | X): what tokens tell about each other, and no parallel decoder can know.

    Both entropies are V-entropies (appendix B): the first is −log₂ P(Y | X) of a non-autoregressive model with a masked
    canvas of the right length, the second that of an autoregressive model that sees the words before. Models of one
    size, trained on the corpus as it is, make the figure comparable.
    """
    if model.config.length != "predict":
        raise ValueError(
            "Total correlation needs a model with length='predict': one of CTC's positions is not one of the tokens."
        )
    check_scorer(autoregressive, model.config.vocab_size, "The autoregressive model")
    parallel = other = tokens = 0
    with evaluating(model, autoregressive):
        for batch in tqdm(batches, desc="measuring entropies", unit="batch", disable=None):
            labels = batch["labels"]
            real = model.model.check_labels(labels)
            source_mask = model.model.check_source(batch["input_ids"], batch.get("attention_mask"), None)
            features = features_unseen(model, batch, real)
            parallel += cross_entropy_total(features[real], model.lm_head.weight, labels[real]).item()
            scores = teacher_forced(
                autoregressive, batch["input_ids"], source_mask, labels.clamp_min(0), real, "the autoregressive model"
            )
            other -= scores.sum().item()
            tokens += int(real.sum())
    bits = [entropy / tokens / math.log(2) for entropy in (parallel, other)]
    return TotalCorrelation(bits[0] - bits[1], *bits, tokens)

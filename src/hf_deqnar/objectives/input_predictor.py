"""The input predictor P(Z | X): the probability of a proxy input given the source (MPLE paper, appendix E.6).

P(z_i | X) = P(z_i is masked | X)                       where z_i is masked,
             (1 − P(z_i is masked | X)) · P(t_i | X)    where z_i = t_i.

The first factor is predicted by `input_head` from the decoder's features on a fully masked canvas; the second is a
model's prediction on that canvas.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.ctc import full_precision
from ..models.deqnar.losses_deqnar import cross_entropy_total
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, InputHead
from ..models.deqnar.refinement_deqnar import Canvas
from .inputs import masked
from .objective import Objective, Proxy, Term, check_objective

Batch = dict[str, Tensor]  # input_ids, attention_mask (optional) and labels


@dataclass
class Fit:
    """Mean of −log P(z_i is masked or not | X) over the positions, before and after fitting."""

    before: float
    after: float
    positions: int


def fit_input_predictor(
    model: DeqNarForConditionalGeneration,
    objective: Objective,
    batches: Iterable[Batch],
    *,
    steps: int = 100,
    seed: int = 0,
) -> Fit:
    """Fit the input head of a model: min Σ_i −log P(z_i is masked or not | X), with Z sampled by the objective.

    Learns: which positions the objective masks; the other weights are not changed. On fixed features this is a logistic
        regression, which is convex: L-BFGS solves it without a learning rate. A unit Gaussian prior on the weights
        prevents overfitting to a few sentences.
    Inputs: batches with `input_ids`, `labels` and optionally `attention_mask`; one Z is drawn for every sentence.
    Requirements: an objective that reveals tokens.
    Example: `fit_input_predictor(model, parse_objective("glat"), batches).after`.
    Reference: MPLE paper, appendix E.6.

    Args:
        steps: maximum number of iterations of L-BFGS.
        seed: of the sampled inputs.
    """
    check_objective(objective, model.config)
    if objective.input is masked:
        raise ValueError(f"objective '{objective.name}' reveals nothing, so there is no input to predict.")
    features, is_masked = [], []
    generator = torch.Generator(model.device).manual_seed(seed)
    with eval_mode(model), torch.no_grad():
        for batch in tqdm(batches, desc="fitting the input predictor", unit="batch", disable=None):
            proxy = choose_final_proxy(model, objective, batch, generator)
            batch_features = masked_features(model, batch, proxy.canvas)
            features.append(full_precision(batch_features[proxy.canvas.mask]))
            is_masked.append(~proxy.revealed[proxy.canvas.mask])
    if not features:
        raise ValueError("The input predictor cannot be fitted without sentences; give at least one batch.")
    head = ensure_input_head(model)
    return _fit_logistic_regression(head, torch.cat(features), torch.cat(is_masked), steps)


def ensure_input_head(model: DeqNarForConditionalGeneration) -> InputHead:
    """The model's input head; if there is none, an untrained one is added and the configuration updated."""
    core = model.model
    if core.input_head is None:
        head = InputHead(model.config).to(core.device, core.dtype)
        model._init_weights(head)
        core.input_head = head
        model.config.input_predictor = core.config.input_predictor = True
    return core.input_head


def _fit_logistic_regression(head: InputHead, features: Tensor, is_masked: Tensor, steps: int) -> Fit:
    """Logistic regression of `is_masked`, (positions), on features, (positions, d_model), from the current weights."""
    labels = is_masked.to(features.dtype)
    weight = head.weight.detach()[0].to(features.dtype).requires_grad_()
    bias = head.bias.detach()[0].to(features.dtype).requires_grad_()

    def cross_entropy() -> Tensor:
        return functional.binary_cross_entropy_with_logits(features @ weight + bias, labels)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy() + 0.5 * weight.square().sum() / len(features)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")
        before = cross_entropy().item()
        optimizer.step(closure)
        after = cross_entropy().item()
    with torch.no_grad():
        head.weight.copy_(weight[None])
        head.bias.copy_(bias[None])
    return Fit(before, after, len(features))


def negative_log_probability(
    model: DeqNarForConditionalGeneration,
    batch: Batch,
    proxy: Proxy,
    vanilla: DeqNarForConditionalGeneration | None = None,
) -> Tensor:
    """−Σ_i log P(z_i | X), summed over a batch.

    Args:
        vanilla: the model of P(t_i | X); in the paper a frozen one trained with masked inputs. None: `model` itself.
    """
    features = masked_features(model, batch, proxy.canvas)
    logits = full_precision(model.model.input_head(features))
    signs = torch.where(proxy.revealed, -1.0, 1.0)
    mask_loss = -(functional.logsigmoid(signs * logits) * proxy.canvas.mask).sum()
    if vanilla is not None:
        model, features = vanilla, masked_features(vanilla, batch, proxy.canvas)
    revealed = proxy.revealed
    token_loss = cross_entropy_total(features[revealed], model.lm_head.weight, proxy.canvas.tokens[revealed])
    return mask_loss + token_loss


def check_vanilla(config: DeqNarConfig, vanilla: DeqNarConfig) -> None:
    """Raise ValueError for a model of P(t_i | X) with another vocabulary or canvas."""
    for field in ("vocab_size", "mask_token_id", "blank_token_id", "pad_token_id", "length", "upsampling"):
        expected, actual = getattr(config, field), getattr(vanilla, field)
        if actual != expected:
            raise ValueError(
                f"The vanilla model has {field}={actual} but the model has {expected}; train it with the same "
                "tokenizer and kind of length."
            )


def choose_final_proxy(
    model: DeqNarForConditionalGeneration,
    objective: Objective,
    batch: Batch,
    generator: torch.Generator,
    terms: dict[str, Term] | None = None,
) -> Proxy:
    """T and Z as the objective chooses them at the end of training (progress 1); see `Objective.choose_proxy`."""
    source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
    return objective.choose_proxy(model, source, batch["labels"], 1.0, generator, terms=terms)


def masked_features(model: DeqNarForConditionalGeneration, batch: Batch, canvas: Canvas) -> Tensor:
    """Features on a fully masked canvas of the same lengths, (batch, canvas, d_model).

    The source is prepared again, because the latent variables of a proxy depend on the target, and P(Z | X) must not.
    """
    source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
    masked = torch.where(canvas.mask, model.config.mask_token_id, model.config.pad_token_id)
    return model.solve(source, model.lay_out(source, tokens=masked)).value


@contextmanager
def eval_mode(*models: torch.nn.Module | None) -> Iterator[None]:
    """Put models into evaluation mode, and restore their mode afterwards."""
    training = [model for model in models if model is not None and model.training]
    for model in training:
        model.eval()
    try:
        yield
    finally:
        for model in training:
            model.train()

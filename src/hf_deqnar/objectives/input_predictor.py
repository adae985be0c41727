"""The input predictor: P(Z | X), which proxy input a model would choose if it had to (MPLE paper, appendix E.6).

P(z_i | X) = P(z_i is masked | X)                       where z_i is masked,
             (1 − P(z_i is masked | X)) · P(t_i | X)    where z_i = t_i.

The first factor is read by `input_head` from the decoder's features of a canvas that is all `<mask>`; the second is
what a model says about such a canvas.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ..alignment import full_precision
from ..configuration_deqnar import DeqNarConfig
from ..modeling_deqnar import DeqNarForConditionalGeneration, InputHead
from .inputs import masked
from .objective import Objective, Proxy, Term, check_objective, unseen_features
from .projection import cross_entropy_total

Batch = dict[str, Tensor]  # input_ids, attention_mask (optional) and labels


@dataclass
class Fit:
    """How well an input predictor fits the inputs it was shown: −log P(z_i is masked or not | X) per position."""

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
    """Give a model an input predictor for an objective: min Σ −log P(z_i is masked or not | X), Z by the objective.

    Only the head is changed. On frozen features it is a logistic regression, which is convex, so it is solved (L-BFGS)
    and needs no learning rate; a unit Gaussian prior on its weights keeps a few sentences from being learned by heart.

    Args:
        batches: `input_ids`, `attention_mask` and `labels` each; one Z is drawn for every sentence in them.
        steps: most steps of L-BFGS.
        seed: of the draws.
    """
    check_objective(objective, model.config)
    if objective.input is masked:
        raise ValueError(f"objective '{objective.name}' reveals nothing, so there is no input to predict.")
    features, hidden = [], []
    generator = torch.Generator(model.device).manual_seed(seed)
    with evaluating(model), torch.no_grad():
        for batch in tqdm(batches, desc="fitting the input predictor", unit="batch", disable=None):
            proxy = proxy_of(model, objective, batch, generator)
            found = features_unseen(model, batch, proxy.canvas_mask)
            features.append(full_precision(found[proxy.canvas_mask]))
            hidden.append(~proxy.revealed[proxy.canvas_mask])
    if not features:
        raise ValueError("The input predictor cannot be fitted without sentences; give some batches.")
    head = give_input_head(model)
    return _regress(head, torch.cat(features), torch.cat(hidden), steps)


def give_input_head(model: DeqNarForConditionalGeneration) -> InputHead:
    """The model's input head; one that knows nothing yet is added, and saved with it, if there is none."""
    core = model.model
    if core.input_head is None:
        head = InputHead(model.config).to(core.device, core.dtype)
        model._init_weights(head)
        core.input_head = head
        model.config.input_predictor = core.config.input_predictor = True
    return core.input_head


def _regress(head: InputHead, features: Tensor, hidden: Tensor, steps: int) -> Fit:
    """Logistic regression of `hidden` on features, positions × width, from where the head stands."""
    answers = hidden.to(features.dtype)
    weight = head.weight.detach()[0].to(features.dtype).requires_grad_()
    bias = head.bias.detach()[0].to(features.dtype).requires_grad_()

    def cost() -> Tensor:
        return functional.binary_cross_entropy_with_logits(features @ weight + bias, answers)

    def regularised() -> Tensor:
        optimizer.zero_grad()
        loss = cost() + 0.5 * weight.square().sum() / len(features)
        loss.backward()
        return loss

    with torch.enable_grad():
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")
        before = cost().item()
        optimizer.step(regularised)
        after = cost().item()
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
        vanilla: the model whose P(t_i | X) is meant, in the paper a frozen one that was trained with masked inputs; by
            default the model itself.
    """
    features = features_unseen(model, batch, proxy.canvas_mask)
    odds = full_precision(model.model.input_head(features))
    signs = torch.where(proxy.revealed, -1.0, 1.0)
    chosen = -(functional.logsigmoid(signs * odds) * proxy.canvas_mask).sum()
    if vanilla is not None:
        model, features = vanilla, features_unseen(vanilla, batch, proxy.canvas_mask)
    tokens = cross_entropy_total(features[proxy.revealed], model.lm_head.weight, proxy.canvas[proxy.revealed])
    return chosen + tokens


def check_vanilla(config: DeqNarConfig, vanilla: DeqNarConfig) -> None:
    """A model that stands in for P(t_i | X) must speak about the same tokens on the same canvas."""
    for field in ("vocab_size", "mask_token_id", "blank_token_id", "pad_token_id", "length", "ctc_upsampling"):
        ours, theirs = getattr(config, field), getattr(vanilla, field)
        if ours != theirs and (field != "ctc_upsampling" or config.length == "ctc"):
            raise ValueError(
                f"The vanilla model has {field}={theirs} but the model has {ours}; train it with the same tokenizer "
                "and kind of length."
            )


def proxy_of(
    model: DeqNarForConditionalGeneration,
    objective: Objective,
    batch: Batch,
    generator: torch.Generator,
    terms: dict[str, Term] | None = None,
) -> Proxy:
    """T and Z as the objective chooses them at the end of training; see `Objective.choose_proxy`."""
    source_mask = model.model.check_source(batch["input_ids"], batch.get("attention_mask"), None)
    memory = model.model.encode(batch["input_ids"], source_mask)
    return objective.choose_proxy(model, memory, source_mask, batch["labels"], 1.0, generator, terms=terms)


def features_unseen(model: DeqNarForConditionalGeneration, batch: Batch, canvas_mask: Tensor) -> Tensor:
    """The decoder's features of X and a canvas of the given lengths, all `<mask>`: what P(Z | X) may look at.

    A proxy's encoder states will not do: its latent variables have seen the target.
    """
    core = model.model
    source_mask = core.check_source(batch["input_ids"], batch.get("attention_mask"), None)
    seen = core.encode(batch["input_ids"], source_mask)
    if core.latent_head is not None:
        seen, _ = core.latent_head(seen, source_mask, None, None)
    canvas = core.masked_canvas(canvas_mask.sum(dim=1), canvas_mask.shape[1])
    return unseen_features(model, canvas, canvas_mask, seen, source_mask)


@contextmanager
def evaluating(*models: torch.nn.Module | None) -> Iterator[None]:
    """Models in evaluation mode, and afterwards as they were."""
    training = [model for model in models if model is not None and model.training]
    for model in training:
        model.eval()
    try:
        yield
    finally:
        for model in training:
            model.train()

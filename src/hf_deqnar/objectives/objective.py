"""An objective: proxy target × proxy input × likelihood, and the terms that keep equilibria easy to reach.

objective = parse_objective("ctc+glat")
terms = objective(model, batch, progress=step / total)
terms["loss"].backward()
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..alignment import viterbi_path
from ..configuration_deqnar import DeqNarConfig
from ..landscape import RandomState, initial_condition_loss, jacobian_penalty, random_budget
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..transition_deqnar import BoundTransition
from .inputs import INPUTS, Prediction, ProxyInput, masked, needs_prediction
from .likelihood import LIKELIHOODS, Likelihood, sentence_losses
from .targets import TARGETS, ProxyTarget, choose_candidates, dynamically_distilled, reference


@dataclass
class Objective:
    """What is learned, as three choices, and how the dynamics are controlled (DEQNAR equation 6).

    Attributes:
        correction: weight of the loss at one random state of the path (stochastic dynamic correction).
        initial: weight of the distance between the first evaluation and the equilibrium.
        jacobian: weight of the Jacobian penalty.
        random_nfe: solve with a random number of evaluations, 1 to the model's `max_nfe`.
        gamma, beta: of Dynamic KD; one γ per candidate. The defaults are those of the paper for teachers of the sizes
            tiny, small, base and big, and the raw target.
    """

    name: str
    target: ProxyTarget
    input: ProxyInput
    likelihood: Likelihood
    label_smoothing: float = 0.0
    correction: float = 0.0
    initial: float = 0.0
    jacobian: float = 0.0
    random_nfe: bool = False
    gamma: tuple[float, ...] = (0.7, 0.6, 1.3, 1.5, 2.3)
    beta: float = 0.2

    def __call__(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        progress: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """The loss to minimise, and every term of it for the log."""
        core, config = model.model, model.config
        source_mask = core.check_source(batch["input_ids"], batch.get("attention_mask"), None)
        memory = core.encode(batch["input_ids"], source_mask)
        labels = batch["labels"]
        if self.target is dynamically_distilled:
            labels = self._choose(model, batch, memory, source_mask)
        label_mask = core.check_labels(labels)
        lengths = label_mask.sum(dim=1)
        seen, latent_kl = memory, None
        if core.latent_head is not None:
            seen, latent_kl = core.latent_head(memory, source_mask, core.embed(labels.clamp_min(0)), label_mask)

        canvas_lengths = core.canvas_lengths(source_mask, labels, None)
        blank_canvas = core.masked_canvas(canvas_lengths, labels.shape[1] if config.length == "predict" else None)
        canvas_mask = core.check_canvas(blank_canvas, None)
        unseen = None
        if self._looks_first(config):
            unseen = unseen_log_probabilities(model, blank_canvas, canvas_mask, seen, source_mask)
        labels = self.target(labels, lengths, unseen, config.blank_token_id, progress)
        written = labels.clamp_min(0)  # the target position by position: for CTC, its likeliest path
        if config.length == "ctc":
            written = blank_canvas
            if unseen is not None:
                written, _ = viterbi_path(unseen, labels, canvas_lengths, lengths, config.blank_token_id)
        revealed = self._reveal(written, canvas_mask, unseen, progress, generator)
        canvas = torch.where(revealed, written, blank_canvas)

        bound = core.bind(canvas, canvas_mask, seen, source_mask)
        equilibrium_seeking = config.refinement != "stacked"
        path = RandomState(bound.context.injection, generator) if self.correction and equilibrium_seeking else None
        budget = random_budget(config.max_nfe, generator) if self.random_nfe and equilibrium_seeking else None
        found = core.refine(bound, canvas_mask, max_nfe=budget, observe=path)

        def negative_log_likelihood(features: Tensor) -> Tensor:
            logits = model.lm_head(features)
            loss, count = self.likelihood(
                logits, labels, revealed, canvas_lengths, config.blank_token_id, self.label_smoothing
            )
            return loss / count.clamp_min(1)

        terms = {"nat": negative_log_likelihood(found.value)}
        loss = terms["nat"]
        if core.length_head is not None:
            logits = core.length_head(memory, source_mask)
            terms["length"] = core.length_head.loss(logits, source_mask.sum(dim=1), lengths)
            loss = loss + config.length_loss_factor * terms["length"]
        if latent_kl is not None:
            terms["latent"] = latent_kl.sum() / lengths.sum()
            loss = loss + config.latent_kl_factor * terms["latent"]
        if equilibrium_seeking:
            control = self._dynamics(bound, canvas_mask, found.state, path, negative_log_likelihood)
            for name, (weight, value) in control.items():
                terms[name] = value
                loss = loss + weight * value
            terms |= {"nfe": found.nfe.double().mean(), "residual": found.residual.mean()}
            terms["converged"] = found.converged.double().mean()
        return {"loss": loss, **terms}

    @torch.no_grad()
    def _choose(
        self, model: DeqNarForConditionalGeneration, batch: dict[str, Tensor], memory: Tensor, source_mask: Tensor
    ) -> Tensor:
        """The candidate of every row that is easy to say and near the others.

        The batch holds `candidates` (rows × candidates × length, −100 at padding) and `similarity`, the sentence BLEU
        of every two of them.
        """
        core, config = model.model, model.config
        candidates = batch["candidates"]
        if candidates.shape[1] != len(self.gamma):
            raise ValueError(
                f"There are {candidates.shape[1]} candidates per sentence but gamma has {len(self.gamma)} weights; "
                "give one for each."
            )
        seen = memory
        if core.latent_head is not None:
            seen, _ = core.latent_head(memory, source_mask, None, None)
        losses, unseen = [], None
        for labels in candidates.unbind(dim=1):
            core.check_labels(labels)
            lengths = core.canvas_lengths(source_mask, labels, None)
            if unseen is None or config.length == "predict":  # a CTC canvas is the same for all
                canvas = core.masked_canvas(lengths, labels.shape[1] if config.length == "predict" else None)
                unseen = unseen_log_probabilities(model, canvas, core.check_canvas(canvas, None), seen, source_mask)
            losses.append(sentence_losses(unseen, labels, lengths, config.blank_token_id, config.length == "ctc"))
        gamma = torch.tensor(self.gamma, device=candidates.device)
        chosen = choose_candidates(torch.stack(losses, dim=1), batch["similarity"], gamma, self.beta)
        return candidates[torch.arange(len(candidates), device=chosen.device), chosen]

    def _looks_first(self, config: DeqNarConfig) -> bool:
        """Whether the model is asked what it says unseen, before anything is chosen or revealed."""
        if needs_prediction(self.input) or self.target not in (reference, dynamically_distilled):
            return True
        return config.length == "ctc" and self.input is not masked  # without it a target has no place on the canvas

    def _reveal(
        self,
        written: Tensor,
        canvas_mask: Tensor,
        unseen: Tensor | None,
        progress: float,
        generator: torch.Generator | None,
    ) -> Tensor:
        prediction = None
        if unseen is not None:
            chances = unseen.gather(2, written[:, :, None])[:, :, 0].exp()
            prediction = Prediction(unseen.argmax(dim=-1), chances)
        return self.input(written, canvas_mask, prediction, progress, generator)

    def _dynamics(
        self,
        bound: BoundTransition,
        canvas_mask: Tensor,
        state: Tensor,
        path: RandomState | None,
        negative_log_likelihood: Callable[[Tensor], Tensor],
    ) -> dict[str, tuple[float, Tensor]]:
        """The control terms that are switched on: their weights and values."""
        terms = {}
        if path is not None:
            features = bound.transition.features(path.value, bound.context)
            terms["correction"] = (self.correction, negative_log_likelihood(features))
        if self.initial:
            first = bound(torch.zeros_like(state))
            terms["initial"] = (self.initial, initial_condition_loss(first, state, canvas_mask))
        if self.jacobian:
            terms["jacobian"] = (self.jacobian, jacobian_penalty(bound, state, canvas_mask))
        return terms


@torch.no_grad()
def unseen_log_probabilities(
    model: DeqNarForConditionalGeneration, canvas: Tensor, canvas_mask: Tensor, seen: Tensor, source_mask: Tensor
) -> Tensor:
    """What the model says when nothing is revealed: rows × canvas × vocabulary."""
    bound = model.model.bind(canvas, canvas_mask, seen, source_mask)
    found = model.model.refine(bound, canvas_mask)
    return model.lm_head(found.value).float().log_softmax(dim=-1)


def parse_objective(name: str, **settings: float | bool) -> Objective:
    """'ctc+glat' → an `Objective`. At most one target, one input and one likelihood, in any order.

    What is not named is `raw`, `masked` and `ce`; `settings` are the fields of `Objective`.

    >>> parse_objective("ctc+glat").input.__name__
    'glancing'
    """
    kinds = {"target": TARGETS, "input": INPUTS, "likelihood": LIKELIHOODS}
    chosen = {"target": "raw", "input": "masked", "likelihood": "ce"}
    named: dict[str, str] = {}
    for word in name.split("+"):
        kind = next((kind for kind, members in kinds.items() if word in members), None)
        if kind is None:
            known = "; ".join(f"{kind}s: {', '.join(members)}" for kind, members in kinds.items())
            raise ValueError(f"objective '{name}': '{word}' is unknown. Choose among {known}.")
        if kind in named:
            raise ValueError(f"objective '{name}': {named[kind]} and {word} are both {kind}s; keep one.")
        named[kind] = word
    chosen |= named
    if chosen["likelihood"] == "ctc" and chosen["target"] in ("axe", "oaxe"):
        raise ValueError(f"objective '{name}': CTC aligns by itself, so {chosen['target']} has no place; drop one.")
    return Objective(name, *(kinds[kind][chosen[kind]] for kind in kinds), **settings)


def check_objective(objective: Objective, config: DeqNarConfig) -> None:
    """Refuse an objective that does not fit the model's lengths, and say which would."""
    for_ctc = objective.likelihood is LIKELIHOODS["ctc"]
    if for_ctc and config.length != "ctc":
        instead = objective.name.replace("ctc", "ce")
        raise ValueError(
            f"objective '{objective.name}' needs config.length = 'ctc', but this model predicts lengths; "
            f"use '{instead}' or train a CTC model."
        )
    if not for_ctc and config.length == "ctc":
        raise ValueError(
            f"objective '{objective.name}' needs config.length = 'predict', but this is a CTC model; add '+ctc' to it."
        )

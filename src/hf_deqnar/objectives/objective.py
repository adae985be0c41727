"""Training objectives: proxy target × proxy input × likelihood, and regularisers of the equilibrium.

objective = parse_objective("ctc+glat")
terms = objective(model, batch, progress=step / total)
terms["loss"].backward()
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.fixed_point import FixedPoint
from ..models.deqnar.layers_deqnar import Record
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.losses_deqnar import OwnWords, SampledWords, Targets, TargetScores
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.refinement_deqnar import Canvas, Source
from ..models.deqnar.stability import (
    RandomState,
    initial_condition_loss,
    jacobian_penalty,
    mixed_initial_state,
    random_budget,
)
from .inputs import INPUTS, Prediction, ProxyInput, masked, needs_prediction
from .states import SupervisedStates, supervise_states
from .targets import (
    TARGETS,
    ProxyTarget,
    aligned,
    choose_candidates,
    dynamically_distilled,
    order_agnostic,
    reference,
)

# The counts of a process's part of a batch → the counts that its terms are divided by, over all processes.
ReduceCounts = Callable[[Tensor], Tensor]


@dataclass
class Term:
    """One term of a loss: a sum, the number of items in it, and the weight of their mean in the loss."""

    total: Tensor
    count: Tensor
    weight: float = 0.0  # 0: logged only


@dataclass
class Proxy:
    """Proxy target and proxy input of a batch."""

    source: Source  # with latent variables of the posterior, if the model has them
    labels: Tensor  # (batch, length): T; −100 at padding
    canvas: Canvas  # Z
    revealed: Tensor  # (batch, canvas): positions with a revealed token
    target_probs: Tensor | None = None  # (batch, canvas): P(t_i | X) on a masked canvas, if it was computed
    errors: Tensor | None = None  # (batch, canvas): positions where the prediction on a masked canvas was wrong
    target_mask: Tensor | None = None  # (batch, canvas): positions of target tokens; None if all positions are


@dataclass
class Objective:
    """L = −log P(T | Z, X) + λ_len·ℓ_len + λ_corr·ℓ_corr + λ_init·ℓ_init + λ_jac·ℓ_jac.

    Learns: the proxy target T from the source X and the proxy input Z, with an equilibrium that is easy to reach.
    Inputs: batches with `input_ids`, `labels` (−100 at padding) and optionally `attention_mask`; for Dynamic KD also
        `candidates` and `similarity`.
    Requirements: the likelihood must be that of the model's length model (`check_objective`).
    Example: `parse_objective("ctc+glat", correction=0.5)(model, batch)["loss"]`.
    Reference: MPLE paper, section 3 (T, Z and the likelihood); DEQNAR, appendix B.2, equations 5 and 6 (dynamics
        control); TorchDEQ (Jacobian penalty).

    Attributes:
        sampled_words: normalise the likelihood over the words of the batch and so many others, drawn for every batch;
            0 for the whole vocabulary.
        overlap: share of the loss that is one minus the expected n-gram overlap with the target (`overlap_loss` of the
            length model); the likelihood has the rest.
        layers: weight of the mean loss at the outputs of the inner layers of a stacked decoder (deep supervision).
        correction: λ_corr, the weight of the loss at one random state of the path (stochastic dynamic correction).
        correction_share: share of the rows for which that loss is computed, chosen at random.
        initial: λ_init, the weight of the distance between the first evaluation and the equilibrium.
        jacobian: λ_jac, the weight of the Jacobian penalty.
        random_nfe: solve with a random number of evaluations, from 1 to the model's `max_nfe`.
        noisy_start: share of the rows whose solve starts from noise instead of zeros.
        glance_nfe: most evaluations of the solve that predicts on a masked canvas; `max_nfe` if None. A few evaluations
            are enough to find the wrong tokens.
        states: losses at several states of a path, some of which contain part of the truth; see `SupervisedStates`.
            None for a loss at the equilibrium only.
        equilibrium: with `states`, the weight of the loss at the equilibrium; 0 leaves the solve out.
        gamma, beta: of Dynamic KD; one γ per candidate. The defaults are those of the MPLE paper, appendix F, for
            teachers of the sizes tiny, small, base and big, and the raw target.
    """

    name: str
    target: ProxyTarget
    input: ProxyInput
    likelihood: str
    label_smoothing: float = 0.0
    sampled_words: int = 0
    overlap: float = 0.0
    layers: float = 0.0
    correction: float = 0.0
    correction_share: float = 1.0
    initial: float = 0.0
    jacobian: float = 0.0
    random_nfe: bool = False
    noisy_start: float = 0.0
    glance_nfe: int | None = None
    states: SupervisedStates | None = None
    equilibrium: float = 1.0
    gamma: tuple[float, ...] = (0.7, 0.6, 1.3, 1.5, 2.3)
    beta: float = 0.2

    def __call__(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        *,
        max_nfe: int | None = None,
        reduce_counts: ReduceCounts | None = None,
    ) -> dict[str, Tensor]:
        """The loss, and the mean of every term by name.

        Args:
            progress: training progress from 0 to 1, for proxy targets and inputs with a schedule.
            max_nfe: most evaluations of the solve; `config.max_nfe` if None.
            reduce_counts: see `ReduceCounts`; None for a single process.
        """
        return combine(self.terms(model, batch, progress, generator, max_nfe=max_nfe), reduce_counts)

    def terms(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        *,
        max_nfe: int | None = None,
    ) -> dict[str, Term]:
        """The terms of the loss, as sums and counts."""
        source = model.prepare(batch["input_ids"], batch.get("attention_mask"))
        labels = batch["labels"]
        if self.target is dynamically_distilled and "candidates" in batch:  # validation data has none
            labels = self._choose_candidate(model, batch, source, max_nfe)
        terms: dict[str, Term] = {}
        proxy = self.choose_proxy(model, source, labels, progress, generator, max_nfe, terms)
        targets = self.targets(proxy, self.label_smoothing)

        config = model.config
        if self.sampled_words:
            vocabulary, blank = config.vocab_size, config.blank_token_id
            targets.sampled = SampledWords.draw(proxy.labels, vocabulary, blank, self.sampled_words, generator)
        if self.states is not None:
            function = model.model.bind(proxy.source, proxy.canvas)
            for number, loss in enumerate(supervise_states(model, function, targets, self.states, generator), start=1):
                terms[f"state_{number}"] = Term(loss.total, loss.count, loss.weight * (1 - self.overlap))
                if self.overlap:
                    overlap = model.length_model.overlap_loss(model, loss.features, targets)
                    terms[f"overlap_{number}"] = Term(*overlap, loss.weight * self.overlap)
            if not self.equilibrium:
                return terms
        path = start = None
        if config.seeks_equilibrium:
            path = RandomState(generator) if self.correction else None
            if self.random_nfe:
                max_nfe = random_budget(max_nfe or config.max_nfe, generator)
            if self.noisy_start:
                assert source.encoder_states is not None
                zeros = source.encoder_states.new_zeros(*proxy.canvas.tokens.shape, config.d_model)
                start = mixed_initial_state(zeros, self.noisy_start, generator)
        record = Record.empty(attentions=False) if self.layers else None
        found = model.solve(
            proxy.source, proxy.canvas, initial_state=start, max_nfe=max_nfe, observe=path, record=record
        )

        likelihood = self.equilibrium * (1 - self.overlap)
        terms["nat"] = Term(*model.length_model.loss(model, found.value, targets), weight=likelihood)
        if self.overlap:
            overlap = model.length_model.overlap_loss(model, found.value, targets)
            terms["overlap"] = Term(*overlap, self.equilibrium * self.overlap)
        if record is not None:
            terms["layers"] = self._layer_term(model, record, targets)
        if config.seeks_equilibrium:
            if path is not None:
                terms["correction"] = self._correction_term(model, found, path, targets, generator)
            terms |= self._regularisers(found, proxy.canvas.mask)
            rows = torch.tensor(len(labels), device=labels.device)
            for name in ("nfe", "residual", "converged"):
                terms[name] = Term(getattr(found, name).to(found.residual.dtype).sum(), rows)
        return terms

    def targets(self, proxy: Proxy, label_smoothing: float = 0.0) -> Targets:
        """What is to be predicted on the canvas of a proxy."""
        shown = (proxy.revealed, label_smoothing, proxy.canvas.tokens)
        return Targets(proxy.labels, proxy.canvas.mask, *shown)

    def choose_proxy(
        self,
        model: DeqNarForConditionalGeneration,
        source: Source,
        labels: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        max_nfe: int | None = None,
        terms: dict[str, Term] | None = None,
    ) -> Proxy:
        """Choose T and Z for a batch.

        Args:
            source: prepared without labels.
            terms: the length loss and the latent KL are added to it.
        """
        config, lengths = model.config, model.length_model
        terms = {} if terms is None else terms
        target_lengths = model.model.check_labels(labels).sum(dim=1)
        rows = torch.tensor(len(labels), device=labels.device)
        length_loss = lengths.length_loss(model, source, target_lengths)
        if length_loss is not None:
            terms["length"] = Term(length_loss * rows, rows, config.length_loss_factor)
        source = model.model.with_latents(source, labels)
        if source.latent_kl is not None:
            terms["latent"] = Term(source.latent_kl.sum(), target_lengths.sum(), config.latent_kl_factor)

        masked_canvas = model.lay_out(source, labels)
        mask = masked_canvas.mask
        excluded = lengths.excluded(labels, masked_canvas.lengths)
        if excluded is not None:
            terms["excluded"] = Term(excluded, rows)
        if not self.needs_masked_prediction(config):
            tokens = lengths.unaligned(labels, masked_canvas.tokens)
            revealed = self.input(tokens, mask, None, progress, generator)
            return Proxy(source, labels, masked_canvas.reveal(revealed, tokens), revealed)

        own = OwnWords.of(labels, config.blank_token_id)
        if self.glance_nfe is not None:
            max_nfe = min(self.glance_nfe, config.max_nfe if max_nfe is None else max_nfe)
        with repeated_dropout(model.device) if lengths.same_dropout else nullcontext():
            scores = predict_masked(model, source, masked_canvas, own, max_nfe)
        own_labels = self.target(own.labels, target_lengths, scores.log_probs, 0, progress)
        labels = own.tokens(own_labels)
        alignment = lengths.align(scores, own_labels, masked_canvas.lengths, target_lengths)
        mask, alignment = mask & (alignment >= 0), alignment.clamp_min(0)
        tokens = own.tokens(alignment)
        target_probs = scores.log_probs.gather(2, alignment[:, :, None])[:, :, 0].exp()
        prediction = Prediction(scores.tokens, target_probs)
        options = lengths.glancing if needs_prediction(self.input) else {}
        revealed = self.input(tokens, mask, prediction, progress, generator, **options)
        errors = (scores.tokens != tokens) & mask
        return Proxy(source, labels, masked_canvas.reveal(revealed, tokens), revealed, target_probs, errors, mask)

    @torch.no_grad()
    def _choose_candidate(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        source: Source,
        max_nfe: int | None = None,
    ) -> Tensor:
        """The labels of the candidate that `choose_candidates` selects for every row.

        The batch has `candidates`, (batch, candidates, length) with −100 at padding, and `similarity`.
        """
        candidates = batch["candidates"]
        if candidates.shape[1] != len(self.gamma):
            raise ValueError(
                f"There are {candidates.shape[1]} candidates per sentence but gamma has {len(self.gamma)} weights; "
                "give one weight per candidate."
            )
        losses: list[Tensor] = []
        features: Tensor
        previous: Canvas | None = None
        for labels in candidates.unbind(dim=1):
            model.model.check_labels(labels)
            canvas = model.lay_out(source, labels)
            if previous is None or not torch.equal(previous.tokens, canvas.tokens):  # CTC: one canvas for all
                features, previous = model.solve(source, canvas, max_nfe=max_nfe).value, canvas
            own = OwnWords.of(labels, model.config.blank_token_id)
            scores = model.length_model.score_targets(model, features, canvas.mask, own.words)
            tokens = (labels >= 0).sum(dim=1)
            losses.append(model.length_model.sentence_losses(scores, own, canvas.mask) / tokens)
        gamma = torch.tensor(self.gamma, device=candidates.device)
        chosen = choose_candidates(torch.stack(losses, dim=1), batch["similarity"], gamma, self.beta)
        return candidates[torch.arange(len(candidates), device=chosen.device), chosen]

    def needs_masked_prediction(self, config: DeqNarConfig) -> bool:
        """Whether T or Z depends on the model's prediction on a masked canvas, which takes another solve."""
        if needs_prediction(self.input) or self.target not in (reference, dynamically_distilled):
            return True
        return LENGTH_MODELS[config.length].has_own_alignment and self.input is not masked

    def _correction_term(
        self,
        model: DeqNarForConditionalGeneration,
        found: FixedPoint,
        path: RandomState,
        targets: Targets,
        generator: torch.Generator | None,
    ) -> Term:
        """ℓ_corr: the loss at one random state of the solver's path (DEQNAR, appendix B.2), for all or some rows."""
        function, state = found.function, path.value
        assert state is not None  # there was at least one evaluation
        if self.correction_share < 1:
            count = max(1, math.ceil(self.correction_share * len(state)))
            rows = torch.randperm(len(state), generator=generator, device=state.device)[:count].sort().values
            function, targets, state = function.select(rows), targets.select(rows), state[rows]
        return Term(*model.length_model.loss(model, function.features(state), targets), weight=self.correction)

    def _layer_term(self, model: DeqNarForConditionalGeneration, record: Record, targets: Targets) -> Term:
        """The mean loss at the outputs of all layers but the last, which are the inputs of the layers after them."""
        norm = model.model.transition.final_norm
        losses = [model.length_model.loss(model, norm(hidden), targets) for hidden in record.hidden_states[1:]]
        return Term(torch.stack([total for total, _ in losses]).mean(), losses[0][1], self.layers)

    def _regularisers(self, found: FixedPoint, canvas_mask: Tensor) -> dict[str, Term]:
        """ℓ_init = ‖f(z*) − f(0)‖₁ (DEQNAR, equation 5) and the Jacobian penalty."""
        terms, positions, function = {}, canvas_mask.sum(), found.function
        if self.initial:
            with torch.no_grad():  # f(z*) is the target of f(0) and gets no gradient
                equilibrium = function(found.state)
            loss = initial_condition_loss(function(torch.zeros_like(found.state)), equilibrium, canvas_mask)
            terms["initial"] = Term(loss * positions, positions, self.initial)
        if self.jacobian:
            loss = jacobian_penalty(function, found.state, canvas_mask)
            terms["jacobian"] = Term(loss * positions, positions, self.jacobian)
        return terms


def combine(terms: dict[str, Term], reduce_counts: ReduceCounts | None = None) -> dict[str, Tensor]:
    """The loss, which is the weighted sum of the means of the terms, and these means by name."""
    counts = torch.stack([term.count for term in terms.values()]).to(torch.float32)
    counts = (counts if reduce_counts is None else reduce_counts(counts)).clamp_min(torch.finfo(torch.float32).tiny)
    means = {name: term.total / count for (name, term), count in zip(terms.items(), counts, strict=True)}
    loss = sum(term.weight * means[name] for name, term in terms.items() if term.weight)
    return {"loss": loss, **means}


@torch.no_grad()
def predict_masked(
    model: DeqNarForConditionalGeneration, source: Source, canvas: Canvas, own: OwnWords, max_nfe: int | None = None
) -> TargetScores:
    """The model's prediction on a canvas, restricted to the tokens of every row's own target."""
    found = model.solve(source, canvas, max_nfe=max_nfe)
    return model.length_model.score_targets(model, found.value, canvas.mask, own.words)


def repeated_dropout(device: torch.device) -> AbstractContextManager:
    """Context manager: what follows it draws the same random numbers, and therefore the same dropout masks."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def parse_objective(name: str, **settings: Any) -> Objective:
    """The `Objective` with a name such as 'ctc+glat': at most one target, one input and one likelihood, in any order.

    The defaults are `raw`, `masked` and `ce`.

    Args:
        settings: fields of `Objective`.

    >>> parse_objective("ctc+glat").input.__name__
    'glancing'
    """
    likelihoods = {lengths.likelihood: lengths.likelihood for lengths in LENGTH_MODELS.values()}
    kinds: dict[str, dict[str, Any]] = {"target": TARGETS, "input": INPUTS, "likelihood": likelihoods}
    chosen = {"target": "raw", "input": "masked", "likelihood": "ce"}
    named: dict[str, str] = {}
    for word in name.split("+"):
        kind = next((kind for kind, members in kinds.items() if word in members), None)
        if kind is None:
            known = "; ".join(f"{kind}s: {', '.join(members)}" for kind, members in kinds.items())
            raise ValueError(f"objective '{name}': '{word}' is unknown. Choose among {known}.")
        if kind in named:
            raise ValueError(f"objective '{name}': {named[kind]} and {word} are both {kind}s; give one.")
        named[kind] = word
    chosen |= named
    length_model = next(one for one in LENGTH_MODELS.values() if chosen["likelihood"] == one.likelihood)
    if length_model.has_own_alignment and TARGETS[chosen["target"]] in (aligned, order_agnostic):
        raise ValueError(
            f"objective '{name}': {chosen['likelihood']} has its own alignment, so {chosen['target']} has no effect; "
            "leave one of them out."
        )
    return Objective(name, *(kinds[kind][chosen[kind]] for kind in kinds), **settings)


def length_model_of(objective: Objective) -> str:
    """The length model whose likelihood is that of the objective."""
    return next(name for name, lengths in LENGTH_MODELS.items() if objective.likelihood == lengths.likelihood)


def check_objective(objective: Objective, config: DeqNarConfig) -> None:
    """Refuse an objective whose likelihood is not that of the model's length model; the error names one that is."""
    fitting = LENGTH_MODELS[config.length].likelihood
    if objective.likelihood == fitting:
        return
    needed = length_model_of(objective)
    words = objective.name.split("+")
    words = words if objective.likelihood in words else [*words, objective.likelihood]
    instead = "+".join(fitting if word == objective.likelihood else word for word in words)
    raise ValueError(
        f"objective '{objective.name}' needs config.length = '{needed}', but this model has '{config.length}'; use "
        f"objective '{instead}', or train a model with length='{needed}'."
    )

"""An objective: proxy target × proxy input × likelihood, and the terms that keep equilibria easy to reach.

objective = parse_objective("ctc+glat")
terms = objective(model, batch, progress=step / total)
terms["loss"].backward()
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..alignment import viterbi_path
from ..configuration_deqnar import DeqNarConfig
from ..fixed_point import FixedPoint
from ..landscape import RandomState, initial_condition_loss, jacobian_penalty, mixed_initial_state, random_budget
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..transition_deqnar import BoundTransition
from .inputs import INPUTS, Prediction, ProxyInput, masked, needs_prediction
from .likelihood import LIKELIHOODS, Likelihood, Question, sentence_losses
from .projection import OwnWords, Reading, read
from .targets import TARGETS, ProxyTarget, choose_candidates, dynamically_distilled, reference

# Counts that terms are divided by → what they are to be divided by; processes that share a batch add theirs here.
Share = Callable[[Tensor], Tensor]


@dataclass
class Term:
    """One term of a loss: a sum over many things, how many they are, and its weight in the loss."""

    total: Tensor
    count: Tensor
    weight: float = 0.0


@dataclass
class Proxy:
    """The proxy target and input that were chosen for a batch, and what the decoder is shown of the source."""

    labels: Tensor  # rows, length: T; −100 at padding
    revealed: Tensor  # rows, canvas: where the canvas shows a token
    canvas: Tensor  # rows, canvas: Z
    canvas_mask: Tensor  # rows, canvas
    seen: Tensor  # rows, source, width: the encoder states, with latents if there are any
    projected: list[tuple[Tensor, Tensor]]  # their keys and values, for every solve of this batch
    chances: Tensor | None = None  # rows, canvas: P(t_i | X) from a masked canvas, where the model was asked
    errors: Tensor | None = None  # rows, canvas: where the model, asked so, was wrong


@dataclass
class Objective:
    """What is learned, as three choices, and how the dynamics are controlled (DEQNAR equation 6).

    Attributes:
        correction: weight of the loss at one random state of the path (stochastic dynamic correction).
        correction_share: share of the rows for which that loss is computed, chosen at random.
        initial: weight of the distance between the first evaluation and the equilibrium.
        jacobian: weight of the Jacobian penalty.
        random_nfe: solve with a random number of evaluations, 1 to the model's `max_nfe`.
        noisy_start: share of the rows whose solve starts from noise instead of zeros.
        glance_nfe: most evaluations of the solve that only finds out what the model says unseen; those of any other
            solve if None. A few are enough to see which words are wrong.
        gamma, beta: of Dynamic KD; one γ per candidate. The defaults are those of the paper for teachers of the sizes
            tiny, small, base and big, and the raw target.
    """

    name: str
    target: ProxyTarget
    input: ProxyInput
    likelihood: Likelihood
    label_smoothing: float = 0.0
    correction: float = 0.0
    correction_share: float = 1.0
    initial: float = 0.0
    jacobian: float = 0.0
    random_nfe: bool = False
    noisy_start: float = 0.0
    glance_nfe: int | None = None
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
        share: Share | None = None,
    ) -> dict[str, Tensor]:
        """The loss to minimise, and every term of it for the log.

        Args:
            progress: share of training that is done; some choices change with it.
            max_nfe: most evaluations of the solve; the model's own if not given.
            share: see `Share`; by default the batch is all there is.
        """
        return combine(self.terms(model, batch, progress, generator, max_nfe=max_nfe), share)

    def terms(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        *,
        max_nfe: int | None = None,
    ) -> dict[str, Term]:
        """The terms of the loss before they are divided and added."""
        core, config = model.model, model.config
        source_mask = core.check_source(batch["input_ids"], batch.get("attention_mask"), None)
        memory = core.encode(batch["input_ids"], source_mask)
        labels = batch["labels"]
        if self.target is dynamically_distilled and "candidates" in batch:  # validation data has none
            labels = self._choose(model, batch, memory, source_mask, max_nfe)
        terms: dict[str, Term] = {}
        proxy = self.choose_proxy(model, memory, source_mask, labels, progress, generator, max_nfe, terms)
        question = Question(
            proxy.labels, proxy.revealed, proxy.canvas_mask, config.blank_token_id, self.label_smoothing
        )

        bound = core.bind(proxy.canvas, proxy.canvas_mask, proxy.seen, source_mask, proxy.projected)
        equilibrium_seeking = config.refinement != "stacked"
        path = RandomState(bound.context.injection, generator) if self.correction and equilibrium_seeking else None
        if self.random_nfe and equilibrium_seeking:
            max_nfe = random_budget(max_nfe or config.max_nfe, generator)
        start = None
        if self.noisy_start and equilibrium_seeking:
            start = mixed_initial_state(torch.zeros_like(bound.context.injection), self.noisy_start, generator)
        found = core.refine(bound, proxy.canvas_mask, initial_state=start, max_nfe=max_nfe, observe=path)

        terms["nat"] = Term(*self.likelihood(found.value, model.lm_head.weight, question), weight=1.0)
        if equilibrium_seeking:
            if path is not None:
                terms["correction"] = self._correct(model, bound, path, question, generator)
            terms |= self._smooth(bound, proxy.canvas_mask, found)
            rows = torch.tensor(len(labels), device=labels.device)
            for name in ("nfe", "residual", "converged"):
                terms[name] = Term(getattr(found, name).to(found.residual.dtype).sum(), rows)
        return terms

    def choose_proxy(
        self,
        model: DeqNarForConditionalGeneration,
        memory: Tensor,
        source_mask: Tensor,
        labels: Tensor,
        progress: float = 0.0,
        generator: torch.Generator | None = None,
        max_nfe: int | None = None,
        terms: dict[str, Term] | None = None,
    ) -> Proxy:
        """Choose T and Z for a batch; the terms of length and latents that come with T are added to `terms`."""
        core, config = model.model, model.config
        terms = {} if terms is None else terms
        label_mask = core.check_labels(labels)
        lengths = label_mask.sum(dim=1)
        seen = memory
        if core.length_head is not None:
            loss = core.length_head.loss(core.length_head(memory, source_mask), source_mask.sum(dim=1), lengths)
            rows = torch.tensor(len(labels), device=labels.device)
            terms["length"] = Term(loss * rows, rows, config.length_loss_factor)
        if core.latent_head is not None:
            seen, divergence = core.latent_head(memory, source_mask, core.embed(labels.clamp_min(0)), label_mask)
            terms["latent"] = Term(divergence.sum(), lengths.sum(), config.latent_kl_factor)

        canvas_lengths = core.canvas_lengths(source_mask, labels, None)
        blank_canvas = core.masked_canvas(canvas_lengths, labels.shape[1] if config.length == "predict" else None)
        canvas_mask = core.check_canvas(blank_canvas, None)
        projected = core.project(seen)
        if not self.looks_first(config):
            written = blank_canvas if config.length == "ctc" else labels.clamp_min(0)
            revealed = self.input(written, canvas_mask, None, progress, generator)
            return Proxy(labels, revealed, torch.where(revealed, written, blank_canvas), canvas_mask, seen, projected)

        own = OwnWords.of(labels, config.blank_token_id)
        if self.glance_nfe is not None:
            max_nfe = min(self.glance_nfe, config.max_nfe if max_nfe is None else max_nfe)
        reading = read_unseen(model, blank_canvas, canvas_mask, seen, source_mask, own.words, max_nfe, projected)
        places = self.target(own.labels, lengths, reading.log_probabilities, 0, progress)
        labels = own.tokens(places)
        if config.length == "ctc":  # the target position by position: its likeliest path
            places, _ = viterbi_path(reading.log_probabilities, places, canvas_lengths, lengths, 0)
        places = places.clamp_min(0)
        written = own.tokens(places)
        chances = reading.log_probabilities.gather(2, places[:, :, None])[:, :, 0].exp()
        revealed = self.input(written, canvas_mask, Prediction(reading.tokens, chances), progress, generator)
        canvas = torch.where(revealed, written, blank_canvas)
        errors = (reading.tokens != written) & canvas_mask
        return Proxy(labels, revealed, canvas, canvas_mask, seen, projected, chances, errors)

    @torch.no_grad()
    def _choose(
        self,
        model: DeqNarForConditionalGeneration,
        batch: dict[str, Tensor],
        memory: Tensor,
        source_mask: Tensor,
        max_nfe: int | None = None,
    ) -> Tensor:
        """The candidate of every row that is easy to say and near the others.

        The batch holds `candidates` (rows × candidates × length, −100 at padding) and `similarity` (see
        `choose_candidates`).
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
        losses, features = [], None
        for labels in candidates.unbind(dim=1):
            core.check_labels(labels)
            if features is None or config.length == "predict":  # a CTC canvas is the same for all
                lengths = core.canvas_lengths(source_mask, labels, None)
                canvas = core.masked_canvas(lengths, labels.shape[1] if config.length == "predict" else None)
                canvas_mask = core.check_canvas(canvas, None)
                features = unseen_features(model, canvas, canvas_mask, seen, source_mask, max_nfe)
            own = OwnWords.of(labels, config.blank_token_id)
            reading = read(features, canvas_mask, model.lm_head.weight, own.words)
            tokens = (labels >= 0).sum(dim=1)
            losses.append(sentence_losses(reading, own, canvas_mask, config.length == "ctc") / tokens)
        gamma = torch.tensor(self.gamma, device=candidates.device)
        chosen = choose_candidates(torch.stack(losses, dim=1), batch["similarity"], gamma, self.beta)
        return candidates[torch.arange(len(candidates), device=chosen.device), chosen]

    def looks_first(self, config: DeqNarConfig) -> bool:
        """Whether the model is asked what it says unseen, before anything is chosen or revealed."""
        if needs_prediction(self.input) or self.target not in (reference, dynamically_distilled):
            return True
        return config.length == "ctc" and self.input is not masked  # without it a target has no place on the canvas

    def _correct(
        self,
        model: DeqNarForConditionalGeneration,
        bound: BoundTransition,
        path: RandomState,
        question: Question,
        generator: torch.Generator | None,
    ) -> Term:
        """The loss at one random state of the path of every row, or of some rows."""
        state = path.value
        if self.correction_share < 1:
            count = max(1, math.ceil(self.correction_share * len(state)))
            rows = torch.randperm(len(state), generator=generator, device=state.device)[:count].sort().values
            bound, question, state = bound.select(rows), question.select(rows), state[rows]
        features = bound.transition.features(state, bound.context)
        return Term(*self.likelihood(features, model.lm_head.weight, question), weight=self.correction)

    def _smooth(self, bound: BoundTransition, canvas_mask: Tensor, found: FixedPoint) -> dict[str, Term]:
        """The terms that shape the path itself."""
        terms, positions = {}, canvas_mask.sum()
        if self.initial:
            with torch.no_grad():  # after a single evaluation f(z) is f(0), and there is nothing to learn
                end = bound(found.state)
            loss = initial_condition_loss(bound(torch.zeros_like(found.state)), end, canvas_mask)
            terms["initial"] = Term(loss * positions, positions, self.initial)
        if self.jacobian:
            loss = jacobian_penalty(bound, found.state, canvas_mask)
            terms["jacobian"] = Term(loss * positions, positions, self.jacobian)
        return terms


def combine(terms: dict[str, Term], share: Share | None = None) -> dict[str, Tensor]:
    """Every term as an average, and first of all the loss: their weighted sum."""
    counts = torch.stack([term.count for term in terms.values()]).to(torch.float32)
    counts = (counts if share is None else share(counts)).clamp_min(torch.finfo(torch.float32).tiny)
    averages = {name: term.total / count for (name, term), count in zip(terms.items(), counts, strict=True)}
    loss = sum(term.weight * averages[name] for name, term in terms.items() if term.weight)
    return {"loss": loss, **averages}


@torch.no_grad()
def unseen_features(
    model: DeqNarForConditionalGeneration,
    canvas: Tensor,
    canvas_mask: Tensor,
    seen: Tensor,
    source_mask: Tensor,
    max_nfe: int | None = None,
    projected: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """The equilibrium of a canvas on which nothing is revealed: rows × canvas × width."""
    bound = model.model.bind(canvas, canvas_mask, seen, source_mask, projected)
    return model.model.refine(bound, canvas_mask, max_nfe=max_nfe).value


def read_unseen(
    model: DeqNarForConditionalGeneration,
    canvas: Tensor,
    canvas_mask: Tensor,
    seen: Tensor,
    source_mask: Tensor,
    words: Tensor,
    max_nfe: int | None = None,
    projected: list[tuple[Tensor, Tensor]] | None = None,
) -> Reading:
    """What the model says when nothing is revealed, about the given words of every row."""
    features = unseen_features(model, canvas, canvas_mask, seen, source_mask, max_nfe, projected)
    return read(features, canvas_mask, model.lm_head.weight, words)


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

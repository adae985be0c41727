"""`DeqNarTrainer`: learns an objective with equilibria."""

import torch
from torch import Tensor, nn

from ..landscape import spectral_radius
from ..objectives.objective import Objective, Term, check_objective, parse_objective
from ..objectives.targets import dynamically_distilled
from .arguments import DeqNarTrainingArguments
from .translation_trainer import TranslationTrainer


class DeqNarTrainer(TranslationTrainer):
    """Trains a `DeqNarForConditionalGeneration` with the objective named in its arguments.

    >>> trainer = DeqNarTrainer(model, arguments, train_dataset=pairs, processing_class=tokenizer)   # doctest: +SKIP
    """

    args: DeqNarTrainingArguments

    def __init__(self, model: nn.Module, args: DeqNarTrainingArguments, **options) -> None:
        self.objective = objective_of(args)
        check_objective(self.objective, model.config)
        model.config.objective = args.objective
        super().__init__(model, args, **options)

    def compute_terms(self, batch: dict[str, Tensor], progress: float, generator: torch.Generator) -> dict[str, Term]:
        if self.model.training and self.objective.target is dynamically_distilled and "candidates" not in batch:
            raise ValueError(f"objective '{self.args.objective}' needs training data with candidates; see distill.")
        budget = self._budget() if self.model.training else None
        return self.objective.terms(self.model, batch, progress, generator, max_nfe=budget)

    def _budget(self) -> int | None:
        """Most evaluations of a solve at this point of training."""
        steps = self.args.denoising_steps
        if steps is None:
            steps = self.state.max_steps // 2 if self.model.config.refinement == "explicit" else 0
        return 1 if self.state.global_step < steps else self.args.max_nfe

    def validation_figures(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """The spectral radius of the transition in the equilibria of a few sentences, on average."""
        core, rows = self.model.model, slice(self.args.spectral_radius_rows)
        if self.args.spectral_radius_rows == 0 or self.model.config.refinement == "stacked":
            return {}
        input_ids, labels = batch["input_ids"][rows], batch["labels"][rows]
        source_mask = core.check_source(input_ids, batch["attention_mask"][rows], None)
        seen = core.encode(input_ids, source_mask)
        if core.latent_head is not None:
            seen, _ = core.latent_head(seen, source_mask, None, None)
        canvas = core.masked_canvas(core.canvas_lengths(source_mask, labels, None))
        canvas_mask = core.check_canvas(canvas, None)
        bound = core.bind(canvas, canvas_mask, seen, source_mask)
        state = core.refine(bound, canvas_mask).state
        return {"spectral_radius": float(spectral_radius(bound, state, canvas_mask).mean())}


def objective_of(args: DeqNarTrainingArguments) -> Objective:
    """The objective that the arguments describe."""
    names = ("correction", "correction_share", "initial", "jacobian", "random_nfe", "beta")
    settings = {name: getattr(args, name) for name in names}
    if args.gamma is not None:
        settings["gamma"] = tuple(args.gamma)
    return parse_objective(args.objective, label_smoothing=args.label_smoothing_factor, **settings)

"""`DeqNarTrainer`: learns an objective with equilibria."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.stability import spectral_radius
from ..objectives.inputs import masked
from ..objectives.objective import Objective, Term, check_objective, parse_objective
from ..objectives.states import SupervisedStates
from ..objectives.targets import dynamically_distilled
from .arguments import DeqNarTrainingArguments
from .base_trainer import TranslationTrainer

EQUILIBRIUM_OPTIONS = (
    "correction",
    "initial",
    "jacobian",
    "random_nfe",
    "noisy_start",
    "denoising_steps",
    "max_nfe",
    "glance_nfe",
)
# Options that not every length model has, and the attribute of those that do.
LENGTH_CAPABILITIES = {"overlap_weight": "has_overlap_loss", "sampled_words": "has_sampled_loss"}
NO_REGULARISERS = {"correction": 0.0, "initial": 0.0, "jacobian": 0.0, "random_nfe": False, "noisy_start": 0.0}


class DeqNarTrainer(TranslationTrainer):
    """Trains a `DeqNarForConditionalGeneration` with the objective named in its arguments.

    >>> trainer = DeqNarTrainer(model, arguments, train_dataset=pairs, processing_class=tokenizer)   # doctest: +SKIP
    """

    args: DeqNarTrainingArguments

    def __init__(self, model: nn.Module, args: DeqNarTrainingArguments, **options) -> None:
        self.objective = objective_of(args)
        check_objective(self.objective, model.config)
        if not model.config.seeks_equilibrium:
            for name in EQUILIBRIUM_OPTIONS:
                if getattr(args, name):
                    raise ValueError(
                        f"{name}={getattr(args, name)} has no effect: a stacked model seeks no equilibrium."
                    )
        if args.glance_nfe is not None and not self.objective.needs_masked_prediction(model.config):
            raise ValueError(
                f"glance_nfe={args.glance_nfe} has no effect: objective '{args.objective}' needs no first prediction."
            )
        columns = getattr(options.get("train_dataset"), "column_names", None)
        if self.objective.target is dynamically_distilled and columns is not None and "candidates" not in columns:
            raise ValueError(
                f"objective '{args.objective}' needs a column of candidates; there are {', '.join(columns)}."
            )
        if self.objective.states is not None:
            check_states(model.config, args)
        if args.layer_weight and (model.config.seeks_equilibrium or len(model.model.transition.layers) < 2):
            raise ValueError(
                f"layer_weight={args.layer_weight} has no effect: it needs refinement='stacked' and two or more "
                "decoder_layers; for a loss at several states of an equilibrium model use state_weights."
            )
        for option, capability in LENGTH_CAPABILITIES.items():
            if getattr(args, option) and not getattr(model.length_model, capability):
                known = " or ".join(name for name, lengths in LENGTH_MODELS.items() if getattr(lengths, capability))
                raise ValueError(
                    f"{option}={getattr(args, option)} needs config.length={known}, but this model has "
                    f"'{model.config.length}'; leave it out."
                )
        # Validation measures the likelihood at the equilibrium, without noise and without the help of training.
        self.validation_objective = replace(
            self.objective,
            label_smoothing=0.0,
            sampled_words=0,
            overlap=0.0,
            layers=0.0,
            random_nfe=False,
            noisy_start=0.0,
            glance_nfe=None,
            states=None,
            equilibrium=1.0,
        )
        # The denoising stage has one evaluation, so path regularisers do not apply.
        self.denoising_objective = replace(self.objective, **NO_REGULARISERS)
        if model.model.transition.denoises_first:
            self.denoising_objective = replace(self.denoising_objective, input=masked)
        model.config.objective = args.objective
        super().__init__(model, args, **options)

    def compute_terms(
        self, model: nn.Module, batch: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> dict[str, Term]:
        objective, budget = self._stage() if self.model.training else (self.validation_objective, None)

        def terms(inner: DeqNarForConditionalGeneration) -> dict[str, Term]:
            return objective.terms(inner, batch, progress, generator, max_nfe=budget)

        return model(objective=terms)

    def _stage(self) -> tuple[Objective, int | None]:
        """What is learned at this point of training, and with how many evaluations of a solve at most.

        Explicit models first learn to denoise a canvas on which nothing is revealed (DEQNAR section 3.5).
        """
        steps = self.args.denoising_steps
        if steps is None:
            steps = self.state.max_steps // 2 if self.model.model.transition.denoises_first else 0
        if self.state.global_step >= steps:
            return self.objective, self.args.max_nfe
        return self.denoising_objective, 1

    def validation_figures(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """The spectral radius of the transition in the equilibria of a few sentences, on average."""
        rows = slice(self.args.spectral_radius_rows)
        if self.args.spectral_radius_rows == 0 or not self.model.config.seeks_equilibrium:
            return {}
        source = self.model.prepare(batch["input_ids"][rows], batch["attention_mask"][rows])
        canvas = self.model.lay_out(source, batch["labels"][rows])
        found = self.model.solve(source, canvas)
        return {"spectral_radius": float(spectral_radius(found.function, found.state, canvas.mask).mean())}


def check_states(config: DeqNarConfig, args: DeqNarTrainingArguments) -> None:
    """Refuse supervised states that a model cannot have, naming both options."""
    if not config.is_self_conditioned:
        raise ValueError(
            f"state_weights={args.state_weights} needs a self-conditioned model, but config.self_conditioning is "
            f"'{config.self_conditioning}'; set it to expected or argmax."
        )
    if config.gradient == "ift":
        raise ValueError(
            f"state_weights={args.state_weights} takes losses before a fixed point is reached, which gradient='ift' "
            "needs; use another gradient."
        )


def objective_of(args: DeqNarTrainingArguments) -> Objective:
    """The objective that the arguments describe."""
    names = ("correction", "correction_share", "initial", "jacobian", "random_nfe", "noisy_start", "glance_nfe", "beta")
    names = (*names, "sampled_words")
    settings = {name: getattr(args, name) for name in names}
    settings |= {"overlap": args.overlap_weight, "layers": args.layer_weight}
    if args.gamma is not None:
        settings["gamma"] = tuple(args.gamma)
    if args.state_weights is not None:
        settings["states"] = SupervisedStates(
            weights=tuple(args.state_weights),
            segment_nfe=args.segment_nfe,
            truth_share=(args.truth_share[0], args.truth_share[-1]),
            damage_share=args.damage_share,
            detach=args.detach_states,
            random_segments=args.random_segments,
        )
        settings["equilibrium"] = args.equilibrium_weight
    return parse_objective(args.objective, label_smoothing=args.label_smoothing_factor, **settings)

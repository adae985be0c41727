"""Training arguments, as dataclasses that are also command-line flags and YAML settings."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import yaml
from transformers import Seq2SeqTrainingArguments
from transformers.trainer_utils import IntervalStrategy

from ..models.deqnar.configuration_deqnar import PRESETS, DeqNarConfig
from ..utils.arguments import parse_arguments as parse_arguments
from ..utils.arguments import parse_settings as parse_settings
from ..utils.suggestions import did_you_mean

UNSET = "unset"
PATIENCE = 10  # evaluations without improvement after which a run has reached its plateau
LONGEST_WARMUP = 10_000  # updates, as in DEQNAR and Fairseq's recipes

# Fields of Seq2SeqTrainingArguments that have no effect here, and what has.
WITHOUT_EFFECT = {
    "per_device_train_batch_size": "batches are made by max_tokens",
    "per_device_eval_batch_size": "batches are made by max_tokens",
    "auto_find_batch_size": "batches are made by max_tokens",
    "train_sampling_strategy": "batches are made by max_tokens, of sentences of similar length",
    "sortish_sampler": "batches are made by max_tokens, of sentences of similar length",
    "dataloader_drop_last": "every batch is used",
    "predict_with_generate": "validation always generates",
    "generation_max_length": "set it in generation_config",
    "generation_num_beams": "set length_beams, ctc_beam_size or dag_beam_size in generation_config",
    "resume_from_checkpoint": "training resumes automatically from the last checkpoint in output_dir",
    "load_best_model_at_end": "average_best selects the final weights",
}


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the defaults of the field.

    The optimiser is Adam(0.9, 0.98) with learning rate 5e-4, a tenth of the updates (at most 10,000) of warm-up,
    inverse-square-root decay and weight decay 0.01; batches are made by a budget of tokens, and the best evaluations
    are averaged. The budget of 100 epochs reaches the plateau of small and middle-sized corpora, and `hf-deqnar train`
    and `teacher` stop there: with validation data they evaluate after every epoch, and stop after `PATIENCE`
    evaluations without improvement.
    """

    max_tokens: int = field(
        default=4096, metadata={"help": "Most rows × longest side of a batch, over all processes together."}
    )
    average_best: int = field(
        default=5, metadata={"help": "Number of best checkpoints to average; 0 uses the last weights."}
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={
            "help": "Stop after this many evaluations without improvement; 0: never. Unset: 10 on the command line if "
            "there is validation data and max_steps is not set, else never."
        },
    )
    num_train_epochs: float = field(
        default=100.0, metadata={"help": "Most epochs; max_steps overrides it, and early stopping may come first."}
    )
    eval_strategy: str = field(
        default=UNSET,
        metadata={
            "help": "When to validate: no, steps or epoch. Unset: epoch on the command line if there is validation "
            "data, else no."
        },
    )
    learning_rate: float = field(default=5e-4, metadata={"help": "Learning rate after warm-up."})
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "Learning-rate schedule."})
    warmup_steps: float = field(
        default=0.1,
        metadata={"help": "Warm-up updates; a value below 1 is a share of all updates, of at most 10,000 updates."},
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's β₂."})
    optimizer: str | None = field(
        default=None,
        metadata={
            "help": "muon: orthogonal steps for the matrices of layers, Adam's for the rest; try two or three times "
            "Adam's learning rate. Default: the optimizer named by optim (AdamW)."
        },
    )
    label_smoothing_factor: float | None = field(default=0.1, metadata={"help": "ε of label smoothing."})
    ema_decay: float | None = field(
        default=None,
        metadata={
            "help": "Evaluate and save an exponential moving average of the weights with this decay, such as 0.999. "
            "Default: the weights themselves."
        },
    )
    subword_dropout: float = field(
        default=0.0,
        metadata={
            "help": "Probability with which a BPE token of a source is split into the two it was merged from, and these"
            " again, anew in every epoch; 0.1 is usual for small data."
        },
    )
    subword_dropout_target: float = field(default=0.0, metadata={"help": "The same for targets."})
    metric_for_best_model: str = field(default="bleu", metadata={"help": "Metric that selects the best checkpoint."})
    logging_steps: float = field(default=100, metadata={"help": "Updates between two logs."})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "Restore the state of early stopping when training resumes."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "Number of checkpoints to keep for resuming."})
    ddp_find_unused_parameters: bool | None = field(
        default=False,
        metadata={"help": "All parameters are used in every step, so DDP need not search for unused ones."},
    )
    use_cache: bool = field(default=False, metadata={"help": "Training needs no cache of keys and values."})
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether a larger metric_for_best_model is better; unset: for BLEU and chrF."},
    )

    def __post_init__(self) -> None:
        self.eval_strategy_is_unset = self.eval_strategy == UNSET
        if self.eval_strategy_is_unset:
            self.eval_strategy = "no"
        if self.greater_is_better is None:  # transformers would treat a loss as a score to maximise
            self.greater_is_better = self.metric_for_best_model.endswith(("bleu", "chrf"))
        if not torch.accelerator.is_available():  # otherwise torchrun processes would not form a process group
            self.use_cpu = True
        super().__post_init__()
        defaults = {entry.name: entry.default for entry in fields(Seq2SeqTrainingArguments)}
        for name, reason in WITHOUT_EFFECT.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)} has no effect: {reason}.")
        if self.optimizer not in (None, "muon"):
            raise ValueError(f"optimizer '{self.optimizer}' is unknown; choose muon, or leave it unset to use optim.")
        if self.optimizer is not None and self.optim != type(self).optim:
            raise ValueError(f"optimizer={self.optimizer} and optim={self.optim.value} are two optimisers; keep one.")
        if self.optimizer is not None and self.optim_args:
            raise ValueError(f"optim_args={self.optim_args} has no effect: it is for optim, not for optimizer.")
        if self.save_only_model:
            raise ValueError("save_only_model=True: training cannot resume from such checkpoints; leave it out.")
        self.check_at_least(1, "max_tokens")
        self.check_at_least(0, "average_best", "label_smoothing_factor", "early_stopping_patience")
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"ema_decay must be above 0 and below 1, not {self.ema_decay}.")
        for name in ("subword_dropout", "subword_dropout_target"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")
        if self.label_smoothing_factor is not None and self.label_smoothing_factor >= 1:
            raise ValueError(f"label_smoothing_factor must be below 1, not {self.label_smoothing_factor}.")
        if self.early_stopping_patience and self.eval_strategy == "no" and not self.eval_strategy_is_unset:
            raise ValueError("early_stopping_patience needs evaluations; set eval_strategy to steps or epoch.")

        if (self.subword_dropout or self.subword_dropout_target) and self.dataloader_persistent_workers:
            raise ValueError(
                "dataloader_persistent_workers=True would repeat the segmentations of subword_dropout in every epoch; "
                "leave one of them out."
            )

    def set_evaluation(self, has_validation_data: bool) -> None:
        """Evaluate after every epoch and stop at the plateau, where nothing else is set and there is validation data.

        A given `max_steps` is a budget that is used up.
        """
        if not has_validation_data:
            if self.early_stopping_patience:
                raise ValueError("early_stopping_patience needs evaluations; give validation data.")
            return
        if self.eval_strategy_is_unset:
            self.eval_strategy = IntervalStrategy.EPOCH
        if self.early_stopping_patience is None and self.max_steps <= 0:
            self.early_stopping_patience = PATIENCE

    def get_warmup_steps(self, num_training_steps: int) -> int:
        """Updates of warm-up; those of a share are limited, because a long run needs no longer warm-up."""
        updates = super().get_warmup_steps(num_training_steps)
        return updates if self.warmup_steps >= 1 else min(updates, LONGEST_WARMUP)

    def check_at_least(self, least: float, *names: str) -> None:
        """Raise ValueError for fields below their minimum."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}.")


WITHOUT_SMOOTHING = {"ctc", "dag"}  # likelihoods that sum over paths


@dataclass
class DeqNarTrainingArguments(TranslationTrainingArguments):
    """`TranslationTrainingArguments`, with the options of objectives and equilibrium models.

    >>> DeqNarTrainingArguments("runs/example", objective="ctc+glat", max_tokens=4096).lr_scheduler_type.value
    'inverse_sqrt'
    """

    objective: str = field(
        default="glat", metadata={"help": "What is learned: target+input+likelihood, such as ctc+glat or axe."}
    )
    sampled_words: int = field(
        default=0,
        metadata={
            "help": "Normalise a CTC loss over the words of the batch and this many others, drawn for every batch, "
            "which is faster; 0: over the whole vocabulary."
        },
    )
    overlap_weight: float = field(
        default=0.0,
        metadata={
            "help": "Share of the loss that is one minus the expected bigram overlap with the target, for fine-tuning "
            "CTC models and graphs; the likelihood has the remaining share."
        },
    )
    layer_weight: float = field(
        default=0.0,
        metadata={"help": "Weight of the mean loss at the outputs of the inner layers of a stacked decoder."},
    )
    correction: float = field(
        default=0.0, metadata={"help": "Weight of the loss at one random state of the path to the equilibrium."}
    )
    correction_share: float = field(
        default=0.25, metadata={"help": "Share of the rows for which that loss is computed."}
    )
    initial: float = field(
        default=0.0, metadata={"help": "Weight of the distance from the first evaluation to the equilibrium."}
    )
    jacobian: float = field(default=0.0, metadata={"help": "Weight of the Jacobian penalty."})
    random_nfe: bool = field(
        default=False, metadata={"help": "Give every solve a random number of evaluations, from 1 to the most."}
    )
    noisy_start: float = field(
        default=0.0, metadata={"help": "Share of the sentences whose solve starts from noise instead of zeros."}
    )
    max_nfe: int | None = field(
        default=None, metadata={"help": "Most evaluations of a solve while training; the model's own if unset."}
    )
    glance_nfe: int | None = field(
        default=None,
        metadata={"help": "Maximum NFE of the solve that selects revealed tokens. Default: max_nfe."},
    )
    denoising_steps: int | None = field(
        default=None,
        metadata={
            "help": "Number of initial updates with a single decoder evaluation (and, if explicit, "
            "nothing is revealed); then equilibria are learned. Unset: half of all updates if explicit, else none."
        },
    )
    state_weights: list[float] | None = field(
        default=None,
        metadata={
            "help": "Weights of losses at the first states of a path, such as 0.2 0.4 0.4, of self-conditioned models. "
            "Unset: the loss is taken at the equilibrium only."
        },
    )
    segment_nfe: int = field(
        default=1,
        metadata={"help": "Evaluations between two of these states, with the full gradient through all of them."},
    )
    detach_states: bool = field(
        default=True,
        metadata={
            "help": "Detach each of these states before the next evaluation. Without it the gradient flows through the "
            "whole path, which needs more memory."
        },
    )
    truth_share: list[float] | None = field(
        default=None,
        metadata={
            "help": "Share of the wrong positions of a state that show the truth to the next segment; two numbers: a "
            "range from which it is drawn for every sentence. Default: 0.3."
        },
    )
    damage_share: float = field(
        default=0.0,
        metadata={"help": "Share of the positions that show a wrong token, a blank or a repetition instead."},
    )
    random_segments: bool = field(
        default=False, metadata={"help": "Draw the number of segments of every update, from 1 to all."}
    )
    equilibrium_weight: float = field(
        default=0.0, metadata={"help": "With state_weights: weight of the loss at the equilibrium; 0: no solve."}
    )
    gamma: list[float] | None = field(
        default=None,
        metadata={
            "help": "γ of each Dynamic KD candidate, the reference last. Default: those of the MPLE paper for five "
            "candidates, else 1."
        },
    )
    beta: float = field(default=0.2, metadata={"help": "Weight of dynamic_kd's distortion."})
    spectral_radius_rows: int = field(
        default=8, metadata={"help": "Validation sentences whose spectral radius is logged; 0 for none."}
    )
    label_smoothing_factor: float | None = field(
        default=None,
        metadata={"help": "ε of label smoothing. Unset: 0.1, and 0 for CTC and graphs, where it has no meaning."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.objective.split("+")
        if self.label_smoothing_factor is None:
            self.label_smoothing_factor = 0.0 if WITHOUT_SMOOTHING & {*words} else 0.1
        if self.label_smoothing_factor and WITHOUT_SMOOTHING & {*words}:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} has no meaning for CTC and graphs (objective "
                f"'{self.objective}'); leave it unset."
            )
        for name in ("gamma", "beta"):
            if getattr(self, name) != getattr(type(self), name) and "dynamic_kd" not in words:
                raise ValueError(f"{name} has no effect on objective '{self.objective}'; it is for dynamic_kd.")
        if self.subword_dropout_target and "dynamic_kd" in words:
            raise ValueError(
                f"subword_dropout_target={self.subword_dropout_target} has no effect on the candidates of objective "
                f"'{self.objective}'; leave it out."
            )
        self.check_at_least(1, "max_nfe", "glance_nfe")
        self.check_at_least(0, "correction", "initial", "jacobian", "spectral_radius_rows", "denoising_steps")
        self.check_at_least(0, "layer_weight", "sampled_words")
        if not 0 <= self.overlap_weight <= 1:
            raise ValueError(f"overlap_weight must be a share from 0 to 1, not {self.overlap_weight}.")
        self._check_states()
        if not 0 < self.correction_share <= 1:
            raise ValueError(f"correction_share must be above 0 and at most 1, not {self.correction_share}.")
        if self.correction_share != type(self).correction_share and not self.correction:
            raise ValueError(f"correction_share={self.correction_share} has no effect without correction.")
        if not 0 <= self.noisy_start <= 1:
            raise ValueError(f"noisy_start must be from 0 to 1, not {self.noisy_start}.")

    def _check_states(self) -> None:
        if self.state_weights is None:
            for name, default in STATE_DEFAULTS.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name}={getattr(self, name)} has no effect without state_weights.")
            return
        if not self.state_weights or min(self.state_weights) < 0 or sum(self.state_weights) == 0:
            raise ValueError(f"state_weights={self.state_weights} must be numbers from 0, and not all 0.")
        if self.truth_share is None:
            self.truth_share = [0.3]
        if not 1 <= len(self.truth_share) <= 2 or not 0 <= self.truth_share[0] <= self.truth_share[-1] <= 1:
            raise ValueError(f"truth_share={self.truth_share} must be a share from 0 to 1, or a range of two.")
        if not 0 <= self.damage_share <= 1:
            raise ValueError(f"damage_share must be from 0 to 1, not {self.damage_share}.")
        self.check_at_least(1, "segment_nfe")
        self.check_at_least(0, "equilibrium_weight")
        if not self.equilibrium_weight:
            for name in ("correction", "initial", "jacobian", "random_nfe", "noisy_start", "max_nfe"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect: with state_weights and equilibrium_weight=0 "
                        "training does not solve for an equilibrium."
                    )


STATE_DEFAULTS = {
    "segment_nfe": 1,
    "detach_states": True,
    "truth_share": None,
    "damage_share": 0.0,
    "random_segments": False,
    "equilibrium_weight": 0.0,
}


@dataclass
class ModelArguments:
    """Which model is trained."""

    model: str | None = field(
        default=None, metadata={"help": "Start from this model and its tokenizer; a new one is made if unset."}
    )
    teacher: str | None = field(
        default=None,
        metadata={
            "help": "Start from this teacher's encoder, embeddings, decoder layers and tokenizer (Marian or Bart)."
        },
    )
    backbone: str | None = field(
        default=None, metadata={"help": "Start an equilibrium model from this trained stacked one, with its tokenizer."}
    )
    preset: str | None = field(
        default=None, metadata={"help": f"Size of a new model: {', '.join(PRESETS)}; tiny if unset."}
    )
    config: list[str] = field(
        default_factory=list,
        metadata={"help": "Fields of its configuration, such as length=ctc refinement=mixed (in YAML: a mapping)."},
    )

    def __post_init__(self) -> None:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(f"preset '{self.preset}' is unknown; choose one of {', '.join(PRESETS)}.")
        named = [name for name in ("model", "teacher", "backbone", "preset") if getattr(self, name) is not None]
        if len(named) > 1:
            given = " and ".join(f"{name}={getattr(self, name)}" for name in named)
            raise ValueError(f"{given} are mutually exclusive starting points; give one.")
        self.settings()

    @property
    def start(self) -> str | None:
        """Model that training starts from (its tokenizer is used); None for a new model."""
        return self.model or self.teacher or self.backbone

    def settings(self) -> dict[str, Any]:
        """`config` as values by field."""
        return read_settings(self.config, DeqNarConfig)


@dataclass
class CorpusArguments:
    """Training and validation corpora."""

    train_data: list[str] = field(
        metadata={"help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; several are concatenated."}
    )
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the target language."})
    validation_data: str | None = field(default=None, metadata={"help": "The same for validation."})
    validation_limit: int | None = field(
        default=None, metadata={"help": "Maximum number of validation pairs, evenly spaced."}
    )
    train_limit: int | None = field(default=None, metadata={"help": "Maximum number of training pairs."})
    max_length: int = field(default=128, metadata={"help": "Pairs with more tokens on a side are left out."})
    cache_dir: str | None = field(default=None, metadata={"help": "Cache folder of tokenized data."})

    def __post_init__(self) -> None:
        given: Any = self.train_data
        if isinstance(given, str):  # one file
            self.train_data = [given]
        for name in ("train_limit", "validation_limit", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.validation_limit is not None and self.validation_data is None:
            raise ValueError(f"validation_limit={self.validation_limit} has no effect without validation_data.")


SHARES = ("vary_names", "vary_listed_names", "vary_words", "vary_surface", "join_pairs")
AUGMENTATIONS = (*SHARES, "vary_numbers")


@dataclass
class DataArguments(CorpusArguments):
    """What it is trained on, and the tokenizer it is read with."""

    tokenizer: str | None = field(
        default=None, metadata={"help": "A tokenizer with <mask> and <blank>; one is trained if unset."}
    )
    vocab_size: int | None = field(default=None, metadata={"help": "Tokens of a new tokenizer; 8000 if unset."})
    vary_names: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training pairs with names that get another of the corpus's names, on both sides."
        },
    )
    vary_listed_names: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training pairs with names that get another of the corpus or of a list of English and "
            "German names and places, for English-German data."
        },
    )
    vary_words: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training pairs in which a word and its translation become others that were seen "
            "between the same words."
        },
    )
    vary_numbers: int = field(
        default=0, metadata={"help": "Further copies of every training pair with numbers, each with other numbers."}
    )
    vary_surface: float = field(
        default=0.0,
        metadata={
            "help": "Share of the training pairs in capitals, with a source in small letters, without final "
            "punctuation, or with typographic quotation marks."
        },
    )
    join_pairs: float = field(
        default=0.0, metadata={"help": "Share of the training pairs to which one or two others are appended."}
    )
    preprocessing_processes: int | None = field(
        default=None, metadata={"help": "Processes that compare the candidates of dynamic_kd with each other."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in SHARES:
            if not 0 <= getattr(self, option) <= 1:
                raise ValueError(f"{option} must be a share from 0 to 1, not {getattr(self, option)}.")
        if self.vary_numbers < 0:
            raise ValueError(f"vary_numbers must be at least 0, not {self.vary_numbers}.")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise ValueError(f"vocab_size={self.vocab_size} is for new tokenizers, but {self.tokenizer} is used.")


def read_settings(assignments: list[str], kind: type) -> dict[str, Any]:
    """Values by field of 'field=value' assignments; values are parsed as YAML, so 1e-3, true and null have types."""
    known = {entry.name for entry in fields(kind)}
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"config '{assignment}' is not of the form field=value.")
        if name not in known:
            advice = did_you_mean(name, known)
            raise ValueError(f"config '{name}' is not a field of {kind.__name__}{'; ' + advice if advice else '.'}")
        try:
            found[name] = as_number(yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ValueError(f"config '{assignment}': {' '.join(str(error).split())}") from error
    return found


def as_number(value: Any) -> Any:
    """YAML parses 1e-3 as a string."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value

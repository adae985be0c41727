"""What a training run is told: as fields of dataclasses, as flags, or in a YAML file."""

from dataclasses import dataclass, field, fields
from typing import Any

import torch
import yaml
from transformers import Seq2SeqTrainingArguments

from ..models.deqnar.configuration_deqnar import PRESETS, DeqNarConfig
from ..utils.arguments import parse_arguments as parse_arguments
from ..utils.arguments import parse_settings as parse_settings

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
    "generation_num_beams": "set length_beams or ctc_beam_size in generation_config",
    "resume_from_checkpoint": "a run goes on by itself from the last checkpoint in output_dir",
    "load_best_model_at_end": "average_best decides which weights are kept",
}


@dataclass
class TranslationTrainingArguments(Seq2SeqTrainingArguments):
    """`Seq2SeqTrainingArguments` with the defaults of the field.

    The optimiser is Adam(0.9, 0.98) with learning rate 5e-4, 10,000 updates of warm-up, inverse-square-root decay and
    weight decay 0.01; batches are made by a budget of tokens, and the best evaluations are averaged.
    """

    max_tokens: int = field(
        default=4096, metadata={"help": "Most rows × longest side of a batch, over all processes together."}
    )
    average_best: int = field(
        default=5, metadata={"help": "The result is the average of so many best evaluations; 0 keeps the last weights."}
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after so many evaluations without a better one; never if unset."}
    )
    learning_rate: float = field(default=5e-4, metadata={"help": "Learning rate after warm-up."})
    lr_scheduler_type: str = field(default="inverse_sqrt", metadata={"help": "How the learning rate changes."})
    warmup_steps: float = field(
        default=10_000, metadata={"help": "Updates with a rising learning rate; below 1: share."}
    )
    weight_decay: float = field(default=0.01, metadata={"help": "Decoupled weight decay."})
    adam_beta2: float = field(default=0.98, metadata={"help": "Adam's memory of squared gradients."})
    optimizer: str | None = field(
        default=None,
        metadata={
            "help": "muon: orthogonal steps for the matrices of layers, Adam's for the rest; try two or three times "
            "Adam's learning rate. Unset: what optim says, Adam."
        },
    )
    label_smoothing_factor: float | None = field(default=0.1, metadata={"help": "ε of label smoothing."})
    subword_dropout: float = field(
        default=0.0,
        metadata={
            "help": "Probability with which a BPE token of a source is split into the two it was merged from, and these"
            " again, anew in every epoch; 0.1 is usual for small data."
        },
    )
    subword_dropout_target: float = field(default=0.0, metadata={"help": "The same for targets."})
    metric_for_best_model: str = field(default="bleu", metadata={"help": "What decides which is best."})
    logging_steps: float = field(default=100, metadata={"help": "Log every so many updates."})
    restore_callback_states_from_checkpoint: bool = field(
        default=True, metadata={"help": "A run that goes on keeps its patience."}
    )
    save_total_limit: int | None = field(default=2, metadata={"help": "How many checkpoints to go on from are kept."})
    ddp_find_unused_parameters: bool | None = field(
        default=False, metadata={"help": "Every weight takes part in every step, so nobody need look for others."}
    )
    use_cache: bool = field(default=False, metadata={"help": "Training needs no cache of keys and values."})
    greater_is_better: bool | None = field(
        default=None,
        metadata={"help": "Whether a larger metric_for_best_model is better; unset: for BLEU and chrF."},
    )

    def __post_init__(self) -> None:
        if self.greater_is_better is None:  # transformers would take a likelihood for a score
            self.greater_is_better = self.metric_for_best_model.endswith(("bleu", "chrf"))
        if not torch.accelerator.is_available():  # else processes started by torchrun would not know of each other
            self.use_cpu = True
        super().__post_init__()
        defaults = {entry.name: entry.default for entry in fields(Seq2SeqTrainingArguments)}
        for name, reason in WITHOUT_EFFECT.items():
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)} has no effect: {reason}.")
        if self.optimizer not in (None, "muon"):
            raise ValueError(f"optimizer '{self.optimizer}' is unknown; it is muon, or left unset for what optim says.")
        if self.optimizer is not None and self.optim != type(self).optim:
            raise ValueError(f"optimizer={self.optimizer} and optim={self.optim.value} are two optimisers; keep one.")
        if self.optimizer is not None and self.optim_args:
            raise ValueError(f"optim_args={self.optim_args} has no effect: it is for optim, not for optimizer.")
        if self.save_only_model:
            raise ValueError("save_only_model=True: a run could not go on from such checkpoints; leave it out.")
        self.check_at_least(1, "max_tokens", "early_stopping_patience")
        self.check_at_least(0, "average_best", "label_smoothing_factor")
        for name in ("subword_dropout", "subword_dropout_target"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}.")
        if self.label_smoothing_factor is not None and self.label_smoothing_factor >= 1:
            raise ValueError(f"label_smoothing_factor must be below 1, not {self.label_smoothing_factor}.")
        if self.early_stopping_patience is not None and self.eval_strategy == "no":
            raise ValueError("early_stopping_patience needs evaluations; set eval_strategy to steps or epoch.")

        if (self.subword_dropout or self.subword_dropout_target) and self.dataloader_persistent_workers:
            raise ValueError(
                "dataloader_persistent_workers=True would repeat the segmentations of subword_dropout in every epoch; "
                "leave one of them out."
            )

    def check_at_least(self, least: float, *names: str) -> None:
        """Refuse fields that are set to less."""
        for name in names:
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}.")


@dataclass
class DeqNarTrainingArguments(TranslationTrainingArguments):
    """`TranslationTrainingArguments`, and what objectives and equilibria need besides.

    >>> DeqNarTrainingArguments("runs/example", objective="ctc+glat", max_tokens=4096).lr_scheduler_type.value
    'inverse_sqrt'
    """

    objective: str = field(
        default="glat", metadata={"help": "What is learned: target+input+likelihood, such as ctc+glat or axe."}
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
        metadata={"help": "Most evaluations of a solve that only looks what to reveal; as any other's if unset."},
    )
    denoising_steps: int | None = field(
        default=None,
        metadata={
            "help": "For so many updates at first the decoder is evaluated once, as an ordinary one (and, if explicit, "
            "nothing is revealed); then equilibria are learned. Unset: half of all updates if explicit, else none."
        },
    )
    gamma: list[float] | None = field(
        default=None,
        metadata={
            "help": "Trust in each candidate of dynamic_kd, the raw target last. Unset: the paper's for five, else 1."
        },
    )
    beta: float = field(default=0.2, metadata={"help": "Weight of dynamic_kd's distortion."})
    spectral_radius_rows: int = field(
        default=8, metadata={"help": "Validation sentences whose spectral radius is logged; 0 for none."}
    )
    label_smoothing_factor: float | None = field(
        default=None, metadata={"help": "ε of label smoothing. Unset: 0.1, and 0 for CTC, where it has no meaning."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        words = self.objective.split("+")
        if self.label_smoothing_factor is None:
            self.label_smoothing_factor = 0.0 if "ctc" in words else 0.1
        if self.label_smoothing_factor and "ctc" in words:
            raise ValueError(
                f"label_smoothing_factor={self.label_smoothing_factor} has no meaning for CTC (objective "
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
        if not 0 < self.correction_share <= 1:
            raise ValueError(f"correction_share must be above 0 and at most 1, not {self.correction_share}.")
        if self.correction_share != type(self).correction_share and not self.correction:
            raise ValueError(f"correction_share={self.correction_share} has no effect without correction.")
        if not 0 <= self.noisy_start <= 1:
            raise ValueError(f"noisy_start must be from 0 to 1, not {self.noisy_start}.")


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
            raise ValueError(f"{given} are each something to start from; keep one.")
        self.settings()

    @property
    def start(self) -> str | None:
        """What training starts from, and whose tokenizer is used; None for a new model."""
        return self.model or self.teacher or self.backbone

    def settings(self) -> dict[str, Any]:
        """`config` as values by field."""
        return read_settings(self.config, DeqNarConfig)


@dataclass
class CorpusArguments:
    """What it is trained on."""

    train_data: list[str] = field(
        metadata={"help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; several are concatenated."}
    )
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the target language."})
    validation_data: str | None = field(default=None, metadata={"help": "The same for validation."})
    validation_limit: int | None = field(
        default=None, metadata={"help": "Only so many validation pairs, evenly spread over them all."}
    )
    train_limit: int | None = field(default=None, metadata={"help": "Only the first so many training pairs."})
    max_length: int = field(default=128, metadata={"help": "Pairs with more tokens on a side are left out."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where tokenized data is kept."})

    def __post_init__(self) -> None:
        if isinstance(self.train_data, str):
            self.train_data = [self.train_data]
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
    """'field=value' each, for a configuration class; read as YAML, so that 1e-3, true and null mean what they say."""
    known = {entry.name for entry in fields(kind)}
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"config '{assignment}' is not of the form field=value.")
        if name not in known:
            raise ValueError(f"config '{name}' is not a field of {kind.__name__}.")
        try:
            found[name] = as_number(yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ValueError(f"config '{assignment}': {' '.join(str(error).split())}") from error
    return found


def as_number(value: Any) -> Any:
    """YAML takes 1e-3 for a word."""
    if not isinstance(value, str):
        return value
    try:
        return float(value)
    except ValueError:
        return value

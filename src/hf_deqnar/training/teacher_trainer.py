"""Training of autoregressive teachers with the student's tokenizer: Marian models or LSTMs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.tokenizer import load_tokenizer
from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.conversion_deqnar import SHARED_FIELDS, weights_for_teacher
from ..models.deqnar.ctc import full_precision
from ..models.deqnar.losses_deqnar import CHUNK
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentConfig, RecurrentForConditionalGeneration
from ..objectives.objective import Term
from ..utils.files import reading_weights
from .arguments import DataArguments, TranslationTrainingArguments, parse_arguments, read_settings
from .base_trainer import TranslationTrainer
from .run import OPTIMISATION, read_pairs, run_training

# Table 10 of the MPLE paper (Huang et al. 2022); encoder and decoder have the same number of layers.
SIZES = {
    "tiny": {"width": 128, "feed_forward": 512, "layers": 3, "heads": 4, "dropout": 0.1},
    "small": {"width": 256, "feed_forward": 1024, "layers": 3, "heads": 4, "dropout": 0.1},
    "base": {"width": 512, "feed_forward": 2048, "layers": 6, "heads": 8, "dropout": 0.3},
    "big": {"width": 1024, "feed_forward": 4096, "layers": 6, "heads": 8, "dropout": 0.3},
}

# Configuration fields that can be changed when training continues from a model.
CHANGEABLE_FIELDS = ("dropout", "encoder_layers", "decoder_layers")


def marian_config(size: str, tokenizer: PreTrainedTokenizerBase, **overrides: Any) -> MarianConfig:
    """The configuration of a Marian teacher of a named size.

    Post-norm layers with ReLU, tied embeddings and sinusoidal positions, as in the students, so that a student can be
    initialised from it. As in Marian, the decoder starts with the padding token.
    """
    chosen = SIZES[size]
    fields = {
        "vocab_size": len(tokenizer),
        "d_model": chosen["width"],
        "encoder_layers": chosen["layers"],
        "decoder_layers": chosen["layers"],
        "encoder_attention_heads": chosen["heads"],
        "decoder_attention_heads": chosen["heads"],
        "encoder_ffn_dim": chosen["feed_forward"],
        "decoder_ffn_dim": chosen["feed_forward"],
        "dropout": chosen["dropout"],
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "init_std": overrides.get("d_model", chosen["width"]) ** -0.5,
        "scale_embedding": True,
        "max_position_embeddings": 512,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        "forced_eos_token_id": tokenizer.eos_token_id,
    }
    return MarianConfig(**{**fields, **overrides})


def lstm_config(size: str, tokenizer: PreTrainedTokenizerBase, **overrides: Any) -> RecurrentConfig:
    """The configuration of an LSTM teacher: ENGINE's proportions (512, 512, 768) for the width of a named size."""
    width = SIZES[size]["width"]
    fields = {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "encoder_units": width,
        "decoder_units": width * 3 // 2,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
    }
    return RecurrentConfig(**{**fields, **overrides})


@torch.no_grad()
def scale_down_residual_branches(model: PreTrainedModel, factor: float = 0.1) -> None:
    """Multiply the last matrix of every attention and feed-forward block, so that a new layer is near the identity.

    In a deep post-norm stack with the usual initialisation every norm halves the contribution of its input, and the
    source signal is attenuated. On Multi30k (tiny, batches of 1024 tokens) the validation loss after 400 updates is 4.2
    instead of 4.6.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            weight.mul_(factor)


@dataclass(frozen=True)
class Architecture:
    """A kind of teacher: its classes, its configuration by size, and what can be done with a trained one."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    make_config: Callable[..., PreTrainedConfig]
    initialise: Callable[[PreTrainedModel], None] | None = None  # after the model's own initialisation
    layers_can_be_removed: bool = False  # whether the first layers of a trained model are a model


ARCHITECTURES = {
    "marian": Architecture(MarianConfig, MarianMTModel, marian_config, scale_down_residual_branches, True),
    "lstm": Architecture(RecurrentConfig, RecurrentForConditionalGeneration, lstm_config),
}


def architecture_of(config: PreTrainedConfig) -> Architecture | None:
    """The architecture with this class of configuration; None if it is not one of `ARCHITECTURES`."""
    return next((one for one in ARCHITECTURES.values() if type(config) is one.config_class), None)


@dataclass
class TeacherArguments:
    """Which teacher is trained."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "Directory or hub id of a teacher to continue training, or of a deqnar model whose encoder, "
            "embeddings and decoder layers initialise a new teacher. Unset: random weights."
        },
    )
    architecture: str | None = field(
        default=None,
        metadata={"help": "Architecture of a new teacher: marian, lstm; marian if unset."},
    )
    size: str | None = field(
        default=None, metadata={"help": f"Size of a new teacher: {', '.join(SIZES)}; tiny if unset."}
    )
    config: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Configuration fields, such as dropout=0.3 decoder_layers=1 (in YAML: a mapping). With --model: "
            "dropout, or fewer layers (the first ones are used), or more layers if it is a deqnar model."
        },
    )

    def __post_init__(self) -> None:
        for name, choices, default in (("architecture", ARCHITECTURES, "marian"), ("size", SIZES, "tiny")):
            if self.model is not None and getattr(self, name) is not None:
                raise ValueError(f"--model {self.model} has a {name} of its own; leave out --{name}.")
            if getattr(self, name) is None:
                setattr(self, name, default)
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} '{getattr(self, name)}' is unknown; choose one of {', '.join(choices)}.")
        for name in self.settings():
            if self.model is not None and name not in CHANGEABLE_FIELDS:
                raise ValueError(
                    f"--model {self.model} has a {name} of its own; --config can change "
                    f"{', '.join(CHANGEABLE_FIELDS)} of it."
                )

    def settings(self) -> dict[str, Any]:
        """`config` as values by field."""
        return read_settings(self.config, ARCHITECTURES[self.architecture].config_class)


def make_teacher(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A teacher with random weights whose generation config suppresses special tokens."""
    architecture = architecture_of(config)
    model = architecture.model_class(config)
    if architecture.initialise is not None:
        architecture.initialise(model)
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(["<mask>", "<blank>"])]
    model.generation_config.suppress_tokens = sorted(
        {token for token in special if token is not None and token != tokenizer.unk_token_id}
    )
    model.generation_config.max_length = min(256, config.max_position_embeddings)
    model.generation_config.num_beams = 1
    return model


def load_teacher(name: str, **settings: Any) -> PreTrainedModel:
    """A trained teacher, or one initialised from a deqnar model.

    Args:
        name: directory or hub id.
        settings: fields of `CHANGEABLE_FIELDS`; with fewer layers, the first ones are used.
    """
    config = AutoConfig.from_pretrained(name)
    from_student, architecture = isinstance(config, DeqNarConfig), architecture_of(config)
    if not from_student and architecture is None:
        raise ValueError(
            f"--model {name} is a {config.model_type} model; training of a teacher can start from a marian model, an "
            "LSTM model of this library, or a deqnar model."
        )
    for part, value in settings.items():
        if part == "dropout":
            continue
        layers = config.decoder_depth if from_student and part == "decoder_layers" else getattr(config, part)
        valid = type(value) is int and value >= 1
        if not valid or not (from_student or (architecture.layers_can_be_removed and value <= layers)):
            raise ValueError(
                f"{part}={value} is not possible with --model {name}, a {config.model_type} model whose {part} is "
                f"{layers}."
            )
    if from_student:
        with reading_weights(name):
            student = DeqNarForConditionalGeneration.from_pretrained(name)
        return teacher_from_student(student, load_tokenizer(name), settings)
    with reading_weights(name):
        model = AutoModelForSeq2SeqLM.from_pretrained(name, **settings)
    for part, parameter in model.named_parameters():
        if "embed_positions" in part:  # sinusoidal; from_pretrained leaves them trainable
            parameter.requires_grad_(False)
    return model


def teacher_from_student(
    student: DeqNarForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> MarianMTModel:
    """A Marian teacher initialised with a student's encoder, embeddings and decoder layers.

    The decoder has not been trained autoregressively. Layers that the student does not have start near the identity.
    """
    fields = {name: getattr(student.config, name) for name in SHARED_FIELDS.split()}
    fields["decoder_layers"] = student.config.decoder_depth
    model = make_teacher(marian_config("tiny", tokenizer, **{**fields, **settings}), tokenizer)
    _, unknown = model.load_state_dict(weights_for_teacher(student, model.config), strict=False)
    if unknown:
        raise ValueError(f"A Marian model of this version of transformers has no {unknown[0]}.")
    return model


class SmoothedCrossEntropy(Function):
    """−Σ_i [(1−ε)·log p_i(y_i) + ε/V·Σ_v log p_i(v)], with the gradient p − (1−ε)·[y] − ε/V computed in one pass.

    The backward pass of torch's log-softmax takes a tenth of a training step on a CPU. Here it scales a saved gradient,
    which is computed in chunks of logits that stay in the processor's cache.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """logits: (tokens, vocabulary), targets: (tokens); returns the sum."""
        slopes = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        losses = []
        size = max(1, CHUNK // logits.shape[1])
        for first in range(0, len(logits), size):
            part = full_precision(logits[first : first + size])
            labels = targets[first : first + size, None]
            log_probs = part.log_softmax(dim=-1)
            chosen = log_probs.gather(1, labels)
            losses.append(-(1 - smoothing) * chosen.sum())
            if smoothing:
                losses.append(-smoothing * log_probs.mean(dim=-1).sum())
            if slopes is not None:
                slope = log_probs.exp_().sub_(smoothing / part.shape[1])
                slope.scatter_add_(1, labels, torch.full_like(chosen, smoothing - 1))
                slopes[first : first + size] = slope
        ctx.save_for_backward(slopes)
        return torch.stack(losses).sum() if losses else logits.sum() * 0.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradient, None, None


class TeacherTrainer(TranslationTrainer):
    """Trains an autoregressive encoder-decoder model by teacher forcing: −Σ_t log p(y_t | y_<t, x).

    >>> trainer = TeacherTrainer(
    ...     make_teacher(marian_config("tiny", tokenizer), tokenizer),
    ...     TranslationTrainingArguments("runs/teacher"),
    ...     train_dataset=pairs,
    ...     processing_class=tokenizer,
    ... )  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, args: TranslationTrainingArguments, **options) -> None:
        super().__init__(model=model, args=args, **options)
        bias = getattr(model, "final_logits_bias", None)  # a constant of Marian models, zero unless converted
        if args.bf16 and args.device.type == "cpu" and bias is not None and not bias.any():
            # Adding a float32 constant to bfloat16 logits takes a tenth of a training step on a CPU.
            model.final_logits_bias = bias.to(torch.bfloat16)

    def compute_terms(
        self, model: nn.Module, batch: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> dict[str, Term]:
        """The cross-entropy of the labels; label smoothing is applied in training only."""
        labels = batch["labels"]
        start = torch.full_like(labels[:, :1], self.model.config.decoder_start_token_id)
        # The decoder is causal, so padding on the right needs no mask.
        inputs = torch.cat([start, labels[:, :-1]], dim=1).clamp_min(0)
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=inputs,
            use_cache=False,
        ).logits
        mask = labels >= 0
        smoothing = self.args.label_smoothing_factor if self.model.training else 0.0
        total = SmoothedCrossEntropy.apply(logits[mask], labels[mask], smoothing)
        return {"likelihood": Term(total, mask.sum(), 1.0)}


def main(arguments: list[str] | None = None, program: str | None = None) -> None:
    """Parse the arguments and train; a run with checkpoints in its output directory is resumed."""
    kinds = (TeacherArguments, DataArguments, TranslationTrainingArguments)
    train_teacher(*parse_arguments(kinds, arguments, program))


def train_teacher(
    teacher: TeacherArguments, data: DataArguments, arguments: TranslationTrainingArguments
) -> TranslationTrainer:
    """Train a teacher on a corpus and save it in `arguments.output_dir`."""

    def make_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        if teacher.model is not None:
            return load_teacher(teacher.model, **teacher.settings())
        make_config = ARCHITECTURES[teacher.architecture].make_config
        return make_teacher(make_config(teacher.size, tokenizer, **teacher.settings()), tokenizer)

    pairs, start = read_pairs(data, arguments.seed), teacher.model
    return run_training(pairs, data, arguments, make_model, TeacherTrainer, resume_settings=OPTIMISATION, start=start)

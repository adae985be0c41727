"""Autoregressive teachers with the student's tokenizer: Marian models in the sizes of the MPLE paper, or LSTMs."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..configuration_deqnar import DeqNarConfig
from ..conversion_deqnar import SAME_NAME, weights_for_teacher
from ..corpus.files import reading_weights
from ..corpus.tokenizer import load_tokenizer
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..modeling_recurrent import RecurrentConfig, RecurrentForConditionalGeneration
from ..objectives.objective import Term
from ..objectives.projection import cross_entropy_total
from .arguments import DataArguments, TranslationTrainingArguments, parse_arguments, read_settings
from .run import OPTIMISATION, conduct, read_pairs
from .translation_trainer import TranslationTrainer

# Table 10 of the MPLE paper (Huang et al. 2022); as many layers in the encoder as in the decoder.
SIZES = {
    "tiny": {"width": 128, "feed_forward": 512, "layers": 3, "heads": 4, "dropout": 0.1},
    "small": {"width": 256, "feed_forward": 1024, "layers": 3, "heads": 4, "dropout": 0.1},
    "base": {"width": 512, "feed_forward": 2048, "layers": 6, "heads": 8, "dropout": 0.3},
    "big": {"width": 1024, "feed_forward": 4096, "layers": 6, "heads": 8, "dropout": 0.3},
}

CONFIGS = {"marian": MarianConfig, "lstm": RecurrentConfig}
CHANGEABLE = ("dropout", "encoder_layers", "decoder_layers")  # of a model to go on with


@dataclass
class TeacherArguments:
    """Which teacher is trained."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "Directory or hub id of a teacher to go on with, or of a parallel model of ours, of whose encoder, "
            "embeddings and decoder layers a teacher is made; a new one if unset."
        },
    )
    architecture: str | None = field(
        default=None, metadata={"help": f"Kind of a new one: {', '.join(CONFIGS)}; marian if unset."}
    )
    size: str | None = field(default=None, metadata={"help": f"Its size: {', '.join(SIZES)}; tiny if unset."})
    config: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Fields of its configuration, such as dropout=0.3 decoder_layers=1 (in YAML: a mapping). Of a "
            "model to go on with, dropout; or fewer layers, of which the first are kept, or more if it is made of ours."
        },
    )

    def __post_init__(self) -> None:
        for name, known, usual in (("architecture", CONFIGS, "marian"), ("size", SIZES, "tiny")):
            if self.model is not None and getattr(self, name) is not None:
                raise ValueError(f"--model {self.model} has a {name} of its own; leave out --{name}.")
            if getattr(self, name) is None:
                setattr(self, name, usual)
            if getattr(self, name) not in known:
                raise ValueError(f"{name} '{getattr(self, name)}' is unknown; choose one of {', '.join(known)}.")
        for name in self.settings():
            if self.model is not None and name not in CHANGEABLE:
                raise ValueError(
                    f"--model {self.model} has a {name} of its own; --config can change {', '.join(CHANGEABLE)} of it."
                )

    def settings(self) -> dict[str, Any]:
        """`config` as values by field."""
        return read_settings(self.config, CONFIGS[self.architecture])


def teacher_config(size: str, tokenizer: PreTrainedTokenizerBase, **overrides: Any) -> MarianConfig:
    """The configuration of a teacher of a named size.

    Post-norm layers with ReLU, tied embeddings and sinusoidal positions: those of our students, which can then start
    from it. A text begins with the padding token, as in Marian.
    """
    chosen = SIZES[size]
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
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
        "pad_token_id": padding,
        "eos_token_id": end,
        "bos_token_id": tokenizer.bos_token_id,
        "decoder_start_token_id": padding,
        "forced_eos_token_id": end,
    }
    return MarianConfig(**{**fields, **overrides})


def recurrent_config(size: str, tokenizer: PreTrainedTokenizerBase, **overrides: Any) -> RecurrentConfig:
    """The configuration of a recurrent teacher: ENGINE's proportions (512, 512, 768) for the width of a named size."""
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


def make_teacher(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A teacher with random weights, and with generation options that keep special tokens out of texts."""
    model = (MarianMTModel if isinstance(config, MarianConfig) else RecurrentForConditionalGeneration)(config)
    special = [tokenizer.pad_token_id, tokenizer.bos_token_id, *tokenizer.convert_tokens_to_ids(["<mask>", "<blank>"])]
    if isinstance(config, MarianConfig):
        start_small(model)
    model.generation_config.suppress_tokens = sorted(
        {token for token in special if token is not None and token != tokenizer.unk_token_id}
    )
    model.generation_config.max_length = min(256, config.max_position_embeddings)
    model.generation_config.num_beams = 1
    return model


def load_teacher(name: str, **settings: Any) -> PreTrainedModel:
    """A teacher to go on with: as it is, with another dropout, or only the first of its layers; or made of ours."""
    config = AutoConfig.from_pretrained(name)
    ours = config.model_type == DeqNarConfig.model_type
    if not ours and config.model_type not in [kind.model_type for kind in CONFIGS.values()]:
        raise ValueError(
            f"--model {name} is of type {config.model_type}; a teacher is made of a marian model, of one of our LSTMs, "
            "or of a parallel model of ours."
        )
    for part, value in settings.items():
        there = config.decoder_depth if ours and part == "decoder_layers" else getattr(config, part)
        possible = type(value) is int and value >= 1 and (ours or (config.model_type == "marian" and value <= there))
        if part != "dropout" and not possible:
            raise ValueError(
                f"{part}={value} cannot be made of --model {name}, a {config.model_type} model whose {part} is {there}."
            )
    if ours:
        with reading_weights(name):
            student = DeqNarForConditionalGeneration.from_pretrained(name)
        return teacher_from_student(student, load_tokenizer(name), settings)
    with reading_weights(name):
        model = AutoModelForSeq2SeqLM.from_pretrained(name, **settings)
    for part, parameter in model.named_parameters():
        if "embed_positions" in part:  # sines, which transformers forgets to freeze when it loads them
            parameter.requires_grad_(False)
    return model


def teacher_from_student(
    student: DeqNarForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]
) -> MarianMTModel:
    """A teacher that begins with a student's encoder, embeddings and decoder layers.

    It has yet to learn to write one word after the other. Layers that the student lacks begin as nearly the identity.
    """
    fields = {name: getattr(student.config, name) for name in SAME_NAME.split()}
    fields["decoder_layers"] = student.config.decoder_depth
    model = make_teacher(teacher_config("tiny", tokenizer, **{**fields, **settings}), tokenizer)
    _, unknown = model.load_state_dict(weights_for_teacher(student, model.config), strict=False)
    if unknown:
        raise ValueError(f"A Marian model of this version of transformers has no {unknown[0]}.")
    return model


@torch.no_grad()
def start_small(model: MarianMTModel, share: float = 0.1) -> None:
    """Let every layer begin as nearly the identity: what attention and feed-forward add is a tenth of the usual.

    A post-norm layer that adds as much as it was given halves that, and after seven such layers a source is hardly
    heard. On Multi30k (tiny, batches of 1024 tokens) the validation loss after 400 updates is 4.2 instead of 4.6.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("out_proj.weight", "fc2.weight")):
            weight.mul_(share)


class TeacherTrainer(TranslationTrainer):
    """Trains an autoregressive model by teacher forcing: −Σ log p(y_t | y_<t, x), with label smoothing."""

    def compute_terms(self, batch: dict[str, Tensor], progress: float, generator: torch.Generator) -> dict[str, Term]:
        model, labels = self.model, batch["labels"]
        start = torch.full_like(labels[:, :1], model.config.decoder_start_token_id)
        # What stands behind the end of a row is never looked back at by what counts.
        inputs = torch.cat([start, labels[:, :-1]], dim=1).clamp_min(0)
        hidden = model.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=inputs,
            use_cache=False,
        ).last_hidden_state
        real = labels >= 0
        # Marian's bias of the logits is a buffer that stays zero, so the projection is the embedding alone.
        smoothing = self.args.label_smoothing_factor if model.training else 0.0
        total = cross_entropy_total(hidden[real], model.lm_head.weight, labels[real], smoothing)
        return {"likelihood": Term(total, real.sum(), 1.0)}


def main(arguments: list[str] | None = None, program: str | None = None) -> None:
    """Parse, train, save; a run whose folder holds checkpoints goes on from the last of them."""
    kinds = (TeacherArguments, DataArguments, TranslationTrainingArguments)
    train_teacher(*parse_arguments(kinds, arguments, program))


def train_teacher(
    teacher: TeacherArguments, data: DataArguments, arguments: TranslationTrainingArguments
) -> TranslationTrainer:
    """One run, from texts to a saved teacher in `arguments.output_dir`."""

    def make_model(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        if teacher.model is not None:
            return load_teacher(teacher.model, **teacher.settings())
        configure = teacher_config if teacher.architecture == "marian" else recurrent_config
        return make_teacher(configure(teacher.size, tokenizer, **teacher.settings()), tokenizer)

    pairs, start = read_pairs(data, arguments.seed), teacher.model
    return conduct(pairs, data, arguments, make_model, TeacherTrainer, decisive=OPTIMISATION, start=start)

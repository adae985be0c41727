"""Conversion of trained models: teacher to student, stacked backbone to equilibrium model, student to teacher."""

import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_deqnar import DeqNarConfig, is_deqnar

logger = logging.get_logger(__name__)

# Model types whose layers have the student's form: post-norm, biases in every projection, shared embeddings.
# Types of teachers that can be converted, with the fields of a student that computes what such a teacher computes.
CONVERTIBLE_TYPES: dict[str, dict[str, Any]] = {
    "marian": {},
    "bart": {"positions": "learned", "layernorm_embedding": True},
}
LEARNED_OFFSET = 2  # the first two rows of Bart's position tables are unused

# Configuration fields with the same name and meaning in teacher and student.
SHARED_FIELDS = (
    "d_model encoder_layers encoder_attention_heads encoder_ffn_dim decoder_layers decoder_attention_heads "
    "decoder_ffn_dim activation_function dropout max_position_embeddings scale_embedding vocab_size"
)

# Fields that a student must have for its layers to be those of Marian.
MARIAN_FIELDS = {
    "architecture": "transformer",
    "layer_norm": "post",
    "positions": "sinusoidal",
    "layernorm_embedding": False,
    "weight_norm": "none",
    "tie_word_embeddings": True,
}

ALTERNATIVES = (
    "train on its translations (hf-deqnar distill --teacher) or, if it has the student's vocabulary, with its energy "
    "(hf-deqnar energy --teacher)"
)


def load_teacher_and_tokenizer(
    teacher: PreTrainedModel | str | os.PathLike, tokenizer: Any = None
) -> tuple[PreTrainedModel, Any]:
    """The teacher and its tokenizer, loaded if given by directory or hub id."""
    if isinstance(teacher, str | os.PathLike):
        check_convertible(AutoConfig.from_pretrained(teacher))  # before the weights are downloaded
        name, teacher = teacher, AutoModelForSeq2SeqLM.from_pretrained(teacher)
        tokenizer = AutoTokenizer.from_pretrained(name) if tokenizer is None else tokenizer
    if not isinstance(teacher, PreTrainedModel):
        raise TypeError(
            f"The teacher is a {type(teacher).__name__}; give a transformers model, a directory or a hub id."
        )
    if tokenizer is None:
        raise ValueError(f"The teacher is a {type(teacher).__name__} object; give its tokenizer as well.")
    return teacher, tokenizer


def check_convertible(teacher: PreTrainedConfig) -> None:
    """Raise ValueError for a teacher whose layers cannot be converted."""
    if is_deqnar(teacher):
        raise ValueError("from_teacher converts an autoregressive model; from_backbone starts from a deqnar model.")
    if teacher.model_type not in CONVERTIBLE_TYPES:
        raise ValueError(
            f"from_teacher converts {' and '.join(CONVERTIBLE_TYPES)} models, and the layers of a {teacher.model_type} "
            f"model have another form; {ALTERNATIVES}."
        )
    if not teacher.tie_word_embeddings or not getattr(teacher, "share_encoder_decoder_embeddings", True):
        raise ValueError(
            "The teacher has several embedding matrices (tie_word_embeddings or share_encoder_decoder_embeddings is "
            f"off), but a student has one; {ALTERNATIVES}."
        )


def config_from_teacher(teacher: PreTrainedConfig, tokenizer: Any, overrides: dict[str, Any]) -> DeqNarConfig:
    """The student's configuration: the teacher's sizes and the tokenizer's special tokens, updated by `overrides`."""
    check_convertible(teacher)
    fields = {name: getattr(teacher, name) for name in SHARED_FIELDS.split()}
    fields |= CONVERTIBLE_TYPES[teacher.model_type]
    special = {"bos": "bos_token", "pad": "pad_token", "eos": "eos_token", "unk": "unk_token", "mask": "mask_token"}
    fields |= {f"{name}_token_id": getattr(tokenizer, f"{token}_id") for name, token in special.items()}
    vocabulary = tokenizer.get_vocab()
    fields["blank_token_id"] = vocabulary.get("<blank>")
    for name in ("mask", "blank"):
        number = fields[f"{name}_token_id"]
        if number is None or number >= teacher.vocab_size:
            raise ValueError(
                f"The teacher's vocabulary of {teacher.vocab_size} has no <{name}>; add it to the tokenizer and call "
                "teacher.resize_token_embeddings(len(tokenizer))."
            )
    return DeqNarConfig(**{**fields, **overrides})


def weights_from_teacher(teacher: PreTrainedModel, config: DeqNarConfig) -> dict[str, Tensor]:
    """The teacher's weights under the names they have in a student of this configuration."""
    state_dict = teacher.state_dict()
    if state_dict["final_logits_bias"].any():
        logger.warning("The teacher's final_logits_bias is not copied: a student has none.")
    weights = {"model.shared.weight": state_dict["model.shared.weight"], "lm_head.weight": state_dict["lm_head.weight"]}
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_depth)):
        available = getattr(teacher.config, f"{side}_layers")
        if count > available:
            raise ValueError(f"The student's {side} has {count} layers but the teacher's only {available}.")
        target = "model.encoder.layers" if side == "encoder" else "model.transition.layers"
        width = getattr(config, f"{side}_ffn_dim")
        for number in range(count):
            layer = _student_layer(state_dict, f"model.{side}.layers.{number}", f"{target}.{number}", side == "decoder")
            weights |= _widen_feed_forward(layer, f"{target}.{number}.feed_forward", width)
    if config.positions == "learned" and CONVERTIBLE_TYPES[teacher.config.model_type].get("positions") == "learned":
        for side, target in (("encoder", "source_positions"), ("decoder", "canvas_positions")):
            weights[f"model.{target}.table.weight"] = state_dict[f"model.{side}.embed_positions.weight"][
                LEARNED_OFFSET:
            ]
            for name in ("weight", "bias"):
                weights[f"model.{target}.norm.{name}"] = state_dict[f"model.{side}.layernorm_embedding.{name}"]
    return weights


def _student_layer(state_dict: dict[str, Tensor], source: str, target: str, decoder: bool) -> dict[str, Tensor]:
    """One layer: the projections of queries, keys and values are concatenated."""
    weights = {}
    norms = ["self_attn_layer_norm", *(["encoder_attn_layer_norm"] if decoder else []), "final_layer_norm"]
    for kind in ("weight", "bias"):

        def joined(attention: str, parts: str, kind: str = kind) -> Tensor:
            return torch.cat([state_dict[f"{source}.{attention}.{part}_proj.{kind}"] for part in parts])

        weights[f"{target}.self_attention.query_key_value.{kind}"] = joined("self_attn", "qkv")
        weights[f"{target}.self_attention.output.{kind}"] = state_dict[f"{source}.self_attn.out_proj.{kind}"]
        if decoder:
            weights[f"{target}.cross_attention.query.{kind}"] = joined("encoder_attn", "q")
            weights[f"{target}.cross_attention.key_value.{kind}"] = joined("encoder_attn", "kv")
            weights[f"{target}.cross_attention.output.{kind}"] = state_dict[f"{source}.encoder_attn.out_proj.{kind}"]
        weights[f"{target}.feed_forward.expand.{kind}"] = state_dict[f"{source}.fc1.{kind}"]
        weights[f"{target}.feed_forward.contract.{kind}"] = state_dict[f"{source}.fc2.{kind}"]
        for place, norm in enumerate(norms):
            weights[f"{target}.norms.{place}.{kind}"] = state_dict[f"{source}.{norm}.{kind}"]
    return weights


def _widen_feed_forward(layer: dict[str, Tensor], target: str, width: int) -> dict[str, Tensor]:
    """A feed-forward network with more units. Output weights of new units are zero, so the function is unchanged."""
    expand = layer[f"{target}.expand.weight"]
    new, states = width - expand.shape[0], expand.shape[1]
    if new <= 0:
        return layer
    more = {
        f"{target}.expand.weight": expand.new_empty(new, states).normal_(std=states**-0.5),
        f"{target}.expand.bias": expand.new_zeros(new),
    }
    wider = {name: torch.cat([layer[name], added]) for name, added in more.items()}
    contract = layer[f"{target}.contract.weight"]
    wider[f"{target}.contract.weight"] = torch.cat([contract, contract.new_zeros(states, new)], dim=1)
    return {**layer, **wider}


def weights_for_teacher(student: PreTrainedModel, teacher: PreTrainedConfig) -> dict[str, Tensor]:
    """A student's weights under the names they have in a Marian teacher; the inverse of `weights_from_teacher`.

    As many layers are converted as both models have.
    """
    config, state_dict = student.config, student.state_dict()
    for name, needed in MARIAN_FIELDS.items():
        if getattr(config, name) != needed:
            raise ValueError(
                f"A teacher can start from a student with {name}={needed}, but this one has {getattr(config, name)}."
            )
    weights = {"model.shared.weight": state_dict["model.shared.weight"]}
    for side, target, count in (
        ("encoder", "model.encoder.layers", config.encoder_layers),
        ("decoder", "model.transition.layers", config.decoder_depth),
    ):
        for number in range(min(count, getattr(teacher, f"{side}_layers"))):
            weights |= _marian_layer(
                state_dict, f"{target}.{number}", f"model.{side}.layers.{number}", side == "decoder"
            )
    return weights


def _marian_layer(state_dict: dict[str, Tensor], source: str, target: str, decoder: bool) -> dict[str, Tensor]:
    """One layer: the concatenated projections of queries, keys and values are split."""
    weights: dict[str, Tensor] = {}
    attentions = {"self_attn": ("self_attention", {"query_key_value": "qkv"})}
    if decoder:
        attentions["encoder_attn"] = ("cross_attention", {"query": "q", "key_value": "kv"})
    for kind in ("weight", "bias"):
        for place, (marian_attention, (attention, joined)) in enumerate(attentions.items()):
            for name, parts in joined.items():
                chunks = state_dict[f"{source}.{attention}.{name}.{kind}"].chunk(len(parts))
                weights |= {
                    f"{target}.{marian_attention}.{part}_proj.{kind}": chunk
                    for part, chunk in zip(parts, chunks, strict=True)
                }
            weights[f"{target}.{marian_attention}.out_proj.{kind}"] = state_dict[f"{source}.{attention}.output.{kind}"]
            weights[f"{target}.{marian_attention}_layer_norm.{kind}"] = state_dict[f"{source}.norms.{place}.{kind}"]
        weights[f"{target}.fc1.{kind}"] = state_dict[f"{source}.feed_forward.expand.{kind}"]
        weights[f"{target}.fc2.{kind}"] = state_dict[f"{source}.feed_forward.contract.{kind}"]
        weights[f"{target}.final_layer_norm.{kind}"] = state_dict[f"{source}.norms.{len(attentions)}.{kind}"]
    return weights


def backbone_weights(backbone: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """The backbone's weights; the last layer of a `mixed` model's fusion, which it lacks, is initialised to zero."""
    last_fusion_layer = {
        name: torch.zeros_like(weight)
        for name, weight in model.state_dict().items()
        if name.startswith("model.transition.fusion.2.")
    }
    return {**backbone.state_dict(), **last_fusion_layer}

"""Starting from models that are already trained: a teacher, a stacked backbone, or, for a teacher, a student."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .configuration_deqnar import DeqNarConfig

logger = logging.get_logger(__name__)

TEACHERS = ("marian", "bart")  # their layers are ours: post-norm, biases everywhere, shared embeddings
LEARNED_OFFSET = 2  # Bart's tables of positions begin with two rows that are never used

SAME_NAME = (
    "d_model encoder_layers encoder_attention_heads encoder_ffn_dim decoder_layers decoder_attention_heads "
    "decoder_ffn_dim activation_function dropout max_position_embeddings scale_embedding vocab_size"
)

# What a student must be for its layers to be Marian's.
MARIANS = {"architecture": "transformer", "layer_norm": "post", "positions": "sinusoidal"}
MARIANS |= {"layernorm_embedding": False, "weight_norm": "none", "tie_word_embeddings": True}


def config_from_teacher(teacher: PreTrainedConfig, tokenizer: Any, overrides: dict[str, Any]) -> DeqNarConfig:
    """A student's configuration: the teacher's sizes, the tokenizer's special tokens, and what is asked for."""
    if teacher.model_type not in TEACHERS:
        raise ValueError(
            f"A student can start from {' and '.join(TEACHERS)} models, but this teacher is a {teacher.model_type}; "
            "distil it, or learn from its energy."
        )
    if not teacher.tie_word_embeddings or not getattr(teacher, "share_encoder_decoder_embeddings", True):
        raise ValueError(
            "The teacher has several tables of embeddings (tie_word_embeddings or share_encoder_decoder_embeddings is "
            "off), but a student has one; distil it, or learn from its energy."
        )
    fields = {name: getattr(teacher, name) for name in SAME_NAME.split()}
    if teacher.model_type == "bart":
        fields |= {"positions": "learned", "layernorm_embedding": True}
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
    settings = {**fields, **overrides}
    if "transition_layers" not in settings and settings.get("refinement", "implicit") in ("implicit", "mixed"):
        settings["transition_layers"] = 1
    return DeqNarConfig(**settings)


def weights_from_teacher(teacher: PreTrainedModel, config: DeqNarConfig) -> dict[str, Tensor]:
    """The teacher's weights under the names that they have in a student of this configuration."""
    theirs = teacher.state_dict()
    if theirs["final_logits_bias"].any():
        logger.warning("The teacher's bias of the logits has no place in a student and is left out.")
    weights = {"model.shared.weight": theirs["model.shared.weight"], "lm_head.weight": theirs["lm_head.weight"]}
    for side, count in (("encoder", config.encoder_layers), ("decoder", config.decoder_depth)):
        available = getattr(teacher.config, f"{side}_layers")
        if count > available:
            raise ValueError(f"The student's {side} has {count} layers but the teacher's only {available}.")
        home = "model.encoder.layers" if side == "encoder" else "model.transition.layers"
        width = getattr(config, f"{side}_ffn_dim")
        for number in range(count):
            layer = _layer(theirs, f"model.{side}.layers.{number}", f"{home}.{number}", side == "decoder")
            weights |= _widen(layer, f"{home}.{number}.feed_forward", width)
    if teacher.config.model_type == "bart" and config.positions == "learned":
        for side, home in (("encoder", "source_positions"), ("decoder", "canvas_positions")):
            weights[f"model.{home}.table.weight"] = theirs[f"model.{side}.embed_positions.weight"][LEARNED_OFFSET:]
            for name in ("weight", "bias"):
                weights[f"model.{home}.norm.{name}"] = theirs[f"model.{side}.layernorm_embedding.{name}"]
    return weights


def _layer(theirs: dict[str, Tensor], source: str, home: str, decoder: bool) -> dict[str, Tensor]:
    """One layer: queries, keys and values that are computed together here are put together."""
    weights = {}
    norms = ["self_attn_layer_norm", *(["encoder_attn_layer_norm"] if decoder else []), "final_layer_norm"]
    for kind in ("weight", "bias"):

        def joined(attention: str, parts: str, kind: str = kind) -> Tensor:
            return torch.cat([theirs[f"{source}.{attention}.{part}_proj.{kind}"] for part in parts])

        weights[f"{home}.self_attention.query_key_value.{kind}"] = joined("self_attn", "qkv")
        weights[f"{home}.self_attention.output.{kind}"] = theirs[f"{source}.self_attn.out_proj.{kind}"]
        if decoder:
            weights[f"{home}.cross_attention.query.{kind}"] = joined("encoder_attn", "q")
            weights[f"{home}.cross_attention.key_value.{kind}"] = joined("encoder_attn", "kv")
            weights[f"{home}.cross_attention.output.{kind}"] = theirs[f"{source}.encoder_attn.out_proj.{kind}"]
        weights[f"{home}.feed_forward.expand.{kind}"] = theirs[f"{source}.fc1.{kind}"]
        weights[f"{home}.feed_forward.contract.{kind}"] = theirs[f"{source}.fc2.{kind}"]
        for place, norm in enumerate(norms):
            weights[f"{home}.norms.{place}.{kind}"] = theirs[f"{source}.{norm}.{kind}"]
    return weights


def _widen(layer: dict[str, Tensor], home: str, width: int) -> dict[str, Tensor]:
    """A feed-forward network with more units; the new ones see something, but say nothing before they have learned."""
    expand = layer[f"{home}.expand.weight"]
    new, states = width - expand.shape[0], expand.shape[1]
    if new <= 0:
        return layer
    more = {
        f"{home}.expand.weight": expand.new_empty(new, states).normal_(std=states**-0.5),
        f"{home}.expand.bias": expand.new_zeros(new),
    }
    wider = {name: torch.cat([layer[name], added]) for name, added in more.items()}
    contract = layer[f"{home}.contract.weight"]
    wider[f"{home}.contract.weight"] = torch.cat([contract, contract.new_zeros(states, new)], dim=1)
    return {**layer, **wider}


def weights_for_teacher(student: PreTrainedModel, teacher: PreTrainedConfig) -> dict[str, Tensor]:
    """A student's weights under the names that they have in a Marian teacher: what `weights_from_teacher` undoes.

    Of layers, as many as both have.
    """
    config, ours = student.config, student.state_dict()
    for name, needed in MARIANS.items():
        if getattr(config, name) != needed:
            raise ValueError(
                f"A teacher can start from a student with {name}={needed}, but this one has {getattr(config, name)}."
            )
    weights = {"model.shared.weight": ours["model.shared.weight"]}
    for side, home, count in (
        ("encoder", "model.encoder.layers", config.encoder_layers),
        ("decoder", "model.transition.layers", config.decoder_depth),
    ):
        for number in range(min(count, getattr(teacher, f"{side}_layers"))):
            weights |= _marian_layer(ours, f"{home}.{number}", f"model.{side}.layers.{number}", side == "decoder")
    return weights


def _marian_layer(ours: dict[str, Tensor], source: str, home: str, decoder: bool) -> dict[str, Tensor]:
    """One layer: queries, keys and values that lie together here are taken apart."""
    weights = {}
    attentions = {"self_attn": ("self_attention", {"query_key_value": "qkv"})}
    if decoder:
        attentions["encoder_attn"] = ("cross_attention", {"query": "q", "key_value": "kv"})
    for kind in ("weight", "bias"):
        for place, (theirs, (attention, joined)) in enumerate(attentions.items()):
            for name, parts in joined.items():
                apart = ours[f"{source}.{attention}.{name}.{kind}"].chunk(len(parts))
                weights |= {f"{home}.{theirs}.{part}_proj.{kind}": one for part, one in zip(parts, apart, strict=True)}
            weights[f"{home}.{theirs}.out_proj.{kind}"] = ours[f"{source}.{attention}.output.{kind}"]
            weights[f"{home}.{theirs}_layer_norm.{kind}"] = ours[f"{source}.norms.{place}.{kind}"]
        weights[f"{home}.fc1.{kind}"] = ours[f"{source}.feed_forward.expand.{kind}"]
        weights[f"{home}.fc2.{kind}"] = ours[f"{source}.feed_forward.contract.{kind}"]
        weights[f"{home}.final_layer_norm.{kind}"] = ours[f"{source}.norms.{len(attentions)}.{kind}"]
    return weights


def backbone_weights(backbone: PreTrainedModel, model: PreTrainedModel) -> dict[str, Tensor]:
    """The backbone's weights as they are; a fusion, which it does not have, begins by changing nothing."""
    weights = dict(backbone.state_dict())
    if model.config.refinement == "mixed":
        last = "model.transition.fusion.2"
        weights |= {
            f"{last}.{kind}": torch.zeros_like(model.state_dict()[f"{last}.{kind}"]) for kind in ("weight", "bias")
        }
    return weights

"""Small random teachers of the four architectures that the energy is tested with."""

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from .conftest import PAD, VOCABULARY

END = 2
SIZES = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
SIZES |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
SIZES |= {"scale_embedding": True, "init_std": 0.5, "forced_eos_token_id": END}
TOKENS = {"pad_token_id": PAD, "eos_token_id": END, "bos_token_id": 0}
T5_SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "initializer_factor": 3.0}
MAKERS = {
    "marian": (MarianMTModel, MarianConfig, {**SIZES, "decoder_start_token_id": PAD}),
    "bart": (BartForConditionalGeneration, BartConfig, {**SIZES, "decoder_start_token_id": END}),
    "m2m100": (M2M100ForConditionalGeneration, M2M100Config, {**SIZES, "decoder_start_token_id": END}),
    "t5": (T5ForConditionalGeneration, T5Config, {**T5_SIZES, "decoder_start_token_id": PAD}),
}


def small_teacher(kind: str = "marian", vocabulary: int = VOCABULARY, **fields) -> PreTrainedModel:
    """A randomly initialised teacher in evaluation mode."""
    torch.manual_seed(3)
    model, config, sizes = MAKERS[kind]
    return model(config(**{**TOKENS, **sizes, "vocab_size": vocabulary, **fields})).eval()

"""Scoring texts with an autoregressive model of the same vocabulary, for reranking and energies."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from .ctc import full_precision


def with_end(texts: Tensor, real: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Append the end token to texts without one; returns the texts and their mask."""
    lengths = real.sum(dim=1)
    last = texts.gather(1, (lengths - 1).clamp_min(0)[:, None])[:, 0]
    missing = (last != end) | (lengths == 0)
    texts = torch.cat([texts, texts[:, :1]], dim=1)
    real = torch.cat([real, torch.zeros_like(real[:, :1])], dim=1)
    position = torch.arange(texts.shape[1], device=texts.device)[None]
    added = missing[:, None] & (position == lengths[:, None])
    return texts.masked_fill(added, end), real | added


def teacher_forced(
    scorer: Any, input_ids: Tensor, source_mask: Tensor, labels: Tensor, real: Tensor, whose: str
) -> Tensor:
    """log P(y_t | y_<t, X) of every label under an autoregressive model, in one pass; 0 where it is not `real`."""
    check_width(scorer, max(input_ids.shape[1], labels.shape[1]), whose)
    start = scorer.config.decoder_start_token_id
    outputs = scorer(
        input_ids=input_ids,
        attention_mask=source_mask.long(),
        decoder_input_ids=torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], dim=1),
        decoder_attention_mask=torch.cat([torch.ones_like(real[:, :1]), real[:, :-1]], dim=1).long(),
    )
    return full_precision(outputs.logits).log_softmax(dim=-1).gather(2, labels[:, :, None])[:, :, 0] * real


def check_width(scorer: Any, width: int, whose: str) -> None:
    """Raise ValueError for texts with more tokens than the scorer has positions."""
    longest = getattr(scorer.config, "max_position_embeddings", None)
    if longest is not None and width > longest:
        raise ValueError(f"A text of {width} tokens is too long for {whose}, which supports {longest}; split the text.")


@lru_cache(maxsize=1)
def load_reranker(name: str, device: torch.device) -> Any:
    """A frozen seq2seq model by name or path; the last one is cached."""
    with torch.inference_mode(False):
        return AutoModelForSeq2SeqLM.from_pretrained(name).to(device).eval()


def check_scorer(scorer: Any, vocabulary: int, whose: str) -> None:
    """Check that a scorer is a seq2seq model of the same vocabulary, because it receives token ids."""
    if not getattr(scorer.config, "is_encoder_decoder", False):
        raise ValueError(f"{whose} is a {scorer.config.model_type} model without an encoder; use a seq2seq model.")
    if scorer.config.vocab_size != vocabulary:
        raise ValueError(
            f"{whose} has {scorer.config.vocab_size} tokens but the model has {vocabulary}; "
            "train it with the same tokenizer (such as the teacher of the model)."
        )
    if getattr(scorer.config, "decoder_start_token_id", None) is None:
        raise ValueError(f"{whose} has no decoder_start_token_id in its config, so it cannot score texts.")


def check_same_tokens(tokenizer: Any, other_tokenizer: Any, whose: str) -> None:
    """Check that two tokenizers have the same ids; the error names the first token that differs."""
    vocabulary, other = tokenizer.get_vocab(), other_tokenizer.get_vocab()
    for token, number in sorted(vocabulary.items(), key=lambda item: item[1]):
        if other.get(token) != number:
            there = f"has id {other[token]}" if token in other else "does not exist"
            raise ValueError(
                f"The vocabulary of {whose} ({len(other)} tokens) differs from the model's ({len(vocabulary)}): "
                f"'{token}' has id {number} in the model and {there} there; both must be trained with one tokenizer."
            )

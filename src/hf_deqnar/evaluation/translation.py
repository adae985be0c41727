"""Translating a test set and scoring the result."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.tokenized_dataset import num_start_tokens
from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.pipeline_deqnar import check_named_reranker
from ..models.deqnar.text import clean_text, longest_source


@dataclass
class Translations:
    """Translations of a test set by one system, with the time and, for equilibrium models, the solver's statistics."""

    texts: list[str]
    seconds: float
    nfe: list[int] | None = None  # per sentence, as the following
    converged: list[bool] | None = None
    residual: list[float] | None = None


def translate_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_size: int,
    *,
    prefix: str = "",
    show_progress: bool = True,
    **options: Any,
) -> Translations:
    """Translate with `generate`, in batches of sentences of similar length; the results are in the given order.

    Args:
        model: any seq2seq model.
        tokenizer: of the model.
        sentences: the sources.
        batch_size: sentences of a batch.
        prefix: text before every sentence, such as T5's task prefix.
        show_progress: whether a progress bar is shown.
        options: of `generate`.
    """
    deqnar = is_deqnar(model.config)
    if batch_size < 1:
        raise ValueError(f"The batch size must be at least 1, not {batch_size}.")
    if options.get("num_return_sequences", 1) != 1:
        raise ValueError("num_return_sequences must be 1: systems are scored by one translation per sentence.")
    options["num_return_sequences"] = 1  # overrides the model's generation config
    if deqnar:
        check_named_reranker(tokenizer, model, options)
        options = {**options, "return_dict_in_generate": True}
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    texts, nfe = [""] * len(sentences), [0] * len(sentences)
    converged, residual = [True] * len(sentences), [0.0] * len(sentences)
    solved = deqnar and model.config.seeks_equilibrium
    start = time.perf_counter()
    for first in tqdm(
        range(0, len(order), batch_size), desc="translating", unit="batch", disable=None if show_progress else True
    ):
        indices = order[first : first + batch_size]
        inputs = [prefix + sentences[index] for index in indices]
        batch = encode_texts(tokenizer, inputs, longest_source(model.config))
        result = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}, **options
        )
        sequences = result.sequences if deqnar else result
        decoded = tokenizer.batch_decode(sequences, skip_special_tokens=True)
        for index, text in zip(indices, decoded, strict=True):
            texts[index] = text.strip() if clean_text(sentences[index]) else ""
        if deqnar:
            for row, index in enumerate(indices):
                nfe[index] = int(result.nfe[row])
                if solved:
                    converged[index], residual[index] = bool(result.converged[row]), float(result.residual[row])
    seconds = time.perf_counter() - start
    if not deqnar:
        return Translations(texts, seconds)
    return Translations(texts, seconds, nfe, *((converged, residual) if solved else (None, None)))


def labelled_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], batch_size: int
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Batches of pairs of similar length, with labels of −100 at padding, and the indices of the pairs in their order.

    Args:
        model: that the batches are for; determines the device and the maximum length.
        tokenizer: of the model.
        pairs: sources and targets.
        batch_size: pairs of a batch.
    """
    order = sorted(range(len(pairs)), key=lambda index: (len(pairs[index][1]), len(pairs[index][0])))
    batches = []
    for first in range(0, len(order), batch_size):
        sources, targets = zip(*(pairs[index] for index in order[first : first + batch_size]), strict=True)
        batch = encode_texts(tokenizer, sources, longest_source(model.config))
        encoded = encode_texts(tokenizer, targets, model.config.max_position_embeddings, side="text_target")
        labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)[
            :, num_start_tokens(tokenizer) :
        ]
        columns = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
        batches.append({name: values.to(model.device) for name, values in columns.items()})
    return batches, order


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], longest: int | None, side: str = "text"
) -> dict[str, Tensor]:
    """Tokenise texts into a padded batch; an empty text is encoded as ".", because a row must not be empty.

    Args:
        tokenizer: of the model.
        texts: of one batch.
        longest: tokens to which a text is truncated.
        side: argument of the tokenizer, `text` or `text_target`.
    """
    cleaned = [clean_text(text) or "." for text in texts]
    return tokenizer(**{side: cleaned}, return_tensors="pt", padding=True, truncation=True, max_length=longest)

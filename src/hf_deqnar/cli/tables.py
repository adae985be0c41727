"""Utilities of `ngrams` and `shortlist`, which add a table of counts to a trained model."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..data.parallel_text import Pair
    from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration

PART = 10_000  # texts that are tokenised at once
HELD_OUT = 20  # every 20th pair is not counted but used for evaluation


@dataclass
class TableArguments:
    """Model, sentence pairs and output folder."""

    model: str = field(metadata={"help": "Directory or hub id of a model."})
    data: list[str] = field(
        metadata={"help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; or several of them."}
    )
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the target language."})
    output_dir: str = field(metadata={"help": "Folder for the model with its table."})


def open_model(
    arguments: TableArguments, what: str
) -> tuple["DeqNarForConditionalGeneration", "PreTrainedTokenizerBase", list["Pair"]]:
    """The model, its tokenizer and the pairs; an error if the output folder is not empty."""
    from ..data.parallel_text import read_parallel
    from ..models.deqnar.configuration_deqnar import is_deqnar
    from .loading import load_model

    output = Path(arguments.output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder; name another.")
    model, tokenizer = load_model(arguments.model, "cpu", runtime="torch")
    if not is_deqnar(model.config):
        raise ValueError(f"{arguments.model} is of type {model.config.model_type}; only deqnar models have {what}.")
    pairs = [pair for data in arguments.data for pair in read_parallel(data, arguments.source, arguments.target)]
    if len(pairs) <= HELD_OUT:
        raise ValueError(f"{', '.join(arguments.data)}: {len(pairs)} pairs are too few to count {what}.")
    return model, tokenizer, pairs


def in_parts(tokenize: Callable[[list[str]], list[list[int]]], texts: list[str], what: str) -> list[list[int]]:
    """Token ids of all texts, with a progress bar."""
    from tqdm import tqdm

    found: list[list[int]] = []
    with tqdm(total=len(texts), desc=what, unit="text", delay=2, disable=None) as progress:
        for first in range(0, len(texts), PART):
            part = texts[first : first + PART]
            found += tokenize(part)
            progress.update(len(part))
    return found


def hold_out(items: list) -> tuple[list, list]:
    """The items to count, and the held-out ones."""
    return [item for number, item in enumerate(items) if number % HELD_OUT], items[::HELD_OUT]


def save_atomically(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", output: Path) -> None:
    """Save a model to a temporary folder that is renamed when it is complete."""
    unfinished = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if output.exists():
        output.rmdir()
    os.replace(unfinished, output)

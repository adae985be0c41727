"""What `ngrams` and `shortlist` share: a trained model is given a table that is counted, and is saved with it."""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..corpus.reading import Pair, read_parallel
from ..modeling_deqnar import DeqNarForConditionalGeneration
from .loading import load_model

HELD_OUT = 20  # every such pair is not counted, but told of


@dataclass
class TableArguments:
    """Which model, which sentences, and where to."""

    model: str = field(metadata={"help": "Directory or hub id of a model."})
    data: list[str] = field(
        metadata={"help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; or several of them."}
    )
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the target language."})
    output_dir: str = field(metadata={"help": "Folder for the model with its table."})


def open_model(
    arguments: TableArguments, what: str
) -> tuple[DeqNarForConditionalGeneration, PreTrainedTokenizerBase, list[Pair]]:
    """The model, its tokenizer and the pairs, once it is sure that the folder of the result is free."""
    output = Path(arguments.output_dir)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise FileExistsError(f"{output} exists and is not an empty folder; name another.")
    model, tokenizer = load_model(arguments.model, "cpu", runtime="torch")
    if model.config.model_type != "deqnar":
        raise ValueError(f"{arguments.model} is of type {model.config.model_type}; only deqnar models have {what}.")
    pairs = [pair for data in arguments.data for pair in read_parallel(data, arguments.source, arguments.target)]
    if len(pairs) <= HELD_OUT:
        raise ValueError(f"{', '.join(arguments.data)}: {len(pairs)} pairs are too few to learn {what} from.")
    return model, tokenizer, pairs


def learned_and_others(items: list) -> tuple[list, list]:
    """What is counted, and what is held out."""
    return [item for number, item in enumerate(items) if number % HELD_OUT], items[::HELD_OUT]


def save_whole(model: DeqNarForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Save a model under a name that it has only when all of it is written."""
    unfinished = output.with_name(f"{output.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if output.exists():
        output.rmdir()
    os.replace(unfinished, output)

"""Give a model a shortlist, so that it need not look at its whole vocabulary.

    hf-deqnar shortlist my-model quick-model --data distilled.jsonl.gz --source en --target de

For every source token the likeliest companions are learned from sentence pairs (those that the model was trained on, or
the like); a translation is then made of the companions of its source, and of what is common everywhere. `generate` uses
a shortlist wherever a model has one, unless it is told otherwise (shortlist=False). What is printed tells how many
tokens are looked at, and how many of the targets could be written so, in pairs that the lists were not learned from.
"""

import argparse
from pathlib import Path

import torch

from ..corpus.reading import read_parallel
from ..corpus.shortlist import add_shortlist
from ..pipeline_deqnar import clean_text
from .loading import load_model

HELD_OUT = 20  # every such pair is not learned from, but counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory or hub id")
    parser.add_argument("output", type=Path, help="folder for the model with its shortlist")
    parser.add_argument("--data", required=True, help="JSONL, TSV or CSV (.gz), or the beginning of two aligned files")
    parser.add_argument("--source", required=True, help="column (or file ending) of the source language")
    parser.add_argument("--target", required=True, help="column (or file ending) of the target language")
    parser.add_argument("--size", type=int, default=40, help="companions of every source token (default: 40)")
    parser.add_argument("--common", type=int, default=300, help="tokens that go with every source (default: 300)")


def run(options: argparse.Namespace) -> None:
    if options.output.exists() and (not options.output.is_dir() or any(options.output.iterdir())):
        raise FileExistsError(f"{options.output} exists and is not an empty folder; name another.")
    model, tokenizer = load_model(options.model, "cpu", runtime="torch")
    if model.config.model_type != "deqnar":
        raise ValueError(f"{options.model} is of type {model.config.model_type}; only deqnar models have shortlists.")
    pairs = read_parallel(options.data, options.source, options.target)
    if len(pairs) <= HELD_OUT:
        raise ValueError(f"{options.data} has {len(pairs)} pairs; that is too few to learn what goes with what.")
    sources = tokenizer([clean_text(pair.source) for pair in pairs])["input_ids"]
    targets = tokenizer([clean_text(pair.references[0]) for pair in pairs])["input_ids"]
    learned = [number for number in range(len(pairs)) if number % HELD_OUT]
    add_shortlist(
        model,
        [sources[number] for number in learned],
        [targets[number] for number in learned],
        options.size,
        options.common,
    )
    words, reached = coverage(model.model.shortlist, sources[::HELD_OUT], targets[::HELD_OUT])
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    print(
        f"{words:.0f} of {model.config.vocab_size:,} tokens are looked at on average; {reached:.2%} of the tokens of "
        f"{len(sources[::HELD_OUT]):,} other targets are among them."
    )


def coverage(shortlist: torch.nn.Module, sources: list[list[int]], targets: list[list[int]]) -> tuple[float, float]:
    """Mean size of the lists of these sources, and the share of the targets' tokens on them."""
    size = written = reached = 0
    for source, target in zip(sources, targets, strict=True):
        row = torch.tensor([source])
        words = set(shortlist(row, torch.ones_like(row, dtype=torch.bool)).tokens.tolist())
        size += len(words)
        written += len(target)
        reached += sum(token in words for token in target)
    return size / len(sources), reached / max(1, written)

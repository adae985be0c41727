"""Give a model a shortlist, so that it need not look at its whole vocabulary.

    hf-deqnar shortlist --model my-model --data distilled.jsonl.gz --source en --target de --output_dir quick-model

For every source token the likeliest companions are learned from sentence pairs (those that the model was trained on, or
the like); a translation is then made of the companions of its source, and of what is common everywhere. `generate` uses
a shortlist wherever a model has one, unless it is told otherwise (shortlist=False). What is printed tells how many
tokens are looked at, and how many of the targets could be written so, in pairs that the lists were not learned from.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..corpus.shortlist import add_shortlist
from ..corpus.tokenized import target_ids
from ..pipeline_deqnar import clean_text
from .loading import train_extra
from .tables import TableArguments, learned_and_others, open_model, save_whole

TAKES_ALL = True  # its flags are those of a dataclass


@dataclass
class ShortlistArguments(TableArguments):
    """Which model, which pairs, and how long the lists are."""

    size: int = field(default=40, metadata={"help": "Companions of every source token."})
    common: int = field(default=300, metadata={"help": "Tokens that go with every source."})


def run(options: argparse.Namespace) -> None:
    with train_extra("Reading settings"):
        from ..training.arguments import parse_arguments
    (arguments,) = parse_arguments((ShortlistArguments,), options.arguments, "hf-deqnar shortlist")
    model, tokenizer, pairs = open_model(arguments, "shortlists")
    sources = tokenizer([clean_text(pair.source) for pair in pairs])["input_ids"]
    targets = target_ids(tokenizer, [clean_text(pair.references[0]) for pair in pairs])
    learned, others = learned_and_others(list(zip(sources, targets, strict=True)))
    add_shortlist(model, *map(list, zip(*learned, strict=True)), arguments.size, arguments.common)
    words, reached = coverage(model.model.shortlist, *map(list, zip(*others, strict=True)))
    save_whole(model, tokenizer, Path(arguments.output_dir))
    print(
        f"{words:.0f} of {model.config.vocab_size:,} tokens are looked at on average; {reached:.2%} of the tokens of "
        f"{len(others):,} other targets are among them."
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

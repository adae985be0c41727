"""Add a shortlist to a model, so that it computes logits for a part of the vocabulary only.

    hf-deqnar shortlist --model my-model --data distilled.jsonl.gz --source en --target de --output_dir short-model

For every source token the most likely target tokens are counted in sentence pairs, such as those that the model was
trained on. A translation then consists of the tokens listed for its source and of the most common ones. `generate` uses
the shortlist of a model by default (`shortlist=False` turns it off). Prints the mean size of the lists, and the share
of the tokens of held-out targets that they contain.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .extras import requires_extra
from .tables import TableArguments, hold_out, in_parts, open_model, save_atomically

if TYPE_CHECKING:
    from torch.nn import Module


@dataclass
class ShortlistArguments(TableArguments):
    """Model, sentence pairs and length of the lists."""

    size: int = field(default=40, metadata={"help": "Target tokens listed for every source token."})
    common: int = field(default=300, metadata={"help": "Most common target tokens, listed for every source."})


ARGUMENTS = (ShortlistArguments,)


def run(arguments: ShortlistArguments) -> None:
    with requires_extra("train", "This command"):
        from ..data.shortlist_counts import add_shortlist
        from ..data.tokenized_dataset import target_ids
        from ..models.deqnar.text import clean_text
    model, tokenizer, pairs = open_model(arguments, "shortlists")
    sources = in_parts(
        lambda texts: tokenizer(texts)["input_ids"], [clean_text(pair.source) for pair in pairs], "tokenizing sources"
    )
    targets = in_parts(
        partial(target_ids, tokenizer), [clean_text(pair.references[0]) for pair in pairs], "tokenizing targets"
    )
    counted, held_out = hold_out(list(zip(sources, targets, strict=True)))
    add_shortlist(model, *map(list, zip(*counted, strict=True)), arguments.size, arguments.common)
    size, covered = coverage(model.model.shortlist, *map(list, zip(*held_out, strict=True)))
    save_atomically(model, tokenizer, Path(arguments.output_dir))
    print(
        f"The lists have {size:.0f} of {model.config.vocab_size:,} tokens on average, and contain {covered:.2%} of the "
        f"tokens of {len(held_out):,} held-out targets."
    )


def coverage(shortlist: "Module", sources: list[list[int]], targets: list[list[int]]) -> tuple[float, float]:
    """Mean size of the lists of these sources, and the share of the targets' tokens on them."""
    import torch
    from tqdm import tqdm

    size = total = covered = 0
    pairs = list(zip(sources, targets, strict=True))
    for source, target in tqdm(pairs, desc="measuring coverage", unit="pair", delay=2, disable=None):
        row = torch.tensor([source])
        listed = set(shortlist(row, torch.ones_like(row, dtype=torch.bool)).tokens.tolist())
        size += len(listed)
        total += len(target)
        covered += sum(token in listed for token in target)
    return size / len(sources), covered / max(1, total)

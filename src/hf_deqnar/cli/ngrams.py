"""Add n-grams of the target language to a CTC model, for its beam search.

    hf-deqnar ngrams --model my-model --data distilled.jsonl.gz --source en --target de --output_dir ngram-model

A CTC model predicts all tokens in parallel, so a translation may mix two valid ones. The probability of each token
given the tokens before it is low for such a mixture. The n-grams are counted in the targets of
sentence pairs: those that the model was trained on, and any others. `generate` then searches with a beam of five,
unless its options are changed (`ctc_beam_size`, `ngram_weight`, `token_bonus`). Prints the perplexity on
held-out targets.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .extras import requires_extra
from .tables import TableArguments, hold_out, in_parts, open_model, save_atomically

if TYPE_CHECKING:
    from ..models.deqnar.ngrams import Fluency


@dataclass
class NgramArguments(TableArguments):
    """Model, texts and weights in the search."""

    order: int = field(default=3, metadata={"help": "Tokens of the longest n-gram."})
    least: int = field(default=2, metadata={"help": "Minimum count of n-grams of three or more tokens."})
    weight: float = field(default=0.2, metadata={"help": "Weight of log p of a text in the search."})
    bonus: float = field(default=1.5, metadata={"help": "Added to the score of a text for every token."})

    def __post_init__(self) -> None:
        if self.order < 2 or self.least < 1:
            raise ValueError(f"order={self.order} and least={self.least} must be at least 2 and 1.")
        if self.weight <= 0 or self.bonus < 0:
            raise ValueError(f"weight={self.weight} must be above 0, and bonus={self.bonus} not below.")


ARGUMENTS = (NgramArguments,)


def run(arguments: NgramArguments) -> None:
    with requires_extra("train", "This command"):
        from ..data.ngram_counts import add_ngrams
        from ..data.tokenized_dataset import target_ids
        from ..models.deqnar.ngrams import Fluency
        from ..models.deqnar.text import clean_text
    model, tokenizer, pairs = open_model(arguments, "n-grams")
    targets = [clean_text(pair.references[0]) for pair in pairs]
    texts = in_parts(partial(target_ids, tokenizer), targets, "tokenizing targets")
    counted, held_out = hold_out(texts)
    names = ("order", "least", "weight", "bonus")
    add_ngrams(model, counted, **{name: getattr(arguments, name) for name in names})
    measured = perplexity(Fluency(model.model.ngrams, 1.0, 0.0, model.config.eos_token_id), held_out)
    save_atomically(model, tokenizer, Path(arguments.output_dir))
    print(
        f"{model.config.ngram_entries:,} n-grams of 2 to {arguments.order} tokens; perplexity {measured:.1f} on "
        f"{len(held_out):,} held-out texts."
    )


def perplexity(fluency: "Fluency", texts: list[list[int]]) -> float:
    """exp of the mean −log p of a token, the ends of the texts included."""
    from tqdm import tqdm

    total, count = 0.0, 0
    of_token, of_end = fluency.one_by_one()
    for text in tqdm(texts, desc="measuring perplexity", unit="text", delay=2, disable=None):
        tokens = [token for token in text if token != fluency.end]
        total += sum(of_token(tuple(tokens[:place]), token) for place, token in enumerate(tokens))
        total += of_end(tuple(tokens))
        count += len(tokens) + 1
    return math.exp(-total / count)

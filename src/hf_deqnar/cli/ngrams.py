"""Give a model n-grams of its target language, so that a beam search knows what follows what.

    hf-deqnar ngrams --model my-model --data distilled.jsonl.gz --source en --target de --output_dir fluent-model

A CTC model writes all words at once, and may mix two ways to say a thing; how likely each token is after those before
it tells such a mixture from a sentence. The texts are the targets of sentence pairs: those that the model was trained
on, and any others. `generate` then searches with a beam of five, unless it is told otherwise (`ctc_beam_size`,
`ngram_weight`, `token_bonus`). What is printed tells how well the n-grams guess texts that they were not learned from.
"""

import argparse
import math
from dataclasses import dataclass, field
from pathlib import Path

from ..corpus.ngrams import add_ngrams
from ..corpus.tokenized import target_ids
from ..ngrams_deqnar import Fluency
from ..pipeline_deqnar import clean_text
from .loading import train_extra
from .tables import TableArguments, learned_and_others, open_model, save_whole

TAKES_ALL = True  # its flags are those of a dataclass


@dataclass
class NgramArguments(TableArguments):
    """Which model, which texts, and how much they count."""

    order: int = field(default=3, metadata={"help": "Tokens of the longest n-gram."})
    least: int = field(default=2, metadata={"help": "n-grams of three tokens and more are listed if seen so often."})
    weight: float = field(default=0.2, metadata={"help": "Weight of log p of a text in the search."})
    bonus: float = field(default=1.5, metadata={"help": "What every token adds to a text in the search."})

    def __post_init__(self) -> None:
        if self.order < 2 or self.least < 1:
            raise ValueError(f"order={self.order} and least={self.least} must be at least 2 and 1.")
        if self.weight <= 0 or self.bonus < 0:
            raise ValueError(f"weight={self.weight} must be above 0, and bonus={self.bonus} not below.")


def run(options: argparse.Namespace) -> None:
    with train_extra("Reading settings"):
        from ..training.arguments import parse_arguments
    (arguments,) = parse_arguments((NgramArguments,), options.arguments, "hf-deqnar ngrams")
    model, tokenizer, pairs = open_model(arguments, "n-grams")
    texts = target_ids(tokenizer, [clean_text(pair.references[0]) for pair in pairs])
    learned, others = learned_and_others(texts)
    names = ("order", "least", "weight", "bonus")
    add_ngrams(model, learned, **{name: getattr(arguments, name) for name in names})
    guessed = perplexity(Fluency(model.model.ngrams, 1.0, 0.0, model.config.eos_token_id), others)
    save_whole(model, tokenizer, Path(arguments.output_dir))
    print(
        f"{model.config.ngram_entries:,} n-grams of 2 to {arguments.order} tokens; perplexity {guessed:.1f} on "
        f"{len(others):,} other texts."
    )


def perplexity(fluency: Fluency, texts: list[list[int]]) -> float:
    """exp of the mean −log p of a token, ends of texts among them."""
    total, count = 0.0, 0
    of_token, of_end = fluency.one_by_one()
    for text in texts:
        tokens = [token for token in text if token != fluency.end]
        total += sum(of_token(tuple(tokens[:place]), token) for place, token in enumerate(tokens))
        total += of_end(tuple(tokens))
        count += len(tokens) + 1
    return math.exp(-total / count)

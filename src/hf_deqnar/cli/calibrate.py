"""Fit the quality estimate of a model on a validation set.

    hf-deqnar calibrate --model my-model --data validation.jsonl.gz --source en --target de --train_data train.jsonl.gz

Translates the validation set, fits the quality of sentences to chrF and that of words to their presence in a reference,
and writes the parameters to generation_config.json in the folder of the model, whose weights are not changed. Prints
tables of the estimate beside what it estimates, for sentences that the parameters were not fitted on. The estimate is
for the decoding options of the generation config; after changing these, fit it again.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .extras import requires_extra
from .terminal_tables import print_results

if TYPE_CHECKING:
    from ..evaluation.calibration import Calibration

FEWEST_PAIRS = 20


@dataclass
class CalibrationArguments:
    """Model and data."""

    model: str = field(metadata={"help": "Directory of a model; its generation_config.json is written."})
    data: str = field(metadata={"help": "Validation set: JSONL, TSV, CSV (.gz), Parquet or two aligned files."})
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the references."})
    train_data: list[str] = field(
        default_factory=list,
        metadata={"help": "Corpora whose sources show what the source language looks like. Default: the data."},
    )
    limit: int | None = field(default=None, metadata={"help": "Use only the first pairs of the data, this many."})
    batch_size: int = field(default=32, metadata={"help": "Sentences translated together."})

    def __post_init__(self) -> None:
        for name in ("limit", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}.")


ARGUMENTS = (CalibrationArguments,)


def run(arguments: CalibrationArguments) -> None:
    with requires_extra("train", "This command"):
        from ..data.parallel_text import read_parallel
        from ..evaluation.calibration import calibrate
    from ..models.deqnar.configuration_deqnar import is_deqnar
    from .loading import load_model

    if not Path(arguments.model).is_dir():
        raise FileNotFoundError(f"{arguments.model} is not a directory; save the model in one.")
    model, tokenizer = load_model(arguments.model, runtime="torch")
    if not is_deqnar(model.config):
        raise ValueError(
            f"{arguments.model} is of type {model.config.model_type}; only deqnar models have quality estimates."
        )
    pairs = read_parallel(arguments.data, arguments.source, arguments.target)[: arguments.limit]
    pairs = [pair for pair in pairs if pair.source.strip()]
    if len(pairs) < FEWEST_PAIRS:
        raise ValueError(f"{arguments.data}: {len(pairs)} pairs are too few; give at least {FEWEST_PAIRS}.")
    texts = [
        pair.source
        for corpus in arguments.train_data or [arguments.data]
        for pair in read_parallel(corpus, arguments.source, arguments.target)
    ]
    found = calibrate(model, tokenizer, pairs, texts, arguments.batch_size)
    model.generation_config.update(quality=found.quality)
    model.generation_config.save_pretrained(arguments.model)
    print_results(describe(found))


def describe(found: "Calibration") -> str:
    """Both tables as Markdown, and further figures."""
    from ..benchmarks.common import markdown_table

    def rows(bins: list[tuple[float, float, int, float, float]], percent: float) -> list[list[str]]:
        return [
            [f"{low:.1f} to {high:.1f}", f"{count:,}", f"{percent * mean:.1f}", f"{percent * score:.1f}"]
            for low, high, count, mean, score in bins
        ]

    sentences = markdown_table(["quality", "sentences", "mean quality × 100", "mean chrF"], rows(found.sentences, 100))
    words = markdown_table(["quality", "words", "mean quality × 100", "% in a reference"], rows(found.words, 100))
    return (
        f"{sentences}\n\n{words}\n\nRank correlation of quality and chrF: {found.correlation:.2f}. Mean quality of "
        f"foreign texts: {found.foreign:.2f}; {found.foreign_found:.1%} of the references are recognised as such."
    )

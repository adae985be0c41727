"""Test sets for numbers, names and unusual surfaces, made from a test corpus, and how a model does on them.

    python experiments/robustness.py src/hf_deqnar/pretrained [MODEL …] --data data/tatoeba/test.jsonl.gz \
        --corpus data/tatoeba/train.jsonl.gz --source en --target de

Rows of kinds with digits or names pass if the translation has exactly these digits, or the name. All other kinds are
scored by chrF against the references. `plain` has the rows of `surface` kinds as they are in the corpus. Everything is
drawn with a fixed seed; `--output FILE` writes the rows as JSON lines.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from hf_deqnar.data.name_augmentation import replace_names
from hf_deqnar.data.number_augmentation import RUN, replace_numbers
from hf_deqnar.data.parallel_text import Pair, read_parallel
from hf_deqnar.data.surface_augmentation import lower_case, typographic, upper_case, without_final_punctuation

SEED = 0
ROWS = 200  # of every kind, at most

TIMES = (
    "The train leaves at {0}:{1:02}.",
    "The meeting starts at {0}:{1:02} and ends at {2}:{1:02}.",
    "I got up at {0}:{1:02} this morning.",
    "Is it already {0}:{1:02}?",
)
DATES = (
    "He was born on March {0}, {1}.",
    "The letter is dated {0} October {1}.",
    "We will meet on June {0}.",
    "The war ended in {1}.",
)
AMOUNTS = (
    "This book costs {0} dollars.",
    "I paid {0} euros for {1} tickets.",
    "The room is {1} meters long.",
    "About {0} people live in this village.",
)
SURFACES = {
    "capitals": upper_case,
    "small letters": lower_case,
    "no final punctuation": without_final_punctuation,
    "typographic": typographic,
}


@dataclass
class Row:
    """A test sentence.

    Attributes:
        kind: of the test.
        source: the sentence.
        references: its translations; empty if it is judged by what it must contain.
        needed: digits, or a name, that the translation must contain.
    """

    kind: str
    source: str
    references: list[str]
    needed: list[str]


def digit_rows(kind: str, templates: tuple[str, ...], draw: Callable[[], tuple[int, ...]]) -> list[Row]:
    """Templates with numbers."""
    sources = [templates[index % len(templates)].format(*draw()) for index in range(ROWS)]
    return [Row(kind, source, [], RUN.findall(source)) for source in sources]


def make_rows(pairs: list[Pair], corpus: list[Pair], seed: int = SEED) -> list[Row]:
    """The rows of all kinds.

    Args:
        pairs: the test corpus.
        corpus: where other names come from.
    """
    generator = random.Random(seed)
    rows = digit_rows("times", TIMES, lambda: tuple(generator.randint(*ends) for ends in ((1, 12), (0, 59), (1, 12))))
    rows += digit_rows("dates", DATES, lambda: (generator.randint(2, 31), generator.randint(1700, 2049)))
    rows += digit_rows("amounts", AMOUNTS, lambda: (generator.randint(2, 999), generator.randint(2, 99)))
    changed = (replace_numbers(pair, generator) for pair in pairs)
    numbered = [pair for pair in changed if pair is not None][:ROWS]
    rows += [Row("numbers of the corpus", pair.source, [], RUN.findall(pair.source)) for pair in numbered]
    named, names = replace_names(pairs, corpus, seed)
    rows += [Row("names", pair.source, [], [name]) for pair, name in list(zip(named, names, strict=True))[:ROWS]]
    chosen = generator.sample(pairs, min(ROWS, len(pairs)))
    rows += [Row("plain", pair.source, pair.references, []) for pair in chosen]
    for kind, change in SURFACES.items():
        for pair in chosen:
            changed_pairs = [change(pair.source, reference) for reference in pair.references]
            rows.append(Row(kind, changed_pairs[0][0], [target for _, target in changed_pairs], []))
    for count in (2, 4):
        for first in range(0, len(chosen) - count + 1, count):
            several = chosen[first : first + count]
            target = " ".join(pair.references[0] for pair in several)
            rows.append(Row(f"{count} sentences", " ".join(pair.source for pair in several), [target], []))
    return rows


def passes(row: Row, text: str) -> bool:
    """Whether a translation has the digits, in any order, or the name of its source.

    >>> row = Row("times", "At 7:05.", [], ["7", "05"])
    >>> passes(row, "Um 7.05 Uhr."), passes(row, "Um 7.5 Uhr."), passes(row, "Um 7.05 Uhr am 1. Mai.")
    (True, False, False)
    """
    if row.needed[0].isdigit():
        return sorted(RUN.findall(text)) == sorted(row.needed)
    return row.needed[0] in text


def judge(rows: list[Row], texts: list[str]) -> dict[str, tuple[int, float]]:
    """Number of rows and score of every kind: percent that pass, or mean chrF."""
    import sacrebleu

    scores: dict[str, list[float]] = {}
    for row, text in zip(rows, texts, strict=True):
        if row.needed:
            score = 100.0 * passes(row, text)
        else:
            score = max(sacrebleu.sentence_chrf(text, [reference]).score for reference in row.references)
        scores.setdefault(row.kind, []).append(score)
    return {kind: (len(values), sum(values) / len(values)) for kind, values in scores.items()}


def translate(model: str, rows: list[Row]) -> list[str]:
    """Translations of the pipeline, which splits texts into sentences."""
    from transformers import pipeline

    import hf_deqnar  # noqa: F401  (registers the translation pipeline)

    found = pipeline("translation", model=model)([row.source for row in rows], batch_size=32, warn_unfamiliar=False)
    return [one["translation_text"] for one in found]


def main(arguments: list[str] | None = None) -> None:
    """Print a table: a row for each kind, a column for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="Folders of models.")
    parser.add_argument("--data", required=True, help="Test corpus.")
    parser.add_argument("--corpus", required=True, help="Corpus whose names replace those of the test corpus.")
    parser.add_argument("--source", required=True, help="Column of the source language.")
    parser.add_argument("--target", required=True, help="Column of the references.")
    parser.add_argument("--output", type=Path, help="Write the rows and their translations by each model here.")
    options = parser.parse_args(arguments)
    columns = (options.source, options.target)
    rows = make_rows(read_parallel(options.data, *columns), read_parallel(options.corpus, *columns))
    texts = {model: translate(model, rows) for model in options.models}
    figures = {model: judge(rows, found) for model, found in texts.items()}
    print(f"| kind | measure | rows | {' | '.join(options.models)} |")
    print(f"|---|---|---|{'---|' * len(options.models)}")
    for kind, (count, _) in figures[options.models[0]].items():
        measure = "% right" if next(row for row in rows if row.kind == kind).needed else "chrF"
        cells = " | ".join(f"{figures[model][kind][1]:.1f}" for model in options.models)
        print(f"| {kind} | {measure} | {count} | {cells} |")
    if options.output is not None:
        lines = (
            json.dumps({**asdict(row), **{model: texts[model][index] for model in texts}}, ensure_ascii=False)
            for index, row in enumerate(rows)
        )
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

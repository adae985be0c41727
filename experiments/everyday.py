"""Judge a model on 100 everyday sentences that were written before it was trained and are used for nothing else.

    python experiments/everyday.py src/hf_deqnar/pretrained [MODEL …]

A translation passes if its chrF against the closest of its references is at least 70. Sentences have three kinds:
phrase-book basics, others of up to ten words, and longer ones. About a fifth of the short ones also occur in Tatoeba.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

from hf_deqnar.evaluation.translation import translate_sentences

SENTENCES = Path(__file__).with_name("everyday.jsonl")
PASSING = 70.0


def read_sentences() -> list[dict]:
    """The sentences: `en`, `de` (references) and `kind`."""
    return [json.loads(line) for line in SENTENCES.read_text(encoding="utf-8").splitlines()]


def best_chrf(text: str, references: list[str]) -> float:
    """The chrF of a translation against the closest of its references."""
    import sacrebleu

    return max(sacrebleu.sentence_chrf(text, [reference]).score for reference in references)


def judge(model: str) -> tuple[dict[str, list[bool]], list[str]]:
    """Which sentences pass, by kind, and a line for each that does not."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    import hf_deqnar  # noqa: F401  (registers the Auto classes)

    rows = read_sentences()
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSeq2SeqLM.from_pretrained(model)
    found = translate_sentences(network, tokenizer, [row["en"] for row in rows], 32, show_progress=False)
    passed, failures = defaultdict(list), []
    for row, text in zip(rows, found.texts, strict=True):
        score = best_chrf(text, row["de"])
        passed[row["kind"]].append(score >= PASSING)
        if score < PASSING:
            failures.append(f"{score:5.1f}  {row['en']}  →  {text}")
    return passed, failures


def main() -> None:
    """Print a table of the models and the sentences that do not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="Folders of models.")
    arguments = parser.parse_args()
    table, details = [], []
    for model in arguments.models:
        passed, failures = judge(model)
        shares = [f"{sum(kind)} of {len(kind)}" for kind in (passed["phrase"], passed["short"], passed["long"])]
        table.append(f"| {model} | {' | '.join(shares)} |")
        details += [f"\n{model}", *failures]
    print("\n".join(["| model | phrases | short | long |", "|---|---|---|---|", *table, *details]))


if __name__ == "__main__":
    main()

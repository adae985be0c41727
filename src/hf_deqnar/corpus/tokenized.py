"""Sentence pairs as token ids, made once and kept on disk through the `datasets` library."""

import copy
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..pipeline_deqnar import clean_text
from .reading import Pair

if TYPE_CHECKING:  # part of the train extra
    from datasets import Dataset

logger = logging.get_logger(__name__)

KEPT, EMPTY, TOO_LONG, NO_CANVAS = "kept", "empty", "too long", "longer than its canvas"


@dataclass
class TokenizedPairs:
    """A data set with `input_ids`, `labels` and `number` (the pair's place in the corpus), and what was left out."""

    dataset: "Dataset"
    left_out: dict[str, int]
    fingerprint: str

    def describe(self) -> str:
        """How many pairs are used, and why the others are not."""
        reasons = ", ".join(f"{count:,} {fate}" for fate, count in self.left_out.items()) or "none"
        total = len(self.dataset) + sum(self.left_out.values())
        return f"{len(self.dataset):,} of {total:,} pairs are used (left out: {reasons})"


def tokenize_pairs(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    canvas: int | None = None,
    cache: str | Path | None = None,
) -> TokenizedPairs:
    """Training pairs as token ids. The first reference is the target.

    Left out and counted: pairs with an empty side, with more than `max_length` tokens on a side, and, for CTC models,
    targets that do not fit on `canvas` × source positions.

    Args:
        cache: folder where the result is kept; a second call with the same texts and tokenizer reads it from there.
    """
    texts = {
        "source": cleaned(pair.source for pair in pairs),
        "target": cleaned(pair.references[0] for pair in pairs),
    }

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        sides = [tokenizer(batch["source"])["input_ids"], target_ids(tokenizer, batch["target"])]
        fates = [
            fate_of(*row, max_length, canvas) for row in zip(batch["source"], batch["target"], *sides, strict=True)
        ]
        return {"input_ids": sides[0], "labels": sides[1], "fate": fates}

    settings = [str(max_length), str(canvas), rules_of(tokenizer)]
    fingerprint = fingerprint_of([*settings, *texts["source"], *texts["target"]])
    tokenized = map_once(texts, tokenize, fingerprint, cache)
    return usable(tokenized, max_length, fingerprint)


def cleaned(texts: Iterable[str]) -> list[str]:
    """The texts as models read them; one that is no text is named by its place in the corpus."""
    found = []
    for number, text in enumerate(texts, start=1):
        try:
            found.append(clean_text(text))
        except ValueError as error:
            raise ValueError(f"Sentence {number} of the corpus: {error}") from error
    return found


def rules_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that decides how a tokenizer cuts a text. Slow ones keep that to themselves, and some of them have
    other rules for targets, so they are not trained with."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"Training needs a fast tokenizer, and {type(tokenizer).__name__} is a slow one; without --tokenizer a new "
            "one is trained."
        )
    rules = copy.deepcopy(tokenizer.backend_tokenizer)
    rules.no_truncation()  # as its last call may have left it; it is not so for the next
    rules.no_padding()
    return rules.to_str() + " without the first of a target" * start_tokens(tokenizer)


def start_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many tokens stand before a target that no model here writes: the `<s>` of Bart and its kin."""
    start = tokenizer.bos_token_id
    return int(start not in (None, tokenizer.eos_token_id) and tokenizer("")["input_ids"][:1] == [start])


def target_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> list[list[int]]:
    """Token ids of targets, as models learn to write them."""
    start = start_tokens(tokenizer)
    return [ids[start:] for ids in tokenizer(texts, **options)["input_ids"]]


def map_once(
    texts: dict[str, list],
    function: Callable[[dict[str, list]], dict[str, list]],
    fingerprint: str,
    cache: str | Path | None,
    *,
    description: str = "tokenizing",
    processes: int | None = None,
) -> "Dataset":
    """Apply a function to columns of texts, which become columns of numbers; the result is kept by its fingerprint."""
    datasets = _datasets()
    folder = Path(datasets.config.HF_DATASETS_CACHE if cache is None else cache) / "hf_deqnar"
    folder.mkdir(parents=True, exist_ok=True)
    numbered = {**texts, "number": list(range(len(next(iter(texts.values())))))}
    return datasets.Dataset.from_dict(numbered).map(
        function,
        batched=True,
        remove_columns=list(texts),
        cache_file_name=str(folder / f"{fingerprint}.arrow"),
        new_fingerprint=fingerprint,
        num_proc=processes,
        desc=description,
    )


def usable(tokenized: "Dataset", max_length: int, fingerprint: str) -> TokenizedPairs:
    """The pairs whose fate is to be kept, and how many have which other one."""
    fates = tokenized["fate"][:]
    left_out = {fate: count for fate, count in Counter(fates).items() if fate != KEPT}
    kept = [place for place, fate in enumerate(fates) if fate == KEPT]
    if not kept:
        reasons = ", ".join(f"{count:,} {fate}" for fate, count in left_out.items())
        raise ValueError(f"None of {len(fates):,} pairs can be used ({reasons}; max_length is {max_length}).")
    return TokenizedPairs(tokenized.remove_columns("fate").select(kept), left_out, fingerprint)


def tokenize_for_validation(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> "Dataset":
    """All pairs with their texts, so that translations are scored against every reference; long ones are cut."""
    columns: dict[str, list[Any]] = {"source": [pair.source for pair in pairs]}
    columns["references"] = [pair.references for pair in pairs]
    targets = [pair.references[0] for pair in pairs]
    cut = {"truncation": True, "max_length": max_length}
    columns["input_ids"] = tokenizer(cleaned(columns["source"]), **cut)["input_ids"]
    columns["labels"] = target_ids(tokenizer, cleaned(targets), **cut)
    return _datasets().Dataset.from_dict(columns)


def fingerprint_of(texts: Iterable[str]) -> str:
    """One short name for many texts; another text, or another order, gives another name."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", errors="surrogatepass"))
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def within_budget(order: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut examples, given from the longest to the shortest, into batches of at most `max_tokens` with their padding.

    >>> within_budget([2, 0, 1], [3, 1, 4], max_tokens=8)
    [[2, 0], [1]]
    """
    batches: list[list[int]] = []
    longest = 0
    for example in order:
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:  # the first of a batch is its longest
            batches.append([])
            longest = lengths[example]
        batches[-1].append(example)
    return batches


def fate_of(
    source: str, target: str, input_ids: list[int], labels: list[int], max_length: int, canvas: int | None
) -> str:
    """Whether a pair is kept, and if not, why."""
    if not source or not target:
        return EMPTY
    if max(len(input_ids), len(labels)) > max_length:
        return TOO_LONG
    repeated = sum(first == second for first, second in itertools.pairwise(labels))
    if canvas is not None and len(labels) + repeated > canvas * len(input_ids):  # a blank must part equal neighbours
        return NO_CANVAS
    return KEPT


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Training data needs datasets: pip install 'hf_deqnar[train]'.") from error
    return datasets

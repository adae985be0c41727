"""Tokenised data sets of sentence pairs, cached on disk by the `datasets` library."""

import copy
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from ..models.deqnar.text import clean_text
from ..utils.files import digest_of, write_json
from ..utils.fingerprints import fingerprint_of
from ..utils.locks import wait_for_lock
from .parallel_text import Pair

if TYPE_CHECKING:  # part of the train extra
    from datasets import Dataset

logger = logging.get_logger(__name__)

# Why a pair is not used.
VALID, EMPTY, TOO_LONG, NO_CANVAS = "", "empty", "too long", "longer than its canvas"


@dataclass(frozen=True)
class CanvasLimit:
    """How long a target may be.

    Attributes:
        factor: canvas positions per source token.
        needed: labels → number of canvas positions that they need.
        name: of the rule, part of the fingerprint of a data set.
    """

    factor: int
    needed: Callable[[Sequence[int]], int]
    name: str

    def fits(self, labels: Sequence[int], input_ids: Sequence[int]) -> bool:
        """Whether a target fits on the canvas of its source."""
        return self.needed(labels) <= self.factor * len(input_ids)

    @classmethod
    def of(cls, canvas: "int | CanvasLimit | None") -> "CanvasLimit | None":
        """A number is that of a CTC model."""
        return cls(canvas, ctc_positions, str(canvas)) if isinstance(canvas, int) else canvas

    def __str__(self) -> str:
        return self.name


@dataclass
class TokenizedPairs:
    """A data set with `input_ids`, `labels` and `number`, the index of the pair in the corpus."""

    dataset: "Dataset"
    dropped: dict[str, int]  # number of dropped pairs by reason
    fingerprint: str

    def describe(self) -> str:
        """Numbers of used and dropped pairs, as a sentence for the user."""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.dropped.items()) or "none"
        total = len(self.dataset) + sum(self.dropped.values())
        return f"{len(self.dataset):,} of {total:,} pairs are used (dropped: {reasons})"


def tokenize_pairs(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    canvas: int | CanvasLimit | None = None,
    cache: str | Path | None = None,
) -> TokenizedPairs:
    """Tokenise training pairs; the first reference is the target.

    Dropped and counted by reason: pairs with an empty side, with more than `max_length` tokens on a side, and, for CTC
    models and graphs, with a target that does not fit on its canvas.

    Args:
        pairs: the corpus.
        tokenizer: a fast tokenizer.
        max_length: most tokens of a source or target.
        canvas: canvas positions per source token of a CTC model, or the limit of another one; None without a limit.
        cache: folder of the cached result, which a call with the same texts, tokenizer and settings reuses.
    """
    texts = {
        "source": clean_texts(pair.source for pair in pairs),
        "target": clean_texts(pair.references[0] for pair in pairs),
    }

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        input_ids, labels = tokenizer(batch["source"])["input_ids"], target_ids(tokenizer, batch["target"])
        rows = zip(batch["source"], batch["target"], input_ids, labels, strict=True)
        reasons = [drop_reason(*row, max_length, canvas) for row in rows]
        return {"input_ids": input_ids, "labels": labels, "drop_reason": reasons}

    settings = [str(max_length), str(canvas), tokenization_rules(tokenizer)]
    fingerprint = fingerprint_of([*settings, *texts["source"], *texts["target"]])
    tokenized = map_cached(texts, tokenize, fingerprint, cache)
    return select_valid(tokenized, max_length, fingerprint)


def clean_texts(texts: Iterable[str]) -> list[str]:
    """Apply `clean_text` to all texts; an error names the number of the sentence."""
    cleaned = []
    for number, text in enumerate(texts, start=1):
        try:
            cleaned.append(clean_text(text))
        except ValueError as error:
            raise ValueError(f"Sentence {number} of the corpus: {error}") from error
    return cleaned


def tokenization_rules(tokenizer: PreTrainedTokenizerBase) -> str:
    """Everything that determines the token ids of a text, for fingerprints; an error for slow tokenizers.

    Slow tokenizers cannot be serialised, and some of them tokenise targets differently.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(
            f"Training needs a fast tokenizer, and {type(tokenizer).__name__} is a slow one; without --tokenizer a new "
            "one is trained."
        )
    rules = copy.deepcopy(tokenizer.backend_tokenizer)
    rules.no_truncation()  # state of the last call, without effect on the next
    rules.no_padding()
    return rules.to_str() + " without the first of a target" * num_start_tokens(tokenizer)


def num_start_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens that the tokenizer puts before every text, such as Bart's `<s>`; no model here predicts them."""
    start = tokenizer.bos_token_id
    return int(start not in (None, tokenizer.eos_token_id) and tokenizer("")["input_ids"][:1] == [start])


def target_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str], **options: Any) -> list[list[int]]:
    """Token ids of targets without start tokens, as models predict them.

    Args:
        tokenizer: of the model.
        texts: the targets.
        options: of the tokenizer call.
    """
    start = num_start_tokens(tokenizer)
    return [ids[start:] for ids in tokenizer(texts, **options)["input_ids"]]


def map_cached(
    texts: dict[str, list],
    function: Callable[[dict[str, list]], dict[str, list]],
    fingerprint: str,
    cache: str | Path | None,
    *,
    description: str = "tokenizing",
    processes: int | None = None,
) -> "Dataset":
    """Apply a function to columns of texts, or load the result from the cache if its files are intact.

    Args:
        texts: columns by name; the result has the columns that the function returns, and `number`.
        function: takes a batch of the columns and returns the new ones.
        fingerprint: names the cached file.
        cache: folder; that of the `datasets` library by default.
        description: of the progress bar.
        processes: number of processes that apply the function.
    """
    datasets = _datasets()
    folder = Path(datasets.config.HF_DATASETS_CACHE if cache is None else cache) / "hf_deqnar" / "tokenized"
    folder.mkdir(parents=True, exist_ok=True)
    numbered = {**texts, "number": list(range(len(next(iter(texts.values())))))}
    with wait_for_lock(folder / f"{fingerprint}.lock"):
        known = intact_files(folder, fingerprint)
        tokenized = datasets.Dataset.from_dict(numbered).map(
            function,
            batched=True,
            remove_columns=list(texts),
            cache_file_name=str(folder / f"{fingerprint}.arrow"),
            new_fingerprint=fingerprint,
            num_proc=processes,
            desc=description,
        )
        files = sorted(folder.glob(f"{fingerprint}*.arrow"))
        if [path.name for path in files] != list(known):
            write_json(folder / f"{fingerprint}.json", {path.name: digest_of(path) for path in files})
    return tokenized


def intact_files(folder: Path, fingerprint: str) -> dict[str, str]:
    """Names and digests of the cached files of a fingerprint.

    If any of them is not what was written, or if that is not known, all are removed.
    """
    checksums, files = folder / f"{fingerprint}.json", sorted(folder.glob(f"{fingerprint}*.arrow"))
    try:
        expected = json.loads(checksums.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        expected = None
    found = {path.name: digest_of(path) for path in files}
    if found == expected:
        return found
    if expected is not None:
        logger.warning(f"{folder / fingerprint}.arrow is damaged; the texts are tokenized again.")
    for path in (checksums, *files):  # processes that use them have them mapped into memory
        path.unlink(missing_ok=True)
    return {}


def select_valid(tokenized: "Dataset", max_length: int, fingerprint: str) -> TokenizedPairs:
    """Select valid pairs and count the dropped ones by reason; an error if no pair is valid.

    Args:
        tokenized: all pairs, with a column `drop_reason`.
        max_length: named in the error.
        fingerprint: of the data set.
    """
    reasons = tokenized["drop_reason"][:]
    dropped = {reason: count for reason, count in Counter(reasons).items() if reason != VALID}
    valid = [index for index, reason in enumerate(reasons) if reason == VALID]
    if not valid:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())
        raise ValueError(f"None of {len(reasons):,} pairs can be used ({counts}; max_length is {max_length}).")
    return TokenizedPairs(tokenized.remove_columns("drop_reason").select(valid), dropped, fingerprint)


def tokenize_for_validation(pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> "Dataset":
    """Tokenise validation pairs, with columns `source` and `references` to score translations against.

    Args:
        pairs: all of them are retained.
        tokenizer: of the model.
        max_length: longer sources and targets are truncated to this many tokens.
    """
    columns: dict[str, list[Any]] = {"source": [pair.source for pair in pairs]}
    columns["references"] = [pair.references for pair in pairs]
    targets = [pair.references[0] for pair in pairs]
    options = {"truncation": True, "max_length": max_length}
    columns["input_ids"] = tokenizer(clean_texts(columns["source"]), **options)["input_ids"]
    columns["labels"] = target_ids(tokenizer, clean_texts(targets), **options)
    return _datasets().Dataset.from_dict(columns)


def within_budget(order: Iterable[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split examples into batches of at most `max_tokens` tokens, padding included.

    Args:
        order: indices of the examples, from the longest to the shortest.
        lengths: number of tokens of every example.
        max_tokens: an example that is longer forms a batch of its own.

    >>> within_budget([2, 0, 1], [3, 1, 4], max_tokens=8)
    [[2, 0], [1]]
    """
    batches: list[list[int]] = []
    longest = 0
    for example in order:
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:  # the first example of a batch is the longest
            batches.append([])
            longest = lengths[example]
        batches[-1].append(example)
    return batches


def drop_reason(
    source: str,
    target: str,
    input_ids: list[int],
    labels: list[int],
    max_length: int,
    canvas: int | CanvasLimit | None,
) -> str:
    """Why a pair cannot be used for training; `VALID` (an empty string) if it can.

    Args:
        source, target: the cleaned texts.
        input_ids, labels: their tokens.
        max_length, canvas: as for `tokenize_pairs`.
    """
    if not source or not target:
        return EMPTY
    if max(len(input_ids), len(labels)) > max_length:
        return TOO_LONG
    limit = CanvasLimit.of(canvas)
    if limit is not None and not limit.fits(labels, input_ids):
        return NO_CANVAS
    return VALID


def ctc_positions(labels: Sequence[int]) -> int:
    """Number of canvas positions that CTC needs for a target: one per token, and a blank between equal tokens.

    >>> ctc_positions([7, 7, 8])
    4
    """
    return len(labels) + sum(first == second for first, second in itertools.pairwise(labels))


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ImportError("Training data needs datasets: pip install 'hf_deqnar[train]'.") from error
    return datasets

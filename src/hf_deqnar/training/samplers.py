"""Batches with a budget of tokens, of sentences of similar length."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..data.subword_regularization import Merges, split_tokens
from ..data.tokenized_dataset import CanvasLimit, within_budget


class TokenBudgetSampler:
    """Yields lists of example numbers whose padded size stays within a budget of tokens.

    An epoch depends on the seed and the epoch's number alone: examples are shuffled, sorted by length (so that the
    shuffle decides among equals), cut into batches, and the batches are shuffled. A process of several takes every n-th
    example of each batch, so that together they see exactly what one process would, in the same steps.

    Args:
        lengths: tokens of every example; for a pair, the longer side.
        max_tokens: most rows × longest of a batch, over all processes.
        processes, process: how many share a batch, and which of them this is.
        shuffle: off for evaluation: batches from the longest to the shortest.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        seed: int = 0,
        processes: int = 1,
        process: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not 0 <= process < processes:
            raise ValueError(f"process {process} is not one of {processes}; they are numbered from 0.")
        if len(lengths) < processes:
            raise ValueError(f"{len(lengths)} examples cannot be shared by {processes} processes.")
        longest = max(lengths)
        if longest * processes > max_tokens:
            raise ValueError(
                f"An example of {longest} tokens does not fit into max_tokens={max_tokens}"
                + (f" shared by {processes} processes" if processes > 1 else "")
                + "; raise the budget or drop long examples."
            )
        self.lengths, self.max_tokens, self.seed = torch.as_tensor(lengths), max_tokens, seed
        self.processes, self.process, self.shuffle = processes, process, shuffle
        self.epoch = 0
        self._batches: tuple[int, list[list[int]]] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle; called at the start of each epoch."""
        self.epoch = epoch

    def batches(self) -> list[list[int]]:
        """The epoch's batches as one process would see them."""
        if self._batches is None or self._batches[0] != self.epoch:
            self._batches = (self.epoch, self._make_batches())
        return self._batches[1]

    def _make_batches(self) -> list[list[int]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        count = len(self.lengths)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        order = order[self.lengths[order].argsort(descending=True, stable=True)]
        batches = self._share(within_budget(order.tolist(), self.lengths.tolist(), self.max_tokens))
        if self.shuffle:
            batches = [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]
        return batches

    def _share(self, batches: list[list[int]]) -> list[list[int]]:
        """Every process needs at least one example of every batch; a last batch that is too small is filled up.

        Examples come from the batch before it. If too few would remain there, the two become one batch, which may then
        be slightly over the budget.
        """
        if len(batches[-1]) >= self.processes:
            return batches
        *others, before, last = batches
        both = before + last
        if len(both) < 2 * self.processes:
            return [*others, both]
        return [*others, both[: -self.processes], both[-self.processes :]]

    def __len__(self) -> int:
        return len(self.batches())

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches():
            yield batch[self.process :: self.processes]


class TokenBudgetLoader(DataLoader):
    """A `DataLoader` over a `TokenBudgetSampler` that passes the number of the epoch on."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)


@dataclass
class SubwordDropout:
    """A collator that splits tokens at random before it pads a batch; see `data.subword_regularization`.

    Args:
        collate: pads the rows.
        sampler: knows the epoch; a loader that resumes an epoch tells it to the sampler only.
        merges: of the tokenizer, from `merges_of`.
        source, target: probability with which a token is split, on each side.
        seed: of the random choices, together with the epoch and the number of the pair.
        max_length: most tokens of a side; a side that would become longer is not split.
        canvas: as for `tokenize_pairs`; a target that would not fit is not split.
    """

    collate: Callable[[list[dict[str, Any]]], dict[str, Tensor]]
    sampler: TokenBudgetSampler
    merges: Merges
    source: float
    target: float
    seed: int
    max_length: int
    canvas: int | CanvasLimit | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return self.collate([self.split(row) for row in rows])

    def split(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row with other tokens of the same texts."""
        generator = random.Random(f"{self.seed} {self.sampler.epoch} {row['number']}")
        found = {
            "input_ids": split_tokens(row["input_ids"], self.merges, self.source, generator),
            "labels": split_tokens(row["labels"], self.merges, self.target, generator),
        }
        for name, tokens in found.items():
            if len(tokens) > self.max_length:
                found[name] = row[name]
        limit = CanvasLimit.of(self.canvas)
        if limit is not None and not limit.fits(found["labels"], found["input_ids"]):
            found = {"input_ids": row["input_ids"], "labels": row["labels"]}
        return {**row, **found}


def collate(rows: list[dict[str, Any]], padding: int) -> dict[str, Tensor]:
    """Pad a batch: sources with the padding token, labels with −100; candidates of Dynamic KD if there are any."""
    sources = [row["input_ids"] for row in rows]
    batch = {"input_ids": pad(sources, padding), "labels": pad([row["labels"] for row in rows], -100)}
    batch["attention_mask"] = pad([[1] * len(source) for source in sources], 0)
    if "number" in rows[0]:
        batch["number"] = torch.tensor([row["number"] for row in rows])
    if "candidates" in rows[0]:
        count = len(rows[0]["candidates"])
        texts = pad([text for row in rows for text in row["candidates"]], -100)
        batch["candidates"] = texts.reshape(len(rows), count, -1)
        batch["similarity"] = torch.tensor([row["similarity"] for row in rows])
    return batch


def pad(rows: list[list[int]], value: int) -> Tensor:
    """Rows × longest."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])

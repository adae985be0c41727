import functools

import pytest
import torch

from hf_deqnar.training.samplers import SubwordDropout, TokenBudgetLoader, TokenBudgetSampler, collate


def lengths(count: int = 500) -> list[int]:
    return torch.randint(1, 60, (count,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_example_occurs_once_and_batches_are_within_the_budget(shuffle):
    sizes = lengths()
    sampler = TokenBudgetSampler(sizes, max_tokens=300, shuffle=shuffle)
    batches = list(sampler)
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    assert len(batches) == len(sampler)
    for batch in batches:
        assert len(batch) * max(sizes[index] for index in batch) <= 300


def test_batches_have_little_padding():
    sizes = lengths()
    batches = list(TokenBudgetSampler(sizes, max_tokens=300))
    padded = sum(len(batch) * max(sizes[index] for index in batch) for batch in batches)
    assert sum(sizes) / padded > 0.95


def test_epochs_differ_and_are_reproducible():
    sampler, again = (TokenBudgetSampler(lengths(), max_tokens=300, seed=4) for _ in range(2))
    first = list(sampler)
    assert list(again) == first
    sampler.set_epoch(1)
    second = list(sampler)
    assert second != first
    again.set_epoch(1)
    assert list(again) == second
    sampler.set_epoch(0)
    assert list(sampler) == first
    assert list(TokenBudgetSampler(lengths(), max_tokens=300, seed=5)) != first


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("count", [500, 7, 3])
def test_processes_together_have_the_batches_of_one_process(processes, count):
    sizes = lengths(count)
    single = TokenBudgetSampler(sizes, max_tokens=200, processes=processes)
    shares = [list(TokenBudgetSampler(sizes, max_tokens=200, processes=processes, process=p)) for p in range(processes)]
    assert len({len(share) for share in shares}) == 1
    for full, *parts in zip(single.batches(), *shares, strict=True):
        assert all(parts)
        assert sorted(index for part in parts for index in part) == sorted(full)
    if count == 500:
        assert single.batches() == TokenBudgetSampler(sizes, max_tokens=200).batches()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [5, 50], "max_tokens": 40}, "An example of 50 tokens does not fit into max_tokens=40; raise"),
        ({"lengths": [30, 5], "max_tokens": 40, "processes": 2}, "does not fit into max_tokens=40 shared by 2"),
        ({"lengths": [5], "max_tokens": 40, "processes": 2}, "1 examples cannot be shared by 2 processes"),
        ({"lengths": [5, 5], "max_tokens": 40, "processes": 2, "process": 2}, "process 2 is not one of 2"),
    ],
)
def test_impossible_budgets_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TokenBudgetSampler(**arguments)


@pytest.mark.parametrize("seed", range(20))
def test_no_process_gets_an_empty_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    processes = int(torch.randint(1, 5, (), generator=generator))
    count = int(torch.randint(processes, 30, (), generator=generator))
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    budget = max(lengths) * processes + int(torch.randint(0, 20, (), generator=generator))
    for shuffle in (True, False):
        shares = [
            list(TokenBudgetSampler(lengths, budget, seed=seed, processes=processes, process=process, shuffle=shuffle))
            for process in range(processes)
        ]
        assert len({len(share) for share in shares}) == 1
        assert all(batch for share in shares for batch in share)
        assert sorted(example for share in shares for batch in share for example in batch) == list(range(count))


def dropout(sampler=None, **options):
    sampler = sampler or TokenBudgetSampler([3] * 20, 60)
    merges = {9: (7, 8), 7: (3, 4)}
    settings = {"source": 0.5, "target": 0.5, "seed": 1, "max_length": 40} | options
    return SubwordDropout(functools.partial(collate, padding=0), sampler, merges, **settings)


def rows(count: int = 20, number: int = 0) -> list[dict]:
    return [{"input_ids": [9, 5, 7], "labels": [9, 9, 6], "number": number + index} for index in range(count)]


def test_subword_dropout_depends_on_the_epoch_and_the_pair_not_on_the_batch():
    sampler = TokenBudgetSampler([3] * 20, 60)
    collator = dropout(sampler)
    batched = [collator.split(row) for row in rows()]
    assert len({tuple(row["input_ids"]) for row in batched}) > 1
    assert [collator.split(row) for row in reversed(rows())] == batched[::-1]
    assert collator.split(rows()[7]) == batched[7]
    loader = TokenBudgetLoader(rows(), batch_sampler=sampler, collate_fn=collator)
    loader.set_epoch(1)
    assert [collator.split(row) for row in rows()] != batched
    loader.set_epoch(0)
    assert [collator.split(row) for row in rows()] == batched
    (batch,) = loader
    assert batch["input_ids"].shape[1] == max(len(row["input_ids"]) for row in batched)


def test_subword_dropout_never_exceeds_the_canvas_or_the_longest_text():
    for row in map(dropout(source=0.0, target=1.0, canvas=2).split, rows()):
        assert row["labels"] == [9, 9, 6], "seven tokens on a canvas of six"
    for row in map(dropout(source=0.0, target=1.0, canvas=3).split, rows()):
        assert row["labels"] == [3, 4, 8, 3, 4, 8, 6]
    for row in map(dropout(source=1.0, target=1.0, max_length=5).split, rows()):
        assert row["labels"] == [9, 9, 6]
        assert row["input_ids"] == [9, 5, 7], "six tokens"

"""The batcher, with a translation function that records its batches."""

import asyncio

import pytest

from hf_deqnar.documents.translation import Request
from hf_deqnar.server.batching import Batcher, Overloaded


def run(scenario, batch_size=4, max_waiting=100, fail_on=()):
    """Run a scenario with a batcher; returns its batches."""
    batches = []

    def translate(requests):
        batches.append([request.text for request in requests])
        if set(fail_on) & set(batches[-1]):
            raise ValueError("cannot be translated")
        return [request.text.upper() for request in requests]

    async def main():
        batcher = Batcher(translate, batch_size, max_waiting, delay=0.01)
        batcher.start()
        await scenario(batcher)
        await batcher.stop()

    asyncio.run(main())
    return batches


def requests(*texts):
    return [Request(text) for text in texts]


def test_texts_that_arrive_together_share_a_batch():
    async def scenario(batcher):
        answers = await asyncio.gather(*(batcher.submit(requests(letter)) for letter in "abcd"))
        assert answers == [["A"], ["B"], ["C"], ["D"]]

    assert run(scenario) == [["a", "b", "c", "d"]]


def test_a_long_document_does_not_delay_other_clients():
    async def scenario(batcher):
        long = asyncio.create_task(batcher.submit(requests(*(f"long {number}" for number in range(20)))))
        await asyncio.sleep(0)
        assert await batcher.submit(requests("short")) == ["SHORT"]
        assert not long.done()
        assert len(await long) == 20

    batches = run(scenario)
    assert "short" in batches[0]
    assert sum(map(len, batches)) == 21


def test_a_text_that_fails_does_not_affect_its_batch():
    async def scenario(batcher):
        answers = await asyncio.gather(*(batcher.submit(requests(letter)) for letter in "abc"), return_exceptions=True)
        assert [answers[0], answers[2]] == [["A"], ["C"]]
        assert isinstance(answers[1], ValueError)

    run(scenario, fail_on={"b"})


def test_texts_of_a_cancelled_client_are_not_translated():
    async def scenario(batcher):
        task = asyncio.create_task(batcher.submit(requests(*"abcdefghijkl")))
        await asyncio.sleep(0)
        task.cancel()
        assert await batcher.submit(requests("z")) == ["Z"]

    assert run(scenario) == [["z"]]


def test_more_waiting_texts_than_allowed_are_refused():
    async def scenario(batcher):
        with pytest.raises(Overloaded):
            await batcher.submit(requests(*"abc"))
        assert await batcher.submit(requests(*"ab")) == ["A", "B"]

    run(scenario, max_waiting=2)

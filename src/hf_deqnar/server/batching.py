"""Dynamic batching: texts of requests that arrive together are translated together."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..documents.translation import Request

Result = TypeVar("Result")
Texts = list[str]  # a translation and its alternatives


class Overloaded(Exception):
    """More texts are waiting than the server accepts."""


@dataclass
class Group:
    """The texts of one request of a client that are not translated yet."""

    waiting: deque[tuple[Request, asyncio.Future]] = field(default_factory=deque)


class Batcher:
    """Collects texts into batches for one thread, which runs the model.

    A batch takes one text of each client in turn, so that a long document does not delay the requests of others. While
    the thread translates, further texts collect; when it is idle, a batch waits for `delay` seconds. Batches do not
    change translations (docs/translate.md, Batches).

    Args:
        translate: called with a batch in the thread.
        batch_size: most texts of a batch.
        max_waiting: texts that may wait; more raise `Overloaded`.
        observe: called with the number of texts of every batch.
    """

    def __init__(
        self,
        translate: Callable[[list[Request]], list[Texts]],
        batch_size: int,
        max_waiting: int,
        delay: float,
        observe: Callable[[int], Any] = lambda size: None,
    ) -> None:
        self.translate, self.batch_size, self.max_waiting = translate, batch_size, max_waiting
        self.delay, self.observe = delay, observe
        self.groups: deque[Group] = deque()
        self.waiting = 0
        self.arrived = asyncio.Event()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="translation")
        self.task: asyncio.Task | None = None

    def start(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.run())

    async def stop(self) -> None:
        """Stop when no request is left; the server calls it after the last response."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.thread.shutdown()

    async def submit(self, requests: list[Request]) -> list[Texts]:
        """Translate the texts of one client. If the caller is cancelled, texts that still wait are dropped."""
        if self.waiting + len(requests) > self.max_waiting:
            raise Overloaded
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in requests]
        self.groups.append(Group(deque(zip(requests, futures, strict=True))))
        self.waiting += len(requests)
        self.arrived.set()
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:  # after an error or a cancellation, the others are not needed
                future.cancel()

    async def in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run something else with the model, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, function, *arguments)

    async def run(self) -> None:
        """Translate batches until cancelled."""
        while True:
            await self.arrived.wait()
            if self.waiting < self.batch_size:
                await asyncio.sleep(self.delay)
            batch = self.next_batch()
            if not batch:
                self.arrived.clear()
                continue
            self.observe(len(batch))
            results = await self.in_thread(self.translate_batch, [request for request, _ in batch])
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # the client has left
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def next_batch(self) -> list[tuple[Request, asyncio.Future]]:
        """Up to `batch_size` texts, one of each group in turn, without those whose client has left."""
        batch: list[tuple[Request, asyncio.Future]] = []
        while self.groups and len(batch) < self.batch_size:
            group = self.groups.popleft()
            item = group.waiting.popleft()
            self.waiting -= 1
            if not item[1].done():
                batch.append(item)
            if group.waiting:
                self.groups.append(group)
        return batch

    def translate_batch(self, requests: list[Request]) -> list[Texts | Exception]:
        """Translations, or the error of each text: one that fails does not affect the others of its batch."""
        try:
            return list(self.translate(requests))
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [result for request in requests for result in self.translate_batch([request])]

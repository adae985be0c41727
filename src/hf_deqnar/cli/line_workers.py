"""Translating chunks of lines in several processes, in order, with every chunk done once even if a process is killed.

Not `concurrent.futures`: its pool breaks when a process is killed, and all chunks under way are lost with it.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

# Processes that may end on the same chunk, or before they are ready, until the chunk is given up.
ATTEMPTS = 3
# Chunks per process that are read ahead of the next one to be returned; limits the memory.
AHEAD = 4


def available_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Worker:
    """A process, the connection to it, and the number of the chunk that it works on (None if it is idle)."""

    process: BaseProcess
    connection: Connection
    is_ready: bool = False
    number: int | None = None


@dataclass
class Chunks:
    """Chunks that are not done yet, by number, and how often a process ended on each."""

    source: Iterator[Any]
    waiting: deque[int] = field(default_factory=deque)
    contents: dict[int, Any] = field(default_factory=dict)
    ended: dict[int | None, int] = field(default_factory=dict)
    read: int = 0

    def next(self, limit: int) -> int | None:
        """The number of the next chunk to work on, below the limit; None if there is none now."""
        if self.waiting:
            return self.waiting.popleft()
        if self.read >= limit:
            return None
        for content in self.source:
            self.contents[self.read] = content
            self.read += 1
            return self.read - 1
        return None


def map_in_processes(make: Callable[..., Callable], arguments: Any, chunks: Iterable[Any], count: int) -> Iterator[Any]:
    """`make(arguments)(chunk)` of every chunk, in order, computed by `count` processes that call `make` once.

    A chunk whose process ends is given to another one. Exceptions of `make` and of its result are raised here.

    Args:
        make, arguments, chunks: importable or picklable, because they are sent to the processes.
    """
    pending, done, returned = Chunks(iter(chunks)), {}, 0
    workers: list[Worker] = []
    try:
        workers = [start_worker(make, arguments) for _ in range(count)]
        while True:
            for worker in workers:
                if worker.is_ready and worker.number is None:
                    worker.number = pending.next(returned + AHEAD * count)
                    if worker.number is not None:
                        send(worker, pending.contents[worker.number])
            while returned in done:
                yield done.pop(returned)
                returned += 1
            if not pending.contents and any(worker.is_ready for worker in workers):
                return
            for place, worker in ready(workers):
                try:
                    result = worker.connection.recv()
                except (EOFError, ConnectionError):
                    workers[place] = replace_worker(worker, pending, make, arguments)
                    continue
                if isinstance(result, BaseException):
                    raise result
                if worker.number is not None:
                    done[worker.number] = result
                    del pending.contents[worker.number]
                worker.is_ready, worker.number = True, None
    finally:
        for worker in workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def start_worker(make: Callable[..., Callable], arguments: Any) -> Worker:
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    process = context.Process(target=work, args=(other, make, arguments), daemon=True)
    process.start()
    other.close()
    return Worker(process, own)


def ready(workers: list[Worker]) -> list[tuple[int, Worker]]:
    """Workers, with their places, that have sent something or have ended; waits for the first of them."""
    found = set(map(id, wait([worker.connection for worker in workers])))
    return [(place, worker) for place, worker in enumerate(workers) if id(worker.connection) in found]


def send(worker: Worker, chunk: Any) -> None:
    """Send a chunk; that the process has ended is noticed when its answer is read."""
    with contextlib.suppress(ConnectionError):
        worker.connection.send(chunk)


def replace_worker(ended: Worker, pending: Chunks, make: Callable[..., Callable], arguments: Any) -> Worker:
    """A new worker in place of one that has ended, whose chunk is done next. Gives up after ATTEMPTS on one chunk."""
    ended.connection.close()
    ended.process.join()
    code = ended.process.exitcode or 0
    reason = f"was killed ({signal.Signals(-code).name})" if code < 0 else f"ended with status {code}"
    attempts = pending.ended[ended.number] = pending.ended.get(ended.number, 0) + 1
    if attempts == ATTEMPTS:
        where = "before it was ready" if ended.number is None else "on the same lines"
        raise OSError(f"A process {reason} {where} {ATTEMPTS} times; use fewer --processes if memory is short.")
    if ended.number is not None:
        pending.waiting.appendleft(ended.number)
    print(f"hf-deqnar: a process {reason}; another one does its lines.", file=sys.stderr)
    return start_worker(make, arguments)


def work(connection: Connection, make: Callable[..., Callable], arguments: Any) -> None:
    """The loop of a process: prepare, then answer every chunk, until the other side closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the other side ends this process
    try:
        function = make(arguments)
        connection.send(None)
        while True:
            connection.send(function(connection.recv()))
    except (EOFError, ConnectionError):
        return
    except Exception as error:
        connection.send(error)

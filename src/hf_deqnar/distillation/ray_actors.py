"""Translation of shards by Ray actors, on one machine or a cluster.

Actors receive sentences and return translations; only the driver reads the corpus and writes shards. The shard of an
actor that ends, for example with its machine, is given to a new actor.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from .distill import Row
from .sharded import Task, TranslateTasks
from .teachers import Teacher, TeacherOptions, Translate, fingerprint_of_teacher, make_translate, translate_texts

ATTEMPTS = 3  # actors that may end on the same shard until it is given up
LOCAL = "local"


class TranslationActor:
    """Loads a teacher when the first shard arrives, and translates."""

    def __init__(self, load: Callable[[], Teacher], options: TeacherOptions, fingerprint: str) -> None:
        self.load, self.options, self.fingerprint = load, options, fingerprint
        self.loaded: tuple[Teacher, Translate] | None = None
        self.folder = TemporaryDirectory()

    def translate(self, sentences: list[str], references: list[list[str]]) -> tuple[list[Row], float]:
        """Rows of a shard, and the seconds that it took."""
        if self.loaded is None:
            teacher = self.load()
            if fingerprint_of_teacher(teacher) != self.fingerprint:
                raise ValueError(
                    f"{teacher.name} on a machine of the cluster is another model than that of the driver."
                )
            self.loaded = teacher, make_translate(teacher, self.options, Path(self.folder.name))
        teacher, translate = self.loaded
        start = time.perf_counter()
        rows = translate_texts(teacher, translate, sentences, self.options, references)
        return rows, time.perf_counter() - start


def with_ray(
    load: Callable[[], Teacher],
    options: TeacherOptions,
    fingerprint: str,
    *,
    address: str = LOCAL,
    actors: int,
    gpus: float = 0,
) -> TranslateTasks:
    """Translation by actors of a Ray cluster.

    Args:
        load: returns the teacher; called in every actor.
        options: of the translation.
        fingerprint: of the teacher, which the actors check.
        address: of the cluster, or `local` for a new one on this machine.
        actors: number of actors; each has one processor core.
        gpus: of every actor.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("--ray needs the package ray: pip install 'hf_deqnar[ray]'.") from error

    def translate_tasks(tasks: Iterable[Task]) -> Iterator[tuple[int, list[Row], float]]:
        started = not ray.is_initialized()
        if started:
            local = {"num_cpus": actors, "include_dashboard": False} if address == LOCAL else {"address": address}
            ray.init(**local, log_to_driver=False, logging_level="warning")
        try:
            make = ray.remote(TranslationActor).options(num_cpus=1, num_gpus=gpus)
            yield from translate_by_actors(ray, lambda: make.remote(load, options, fingerprint), tasks, actors)
        finally:
            if started:
                ray.shutdown()

    return translate_tasks


def translate_by_actors(
    ray: Any, make: Callable[[], Any], tasks: Iterable[Task], actors: int
) -> Iterator[tuple[int, list[Row], float]]:
    """Give every task to an actor, and that of an actor that has ended to a new one.

    Args:
        ray: the module.
        make: starts an actor.
        tasks: shards to translate.
        actors: number of actors.
    """
    waiting, ended = deque(tasks), Counter[int]()
    idle = [make() for _ in range(min(actors, len(waiting)))]
    running: dict[Any, tuple[Any, Task]] = {}
    while waiting or running:
        while waiting and idle:
            actor, task = idle.pop(), waiting.popleft()
            running[actor.translate.remote(task.sentences, task.references)] = actor, task
        (done,), _ = ray.wait(list(running), num_returns=1)
        actor, task = running.pop(done)
        try:
            rows, seconds = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            ended[task.number] += 1
            if ended[task.number] == ATTEMPTS:
                raise OSError(
                    f"{ATTEMPTS} actors ended on shard {task.number}: {str(error).splitlines()[0]}"
                ) from error
            print(f"hf-deqnar: an actor ended; another one does shard {task.number}.", file=sys.stderr)
            waiting.appendleft(task)
            idle.append(make())
        else:
            idle.append(actor)
            yield task.number, rows, seconds

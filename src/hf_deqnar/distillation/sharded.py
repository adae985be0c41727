"""Distillation whose shards are divided among processes beforehand, with output at any address.

    s3://bucket/distilled.jsonl.gz.shards/     manifest.json and finished shards, 00000.jsonl and so on
    s3://bucket/distilled.jsonl.gz             the result, when all shards are finished
    s3://bucket/distilled/part-00000-of-00007.jsonl.gz     the result of an output that ends in a slash
    s3://bucket/distilled.jsonl.gz.statistics.json

Process i of n translates shards i, i + n, i + 2n and so on, so that no locks are needed and processes share nothing but
the address. A shard is an object with a checksum, and depends only on its sentences: finished ones are skipped whatever
n was when they were written, and the result has the same bytes as that of `distill`. The process that finishes last
joins the shards; if two do so at once, they write the same.
"""

import gzip
import hashlib
import io
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

from ..data.parallel_text import Pair
from ..data.tokenized_dataset import clean_texts
from ..utils.files import read_json_text
from ..utils.storage import Store
from .distill import Row, manifest_of, result_of, split_into_shards
from .selection import TargetOptions, record_of
from .shards import MANIFEST, fingerprint_of_manifest, parse_shard, refuse_other_settings, shard_lines
from .teachers import Teacher, TeacherOptions, make_translate, translate_texts

logger = logging.get_logger(__name__)

FORMATS = ("jsonl.gz", "jsonl", "parquet")


@dataclass(frozen=True)
class Task:
    """A shard to translate: its number, its sources, and their references."""

    number: int
    sentences: list[str]
    references: list[list[str]]


# Tasks → numbers, rows and seconds of their shards, in any order.
TranslateTasks = Callable[[Iterable[Task]], Iterable[tuple[int, list[Row], float]]]


class Unfinished(ValueError):
    """Some shards are missing or damaged."""


@dataclass(frozen=True)
class Output:
    """Where the result is written, and how.

    Attributes:
        address: an object, or with a slash at the end a folder of parts.
        part_format: of the parts of a folder.
        part_sentences: sentences of a part.
    """

    address: str
    part_format: str = "jsonl.gz"
    part_sentences: int = 100_000

    def __post_init__(self) -> None:
        if self.part_format not in FORMATS:
            raise ValueError(f"part_format '{self.part_format}' is unknown; choose {', '.join(FORMATS)}.")
        if self.part_sentences < 1:
            raise ValueError(f"part_sentences must be at least 1, not {self.part_sentences}.")
        if not self.is_folder and self.format is None:
            endings = ", ".join(f".{name}" for name in FORMATS)
            raise ValueError(f"{self.address}: the name should end in {endings}, or in / for a folder of parts.")

    @property
    def is_folder(self) -> bool:
        return self.address.endswith("/")

    @property
    def format(self) -> str | None:
        if self.is_folder:
            return self.part_format
        return next((name for name in FORMATS if self.address.endswith(f".{name}")), None)

    def beside(self, suffix: str) -> Store:
        """What belongs to the output, such as its shards."""
        return Store(f"{self.address.rstrip('/')}.{suffix}")

    def files(self, sentences: int) -> list[tuple[str, int, int]]:
        """Names of the objects of the result, with the first sentence of each and the one after its last."""
        if not self.is_folder:
            return [("", 0, sentences)]
        firsts = range(0, sentences, self.part_sentences)
        return [
            (f"part-{number:05}-of-{len(firsts):05}.{self.format}", first, min(first + self.part_sentences, sentences))
            for number, first in enumerate(firsts)
        ]


def distill_shards(
    pairs: list[Pair],
    teacher: Teacher,
    output: Output,
    *,
    source: str,
    target: str,
    options: TeacherOptions | None = None,
    targets: TargetOptions | None = None,
    process: int = 0,
    processes: int = 1,
    join_only: bool = False,
    translate_tasks: TranslateTasks | None = None,
) -> dict[str, Any]:
    """Translate the shards of one process, and join all of them if no other process has any left.

    Args:
        pairs, teacher, source, target, options, targets: as for `distill`.
        output: of the result.
        process, processes: this process translates shards `process`, `process + processes` and so on.
        join_only: translate nothing.
        translate_tasks: translates instead of this process, such as `ray_actors`.

    Returns:
        The statistics of the result. `Unfinished` is raised if shards of other processes are missing.
    """
    options, targets = options or TeacherOptions(), targets or TargetOptions()
    if not 0 <= process < processes:
        raise ValueError(f"shard {process}/{processes} does not exist; the first of {processes} is 0.")
    clean_texts(pair.source for pair in pairs)  # invalid text is an error now, not hours later
    manifest = manifest_of(pairs, teacher, source, target, options)
    shards, store = split_into_shards([pair.source for pair in pairs], options.shard_sentences), output.beside("shards")
    fingerprint = open_store(store, manifest, output.address)

    def read(number: int) -> tuple[dict[str, Any], list[Row]] | None:
        content = store.read(f"{number:05}.jsonl")
        found = None if content is None else parse_shard(content, fingerprint)
        if content is not None and found is None:
            logger.warning(f"{store.address}/{number:05}.jsonl is damaged.")
        return found

    selection = record_of(targets, pairs)
    known = written_statistics(output, selection, len(pairs))
    if known is not None:
        return known
    mine = [] if join_only else [number for number in range(process, len(shards), processes) if read(number) is None]
    with ExitStack() as stack:
        if translate_tasks is None:
            working = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            translate_tasks = translate_here(teacher, options, working)
        tasks = [Task(n, [pairs[i].source for i in shards[n]], [pairs[i].references for i in shards[n]]) for n in mine]
        sizes = {task.number: len(task.sentences) for task in tasks}
        bar = stack.enter_context(tqdm(total=sum(sizes.values()), desc="distilling", unit=" sentences", disable=None))
        for number, rows, seconds in translate_tasks(tasks) if tasks else ():
            check_store(store, fingerprint)
            lines = shard_lines(fingerprint, rows, seconds=seconds)
            store.write("".join(f"{line}\n" for line in lines).encode(), f"{number:05}.jsonl")
            bar.update(sizes[number])
    finished = [read(number) for number in range(len(shards))]
    missing = [number for number, found in enumerate(finished) if found is None]
    if missing:
        named = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
        raise Unfinished(
            f"{len(missing)} of {len(shards)} shards of {output.address} are not finished ({named}); the last process "
            "joins them. If no process is running, repeat the command, with any number of processes."
        )
    figures, records = result_of(pairs, shards, finished, teacher, options, targets, source=source, target=target)
    write_result(output, records, {**figures, "targets": selection})
    return figures


def translate_here(teacher: Teacher, options: TeacherOptions, folder: Path) -> TranslateTasks:
    """Translation by this process."""

    def translate_tasks(tasks: Iterable[Task]) -> Iterator[tuple[int, list[Row], float]]:
        translate = make_translate(teacher, options, folder)
        for task in tasks:
            start = time.perf_counter()
            rows = translate_texts(teacher, translate, task.sentences, options, task.references)
            yield task.number, rows, time.perf_counter() - start

    return translate_tasks


def open_store(store: Store, manifest: dict[str, Any], output: str) -> str:
    """Write the manifest, or check that it is the same; returns its fingerprint."""
    manifest = json.loads(json.dumps(manifest))
    content = store.read(MANIFEST)
    previous = None if content is None else read_manifest(store, content)
    if previous != manifest:
        if previous is not None and any(name.endswith(".jsonl") for name in store.names()):
            refuse_other_settings(output, store.address, previous, manifest)
        store.write((json.dumps(manifest, indent=2, ensure_ascii=False) + "\n").encode(), MANIFEST)
    fingerprint = fingerprint_of_manifest(manifest)
    check_store(store, fingerprint)
    return fingerprint


def check_store(store: Store, fingerprint: str) -> None:
    """Raise if another run has written its manifest."""
    content = store.read(MANIFEST)
    if content is None or fingerprint_of_manifest(read_manifest(store, content)) != fingerprint:
        raise ValueError(f"Another run with other settings has started in {store.address}; choose another output.")


def read_manifest(store: Store, content: bytes) -> dict[str, Any]:
    remedy = f"choose another output or remove {store.address}"
    return read_json_text(content, f"{store.address}/{MANIFEST}", remedy=remedy)


def write_result(output: Output, records: list[dict[str, str]], figures: dict[str, Any]) -> None:
    """Write the result, remove parts of another division, and write the statistics last."""
    statistics, result = output.beside("statistics.json"), Store(output.address)
    statistics.remove()
    digests = {}
    for name, first, end in output.files(len(records)):
        content = encode(records[first:end], output.format)
        result.write(content, name)
        digests[name] = hashlib.sha256(content).hexdigest()
    if output.is_folder:
        for name in result.names():
            if name.startswith("part-") and name not in digests:
                result.remove(name)
    text = json.dumps({**figures, "files": digests}, indent=2, ensure_ascii=False)
    statistics.write(f"{text}\n".encode())


def written_statistics(output: Output, selection: dict[str, Any], sentences: int) -> dict[str, Any] | None:
    """The statistics of a result with these targets, if it is complete and what was written."""
    content = output.beside("statistics.json").read()
    if content is None:
        return None
    remedy = "remove it and run the same command again"
    figures = read_json_text(content, output.beside("statistics.json").address, "teacher", remedy=remedy)
    digests = figures.pop("files", {})  # `distill` writes none
    if figures.pop("targets", None) != selection or list(digests) != [name for name, *_ in output.files(sentences)]:
        return None
    for name, expected in digests.items():
        content = Store(output.address).read(name)
        if content is None or hashlib.sha256(content).hexdigest() != expected:
            logger.warning(f"{output.address}{name} is missing or damaged; it is written again from the shards.")
            return None
    return figures


def encode(records: list[dict[str, str]], file_format: str | None) -> bytes:
    """The content of a file; equal records give equal bytes."""
    if file_format == "parquet":
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ImportError("Writing Parquet files needs pyarrow: pip install 'hf_deqnar[train]'.") from error
        written = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(records), written, compression="zstd")
        return written.getvalue()
    text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records).encode()
    return text if file_format == "jsonl" else gzip_bytes(text)


def gzip_bytes(content: bytes) -> bytes:
    """As `write_atomically` compresses a file."""
    written = io.BytesIO()
    with gzip.GzipFile("", "wb", 6, written, mtime=0) as file:
        file.write(content)
    return written.getvalue()

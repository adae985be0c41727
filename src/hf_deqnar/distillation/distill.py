"""Sequence-level distillation: a teacher translates the source side of a corpus (Kim and Rush 2016).

    corpus.jsonl                   {"en": "A horse.", "de": "Ein Pferd."}
    distilled.jsonl                {"en": "A horse.", "de": the teacher's translation}, in the order of the corpus
    distilled.jsonl.statistics.json
    distilled.jsonl.shards/        finished shards; may be removed once distilled.jsonl exists

The corpus is sorted by length and split into shards; processes lock and translate shards until all are finished.
Padding changes floating point sums and sometimes the result of a beam search, so batches are formed within a shard and
in a fixed way. The output therefore has the same bytes for any number of processes and after any interruption (with the
same arithmetic and number of threads).

With `nearest`, the beam with the highest sentence BLEU or chrF against the corpus's own target is written instead of
the first one (sequence-level interpolation, in the same paper). `TargetOptions` replaces translations by references.
"""

import gzip
import json
import time
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

from ..data.parallel_text import Pair, read_parallel
from ..data.tokenized_dataset import clean_texts
from ..evaluation.metrics import repetition_rate
from ..utils.files import read_json, write_atomically, write_json
from ..utils.fingerprints import fingerprint_of
from ..utils.locks import POLL_INTERVAL, try_lock
from .selection import TargetOptions, record_of, select_targets
from .shards import check_manifest, check_output, open_folder, read_shard, remove_unfinished, write_shard
from .teachers import Teacher, TeacherOptions, Translate, fingerprint_of_teacher, make_translate, translate_texts

logger = logging.get_logger(__name__)

SUFFIXES = (".jsonl.gz", ".jsonl")

Row = dict[str, Any]  # a translation: text, source_tokens, target_tokens, cut (the source was truncated)


@dataclass
class Job:
    """A corpus, its teacher and its shards."""

    pairs: list[Pair]
    shards: list[list[int]]  # indices of the pairs of every shard
    teacher: Teacher
    options: TeacherOptions
    folder: Path  # of the finished shards
    fingerprint: str  # of the settings

    def path(self, number: int) -> Path:
        """File of a shard."""
        return self.folder / f"{number:05}.jsonl"

    def read(self, number: int) -> tuple[dict[str, Any], list[Row]] | None:
        """Header and rows of a shard; None if it is missing or damaged."""
        return read_shard(self.path(number), self.fingerprint)


def distill(
    pairs: list[Pair],
    teacher: Teacher,
    output: str | Path,
    *,
    source: str,
    target: str,
    options: TeacherOptions | None = None,
    targets: TargetOptions | None = None,
    process: int = 0,
    processes: int = 1,
) -> dict[str, Any]:
    """Write a corpus whose targets are the teacher's translations, and return its statistics.

    Resumes an interrupted call. Several processes may call it for the same output; all return when it is finished.

    Args:
        pairs: the corpus.
        teacher: translates the sources.
        output: a file ending in `.jsonl` or `.jsonl.gz`.
        source, target: names of the columns.
        options: of the translation.
        targets: which targets are references instead. When they change, a finished output is written again.
        process, processes: number of this process and of all; determines only the order of its shards.
    """
    options, output = options or TeacherOptions(), Path(output)
    check_suffix(output)
    if not 0 <= process < processes:
        raise ValueError(f"process {process} is not one of {processes}; they are numbered from 0.")
    clean_texts(pair.source for pair in pairs)  # invalid text is an error now, not hours later
    manifest = manifest_of(pairs, teacher, source, target, options)
    folder, fingerprint = open_folder(output, manifest)
    shards = split_into_shards([pair.source for pair in pairs], options.shard_sentences)
    job = Job(pairs, shards, teacher, options, folder, fingerprint)
    targets = targets or TargetOptions()
    selection = record_of(targets, pairs)
    while not is_finished(output, selection, targets):
        translate_shards(job, process, processes)
        finished = [job.read(number) for number in range(len(job.shards))]
        if None in finished:  # damaged since it was translated
            continue
        figures, records = result_of(
            pairs, job.shards, finished, teacher, options, targets, source=source, target=target
        )
        figures["targets"] = selection
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        figures["output"] = fingerprint_of(lines)
        output.unlink(missing_ok=True)  # never targets of one selection with the statistics of another
        write_json(statistics_path(output), figures, folder)
        write_atomically(output, lines, folder)
    return read_statistics(output)


def manifest_of(
    pairs: list[Pair], teacher: Teacher, source: str, target: str, options: TeacherOptions
) -> dict[str, Any]:
    """Everything that determines the translations."""
    manifest = {
        "corpus": fingerprint_of(pair.source for pair in pairs),
        "sentences": len(pairs),
        "teacher": fingerprint_of_teacher(teacher),
        "columns": [source, target],
        **asdict(options),
    }
    if options.nearest_by == TeacherOptions.nearest_by:
        del manifest["nearest_by"]  # unknown to outputs of earlier versions, which can be resumed
    if options.nearest:
        manifest["references"] = fingerprint_of("\n".join(pair.references) for pair in pairs)
    return manifest


def result_of(
    pairs: list[Pair],
    shards: list[list[int]],
    finished: list[Any],
    teacher: Teacher,
    options: TeacherOptions,
    targets: TargetOptions,
    *,
    source: str,
    target: str,
) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """Statistics and records of the result.

    Args:
        pairs, teacher, options, targets, source, target: as for `distill`.
        shards: indices of the pairs of every shard.
        finished: header and rows of every shard.
    """
    rows = in_corpus_order(shards, [rows for _, rows in finished])
    texts, chosen = select_targets(pairs, [row["text"] for row in rows], targets)
    figures = {**statistics(rows, sum(header["seconds"] for header, _ in finished)), **chosen}
    records = [{source: pair.source, target: text} for pair, text in zip(pairs, texts, strict=True)]
    return {"teacher": teacher.name, "options": asdict(options), **figures}, records


def is_finished(output: Path, selection: dict[str, Any], targets: TargetOptions) -> bool:
    """Whether the output has been written with these targets; an error if it is not what was written.

    Statistics of version 0.1 say neither; the targets are those of the default.
    """
    if not (output.is_file() and statistics_path(output).is_file()):
        return False
    figures = read_statistics(output)
    if "output" in figures and figures["output"] != fingerprint_of_lines(output):
        raise ValueError(
            f"{output} is damaged or was changed after it was written; rename or remove it, and run the same command "
            "again to create it from the finished shards."
        )
    written = figures.get("targets")
    return targets == TargetOptions() if written is None else written == selection


def fingerprint_of_lines(output: Path) -> str | None:
    """Fingerprint of the lines of a file; None if it cannot be read."""
    try:
        with (gzip.open if output.suffix == ".gz" else open)(output, "rt", encoding="utf-8", newline="\n") as file:
            return fingerprint_of(line.removesuffix("\n") for line in file)
    except (EOFError, UnicodeDecodeError, zlib.error, gzip.BadGzipFile):
        return None


def read_statistics(output: Path) -> dict[str, Any]:
    """The statistics of a finished output."""
    remedy = "remove it and run the same command again to create it"
    return read_json(statistics_path(output), "teacher", "sentences", remedy=remedy)


def distill_candidates(
    pairs: list[Pair],
    teachers: Iterable[Teacher],
    output: str | Path,
    *,
    source: str,
    target: str,
    **settings: Any,
) -> dict[str, dict[str, Any]]:
    """Distil several teachers into one file of candidates for Dynamic KD, and return the statistics of each.

    Every teacher also has its own file, `candidates.big.jsonl` for `candidates.jsonl` and the teacher `runs/big`. A
    line of `output` has the corpus's own target and `candidates`: the translations in the order of the teachers, then
    that target. `candidates.jsonl.statistics.json` has the statistics of all.

    Args:
        pairs, output, source, target: as for `distill`.
        teachers: may be a generator that loads one at a time.
        settings: further arguments of `distill`.
    """
    output = Path(output)
    check_suffix(output)
    check_output(output)
    files: dict[Path, dict[str, Any]] = {}
    for teacher in teachers:
        file = teacher_output(output, teacher.name, files)
        files[file] = distill(pairs, teacher, file, source=source, target=target, **settings)
    texts = [[pair.references[0] for pair in read_parallel(file, source, target)] for file in files]
    raw = [pair.references[0] for pair in pairs]
    manifest = {"candidates": fingerprint_of(text for column in (*texts, raw) for text in column)}
    folder, _ = open_folder(output, {**manifest, "columns": [source, target]})
    if not output.is_file():
        lines = (
            {source: pair.source, target: raw, "candidates": [*candidates, raw]}
            for pair, raw, *candidates in zip(pairs, raw, *texts, strict=True)
        )
        write_atomically(output, (json.dumps(line, ensure_ascii=False) for line in lines), folder)
    figures = {entry["teacher"]: entry for entry in files.values()}
    write_json(statistics_path(output), figures, folder)
    return figures


def teacher_output(output: Path, name: str, taken: Iterable[Path]) -> Path:
    """File of one teacher's translations: `candidates.big.jsonl` for `candidates.jsonl` and the teacher `runs/big`.

    Args:
        output: file of all candidates.
        name: of the teacher.
        taken: files of other teachers; a second teacher `big` becomes `big-2`.
    """
    suffix = check_suffix(output)
    stem, name = output.name.removesuffix(suffix), Path(name).resolve().name
    files = (output.with_name(f"{stem}.{name}{number}{suffix}") for number in ("", *(f"-{k}" for k in range(2, 100))))
    return next(file for file in files if file not in taken)


def check_suffix(output: Path) -> str:
    """The suffix of a JSONL file; an error if it has another."""
    for suffix in SUFFIXES:
        if output.name.endswith(suffix):
            return suffix
    raise ValueError(f"{output}: the output is lines of JSON, so its name should end in {' or '.join(SUFFIXES)}.")


def split_into_shards(sentences: list[str], size: int) -> list[list[int]]:
    """Indices of the sentences of every shard, from the longest sentences to the shortest.

    Args:
        sentences: sources of the corpus.
        size: sentences of a shard.
    """
    order = sorted(range(len(sentences)), key=lambda number: (-len(sentences[number]), number))
    return [order[first : first + size] for first in range(0, len(order), size)]


def translate_shards(job: Job, process: int = 0, processes: int = 1) -> None:
    """Translate shards until all are finished, by this process or by another.

    Args:
        job: the corpus and its shards.
        process, processes: as for `distill`.
    """
    order = sorted(range(len(job.shards)), key=lambda number: ((number - process) % processes, number))
    left = [number for number in order if job.read(number) is None]
    translate: Translate | None = None
    with tqdm(
        total=len(job.pairs),
        initial=len(job.pairs) - sum(len(job.shards[number]) for number in left),
        desc=f"distilling {Path(job.teacher.name).name}",
        unit=" sentences",
        disable=None if process == 0 else True,
    ) as bar:
        while left:
            before = len(left)
            for number in list(left):
                if job.read(number) is None:
                    translate = translate or make_translate(job.teacher, job.options, job.folder)
                    with try_lock(job.path(number).with_suffix(".lock")) as acquired:
                        if acquired and job.read(number) is None:
                            translate_shard(job, number, translate)
                    if not acquired:
                        continue
                left.remove(number)
                bar.update(len(job.shards[number]))
            if len(left) == before:
                time.sleep(POLL_INTERVAL)


def translate_shard(job: Job, number: int, translate: Translate) -> None:
    """Translate and write one shard, whose lock this process has acquired.

    Args:
        job: the corpus and its shards.
        number: of the shard.
        translate: the teacher as a function.
    """
    check_manifest(job.folder, job.fingerprint)
    path = job.path(number)
    if path.is_file():
        logger.warning(f"{path} is damaged and is translated again.")
    remove_unfinished(path)
    start = time.perf_counter()
    pairs = [job.pairs[index] for index in job.shards[number]]
    sentences, references = [pair.source for pair in pairs], [pair.references for pair in pairs]
    rows = translate_texts(job.teacher, translate, sentences, job.options, references)
    write_shard(path, job.fingerprint, rows, seconds=time.perf_counter() - start)


def in_corpus_order(shards: list[list[int]], rows_of_shards: list[list[Row]]) -> list[Row]:
    """The rows of all shards in the order of the corpus.

    Args:
        shards: indices of the pairs of every shard.
        rows_of_shards: the translations in the same order.
    """
    rows: list[Row] = [{}] * sum(map(len, shards))
    for indices, shard in zip(shards, rows_of_shards, strict=True):
        for index, row in zip(indices, shard, strict=True):
            rows[index] = row
    return rows


def statistics(rows: list[Row], seconds: float) -> dict[str, Any]:
    """Statistics of the translations.

    Args:
        rows: all translations.
        seconds: total time of all processes.
    """
    real = [row for row in rows if row["source_tokens"]]
    ratios = sorted(row["target_tokens"] / row["source_tokens"] for row in real)
    shares = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
    return {
        "sentences": len(rows),
        "empty_sources": len(rows) - len(real),
        "empty_translations": sum(not row["text"] for row in real),
        "cut_sources": sum(row["cut"] for row in rows),
        "mean_source_tokens": sum(row["source_tokens"] for row in rows) / len(rows),
        "mean_target_tokens": sum(row["target_tokens"] for row in rows) / len(rows),
        "length_ratio": {f"{share:.0%}": ratios[int(share * (len(ratios) - 1))] for share in shares if ratios},
        "repetition_rate": repetition_rate([row["text"] for row in rows]),
        "seconds": seconds,
        "sentences_per_second": len(rows) / seconds,
    }


def statistics_path(output: Path) -> Path:
    """File of the statistics of an output file."""
    return Path(f"{output}.statistics.json")

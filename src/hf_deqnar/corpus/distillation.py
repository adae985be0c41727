"""Sequence-level distillation: a teacher translates the source side of a corpus (Kim and Rush 2016).

    corpus.jsonl                   {"en": "A horse.", "de": "Ein Pferd."}
    distilled.jsonl                {"en": "A horse.", "de": what the teacher says}, line by line the same corpus
    distilled.jsonl.statistics.json
    distilled.jsonl.shards/        finished pieces of work; may be removed once distilled.jsonl is there

The corpus is sorted by length and cut into shards; processes take shards from the folder until none is left. A shard's
translations depend on the shard alone: padding changes floating point sums, and with them now and then a beam, so
batches are made within a shard, always in the same way. Therefore one process or ten, killed and started again or not,
write the same bytes (on machines that calculate alike, with the same number of threads).

With `nearest`, not the teacher's first beam is written but the one nearest to the corpus's own target by sentence BLEU:
what the teacher could say, mended by what was said (sequence-level interpolation, in the same paper).
"""

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers.utils import logging

from .evaluation import repetition_rate
from .files import read_json, write_json, write_whole
from .locks import PATIENCE, held
from .reading import Pair, read_parallel
from .shards import begin, check_origin, check_still_ours, read_shard, remove_unfinished, write_shard
from .teachers import Teacher, TeacherOptions, Translate, fingerprint_of_teacher, make_translate, translate_texts
from .tokenized import cleaned, fingerprint_of

logger = logging.get_logger(__name__)

ENDINGS = (".jsonl.gz", ".jsonl")

Row = dict[str, Any]  # a translation: text, source_tokens, target_tokens, cut


@dataclass
class Work:
    """What is to be translated, by whom, in which pieces, and where they are kept."""

    pairs: list[Pair]
    shards: list[list[int]]
    teacher: Teacher
    options: TeacherOptions
    folder: Path
    fingerprint: str

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05}.jsonl"

    def read(self, number: int) -> tuple[dict[str, Any], list[Row]] | None:
        """The figures and rows of a shard; None unless it is whole."""
        return read_shard(self.path(number), self.fingerprint)


def distill(
    pairs: list[Pair],
    teacher: Teacher,
    output: str | Path,
    *,
    source: str,
    target: str,
    options: TeacherOptions | None = None,
    process: int = 0,
    processes: int = 1,
) -> dict[str, Any]:
    """Write a corpus in which the targets are the teacher's translations; its statistics.

    Goes on where an earlier call was stopped, and beside others that write the same file; all return when it is whole.

    Args:
        output: a file ending in `.jsonl` or `.jsonl.gz`.
        source, target: names of the columns.
        process, processes: which of how many this is. It only decides where in the work each begins.
    """
    options, output = options or TeacherOptions(), Path(output)
    check_ending(output)
    if not 0 <= process < processes:
        raise ValueError(f"process {process} is not one of {processes}; they are numbered from 0.")
    cleaned(pair.source for pair in pairs)  # everything is text, or it is said before hours of work
    manifest = {
        "corpus": fingerprint_of(pair.source for pair in pairs),
        "sentences": len(pairs),
        "teacher": fingerprint_of_teacher(teacher),
        "columns": [source, target],
        **asdict(options),
    }
    if options.nearest:
        manifest["references"] = fingerprint_of("\n".join(pair.references) for pair in pairs)
    folder, fingerprint = begin(output, manifest)
    shards = cut_into_shards([pair.source for pair in pairs], options.shard_sentences)
    work = Work(pairs, shards, teacher, options, folder, fingerprint)
    while not (output.is_file() and statistics_path(output).is_file()):
        finish(work, process, processes)
        found = [work.read(number) for number in range(len(work.shards))]
        if None in found:  # damaged since it was finished
            continue
        rows = in_order(work.shards, [rows for _, rows in found])
        figures = statistics(rows, sum(head["seconds"] for head, _ in found))
        figures = {"teacher": teacher.name, "options": asdict(options), **figures}
        write_json(statistics_path(output), figures, folder)
        lines = ({source: pair.source, target: row["text"]} for pair, row in zip(pairs, rows, strict=True))
        write_whole(output, (json.dumps(line, ensure_ascii=False) for line in lines), folder)
    remedy = "remove it and start again, and it is made anew"
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
    """Several teachers side by side, for Dynamic KD; the statistics of each.

    Every teacher has its own file, `candidates.big.jsonl` for `candidates.jsonl` and the teacher `runs/big`. In
    `output` itself a line has the corpus's own target and `candidates`: the teachers' translations in their order,
    that target last. `candidates.jsonl.statistics.json` has the statistics of all.

    Args:
        teachers: may be a generator that loads one at a time.
        settings: as for `distill`.
    """
    output = Path(output)
    check_ending(output)
    check_origin(output)
    files: dict[Path, dict[str, Any]] = {}
    for teacher in teachers:
        file = file_of(output, teacher.name, files)
        files[file] = distill(pairs, teacher, file, source=source, target=target, **settings)
    texts = [[pair.references[0] for pair in read_parallel(file, source, target)] for file in files]
    raw = [pair.references[0] for pair in pairs]
    manifest = {"candidates": fingerprint_of(text for column in (*texts, raw) for text in column)}
    folder, _ = begin(output, {**manifest, "columns": [source, target]})
    if not output.is_file():
        lines = (
            {source: pair.source, target: raw, "candidates": [*candidates, raw]}
            for pair, raw, *candidates in zip(pairs, raw, *texts, strict=True)
        )
        write_whole(output, (json.dumps(line, ensure_ascii=False) for line in lines), folder)
    figures = {of_one["teacher"]: of_one for of_one in files.values()}
    write_json(statistics_path(output), figures, folder)
    return figures


def file_of(output: Path, name: str, taken: Iterable[Path]) -> Path:
    """`candidates.jsonl.gz` and the teacher `runs/big` → `candidates.big.jsonl.gz`; a second `big` is `big-2`."""
    ending = check_ending(output)
    stem, name = output.name.removesuffix(ending), Path(name).resolve().name
    wanted = [output.with_name(f"{stem}.{name}{suffix}{ending}") for suffix in ("", *(f"-{k}" for k in range(2, 100)))]
    return next(file for file in wanted if file not in taken)


def check_ending(output: Path) -> str:
    """Which of the endings it has."""
    for ending in ENDINGS:
        if output.name.endswith(ending):
            return ending
    raise ValueError(f"{output}: the output is lines of JSON, so its name should end in {' or '.join(ENDINGS)}.")


def cut_into_shards(sentences: list[str], size: int) -> list[list[int]]:
    """Numbers of the sentences of every shard, from the longest sentences to the shortest."""
    order = sorted(range(len(sentences)), key=lambda number: (-len(sentences[number]), number))
    return [order[first : first + size] for first in range(0, len(order), size)]


def finish(work: Work, process: int = 0, processes: int = 1) -> None:
    """Translate until every shard is whole, by this process or by another."""
    turns = sorted(range(len(work.shards)), key=lambda number: ((number - process) % processes, number))
    left = [number for number in turns if work.read(number) is None]
    translate: Translate | None = None
    with tqdm(
        total=len(work.pairs),
        initial=len(work.pairs) - sum(len(work.shards[number]) for number in left),
        desc=f"distilling {Path(work.teacher.name).name}",
        unit=" sentences",
        disable=None if process == 0 else True,
    ) as bar:
        while left:
            before = len(left)
            for number in list(left):
                if work.read(number) is None:
                    translate = translate or make_translate(work.teacher, work.options, work.folder)
                    with held(work.path(number).with_suffix(".lock")) as ours:
                        if ours and work.read(number) is None:
                            make_shard(work, number, translate)
                    if not ours:
                        continue
                left.remove(number)
                bar.update(len(work.shards[number]))
            if len(left) == before:
                time.sleep(PATIENCE)


def make_shard(work: Work, number: int, translate: Translate) -> None:
    """Translate one shard and write it down; its lock is ours."""
    check_still_ours(work.folder, work.fingerprint)
    path = work.path(number)
    if path.is_file():
        logger.warning(f"{path} is damaged and is made again.")
    remove_unfinished(path)
    start = time.perf_counter()
    pairs = [work.pairs[place] for place in work.shards[number]]
    sentences, references = [pair.source for pair in pairs], [pair.references for pair in pairs]
    rows = translate_texts(work.teacher, translate, sentences, work.options, references)
    write_shard(path, work.fingerprint, rows, seconds=time.perf_counter() - start)


def in_order(shards: list[list[int]], found: list[list[Row]]) -> list[Row]:
    """The rows of all shards in the order of the corpus."""
    rows: list[Row] = [{}] * sum(map(len, shards))
    for places, shard in zip(shards, found, strict=True):
        for place, row in zip(places, shard, strict=True):
            rows[place] = row
    return rows


def statistics(rows: list[Row], seconds: float) -> dict[str, Any]:
    """What the translations are like. Times are those of all processes together."""
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
    return Path(f"{output}.statistics.json")

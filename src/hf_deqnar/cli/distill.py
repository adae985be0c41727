"""Translate a corpus with teachers, for distillation.

    hf-deqnar distill --teacher runs/teacher --data train.jsonl.gz --source en --target de --output distilled.jsonl.gz
    hf-deqnar distill --teacher runs/tiny runs/base --data train.jsonl.gz --source en --target de \\
        --output candidates.jsonl.gz
    hf-deqnar distill --teacher google-t5/t5-small --source_prefix "translate English to German: " …
    hf-deqnar distill --teacher facebook/nllb-200-distilled-600M --forced_bos_token deu_Latn …
    hf-deqnar distill --teacher runs/teacher --data s3://bucket/train.jsonl.gz --output s3://bucket/distilled/ …
    hf-deqnar distill --tune_gamma candidates.jsonl.gz --references validation.jsonl.gz --source en --target de

An interrupted run is resumed, and several processes share the work: those of torchrun, of a Slurm array, or the actors
of --ray. With an address as output, or with --shard, they need no shared disk. With several teachers the output has a
column of candidates for `--objective dynamic_kd+…`, and each teacher has its own file beside it. The last form finds
the weight γ of each teacher, from candidates for sentences with several references.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

from .extras import requires_extra

if TYPE_CHECKING:
    from ..data.parallel_text import Pair
    from ..distillation.selection import TargetOptions
    from ..distillation.teachers import Teacher, TeacherOptions


@dataclass
class DistillationArguments:
    """Teachers, corpus, output, and the share of this process."""

    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the target language."})
    teacher: list[str] = field(
        default_factory=list, metadata={"help": "Directories or hub ids of seq2seq models with their tokenizers."}
    )
    data: list[str] = field(
        default_factory=list,
        metadata={
            "help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; or several of them. Also at "
            "addresses such as s3://bucket/train-*.jsonl.gz."
        },
    )
    output: str | None = field(
        default=None,
        metadata={
            "help": "File or address to write, ending in .jsonl or .jsonl.gz; with an address or --shard also in "
            ".parquet, or in / for a folder of parts."
        },
    )
    shard: str | None = field(
        default=None,
        metadata={
            "metavar": "I/N",
            "help": "Translate the I-th of N shares, from 0, without locks. The process that finishes last writes the "
            "output. Default for addresses: as --process and --processes.",
        },
    )
    join: bool = field(
        default=False, metadata={"help": "Translate nothing: check all shards and write the output from them."}
    )
    part_format: str | None = field(
        default=None, metadata={"help": "Format of parts: jsonl.gz (the default), jsonl or parquet."}
    )
    part_sentences: int | None = field(default=None, metadata={"help": "Sentences of a part. Default: 100,000."})
    ray: str | None = field(
        default=None,
        metadata={"help": "Address of a Ray cluster that translates, or local for a new one on this machine."},
    )
    ray_actors: int = field(
        default=2, metadata={"help": "Actors of --ray, each with a core, or a GPU with --device cuda."}
    )
    limit: int | None = field(default=None, metadata={"help": "Translate only the first sentences, this many."})
    unique: bool = field(default=False, metadata={"help": "Translate a source that occurs several times only once."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    process: int | None = field(
        default=None,
        metadata={"help": "Number of this process, from 0. Default: of torchrun, for addresses also of a Slurm array."},
    )
    processes: int | None = field(
        default=None,
        metadata={"help": "Number of processes. Default: of torchrun, for addresses also of a Slurm array; else 1."},
    )
    tune_gamma: str | None = field(
        default=None, metadata={"help": "Output of several teachers, for which gamma is tuned; nothing is translated."}
    )
    references: str | None = field(
        default=None, metadata={"help": "Corpus that --tune_gamma was made from, with several targets per sentence."}
    )

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise ValueError(f"source and target are both '{self.source}'; they are the names of two columns.")
        for entry in fields(self):
            name, given = entry.name, getattr(self, entry.name)
            usual = (
                name in ("source", "target", "tune_gamma", "references")
                or given is None
                or given in (entry.default, [])
            )
            if self.tune_gamma is not None and not usual:
                raise ValueError(f"{name} has no effect with tune_gamma, which translates nothing.")
        if self.references is not None and self.tune_gamma is None:
            raise ValueError("references has no effect without tune_gamma.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}.")
        self.find_process()
        self.check_shards()

    def find_process(self) -> None:
        """Which process this is: as the flags say, else the environment."""
        if self.shard is not None:
            if self.process is not None or self.processes is not None:
                raise ValueError("--shard I/N names the process; leave out --process and --processes.")
            number, _, count = self.shard.partition("/")
            if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
                raise ValueError(f"--shard {self.shard} should be I/N with I from 0 to N − 1, such as 0/8.")
            self.process, self.processes = int(number), int(count)
            return
        task, tasks = slurm_task() if self.is_sharded and None in (self.process, self.processes) else (0, 1)
        if self.process is None:
            self.process = task * read_integer("WORLD_SIZE", 1) + read_integer("RANK", 0)
        if self.processes is None:
            self.processes = tasks * read_integer("WORLD_SIZE", 1)

    def check_shards(self) -> None:
        """Raise ValueError for options that have no effect on how the output is written."""
        if self.ray_actors < 1:
            raise ValueError(f"ray_actors must be at least 1, not {self.ray_actors}.")
        if self.ray is None and self.ray_actors != type(self).ray_actors:
            raise ValueError("ray_actors has no effect without --ray.")
        if self.ray is not None and (self.shard is not None or self.join):
            raise ValueError("--ray translates all shards; leave out --shard and --join.")
        for name in ("part_format", "part_sentences"):
            if getattr(self, name) is not None and not (self.output or "").endswith("/"):
                raise ValueError(f"{name} is about an output that is a folder of parts; end --output in /.")
        if self.is_sharded and len(self.teacher) > 1:
            raise ValueError(
                "Several teachers are distilled into a local file without --shard, --join and --ray; distil each to an "
                "output of its own."
            )

    @property
    def is_sharded(self) -> bool:
        """Whether shards are divided among processes beforehand, without locks."""
        output = self.output or ""
        return "://" in output or output.endswith("/") or self.join or bool(self.shard or self.ray)


ARGUMENTS = (
    DistillationArguments,
    "hf_deqnar.distillation.teachers:TeacherOptions",
    "hf_deqnar.distillation.selection:TargetOptions",
)


def read_integer(variable: str, default: int) -> int:
    """The value of an environment variable that torchrun or Slurm sets."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ValueError(f"{variable}='{text}' in the environment is not a number; unset or correct it.")
    return int(text)


def slurm_task() -> tuple[int, int]:
    """Number of this task of a Slurm array, from 0, and of all; 0 and 1 outside of an array."""
    if "SLURM_ARRAY_TASK_ID" not in os.environ:
        return 0, 1
    lowest, highest = (read_integer(f"SLURM_ARRAY_TASK_{end}", 0) for end in ("MIN", "MAX"))
    task, count = read_integer("SLURM_ARRAY_TASK_ID", 0), read_integer("SLURM_ARRAY_TASK_COUNT", highest - lowest + 1)
    if highest - lowest + 1 != count and "SLURM_ARRAY_TASK_MAX" in os.environ:
        raise ValueError(
            f"The Slurm array has gaps ({count} tasks from {lowest} to {highest}); name shares by --shard."
        )
    return task - lowest, count


def run(arguments: DistillationArguments, options: "TeacherOptions", targets: "TargetOptions") -> None:
    if arguments.tune_gamma is None:
        translate(arguments, options, targets)
        return
    for given in (options, targets):
        for entry in fields(given):
            if getattr(given, entry.name) != entry.default:
                raise ValueError(f"{entry.name} has no effect with tune_gamma, which translates nothing.")
    tune(arguments)


def translate(arguments: DistillationArguments, options: "TeacherOptions", targets: "TargetOptions") -> None:
    """Translate the corpus, and print what was written."""
    with requires_extra("train", "This command"):
        from ..data.parallel_text import merge_repeated_sources, read_parallel
        from ..distillation.distill import distill, distill_candidates
        from ..distillation.selection import describe_targets, warning_of_targets
        from ..distillation.teachers import find_token_id
    from .loading import check_model

    if not arguments.teacher or not arguments.data or arguments.output is None:
        raise ValueError("--teacher, --data and --output are required.")
    if len(set(arguments.teacher)) < len(arguments.teacher):
        raise ValueError("A teacher is named twice; its translations would be the same.")
    for name in arguments.teacher:  # before any of them translates, which may take days
        tokenizer = check_model(name)
        if options.forced_bos_token is not None:
            find_token_id(tokenizer, options.forced_bos_token, name)
    pairs = [pair for data in arguments.data for pair in read_parallel(data, arguments.source, arguments.target)]
    pairs = pairs[: arguments.limit]
    if arguments.unique:
        pairs = merge_repeated_sources(pairs)
    settings = {name: getattr(arguments, name) for name in ("source", "target", "process", "processes")}
    settings["targets"] = targets
    teachers = load_teachers(arguments)
    if arguments.is_sharded:
        found = translate_sharded(pairs, next(teachers), arguments, options, settings)
        if found is None:
            return
    elif len(arguments.teacher) == 1:
        teacher = next(teachers)
        found = {teacher.name: distill(pairs, teacher, arguments.output, options=options, **settings)}
    else:
        found = distill_candidates(pairs, teachers, arguments.output, options=options, **settings)
    if arguments.process != 0 and not arguments.is_sharded:  # of sharded ones, that which has joined the shards
        return
    for name, figures in found.items():
        print(
            f"{name}: {figures['sentences']:,} sentences, {figures['sentences_per_second']:.1f} a second; "
            f"{figures['mean_target_tokens']:.1f} tokens on average for {figures['mean_source_tokens']:.1f}; "
            f"{figures['empty_translations']:,} empty, {figures['cut_sources']:,} sources cut, "
            f"{figures['repetition_rate']:.2%} of words repeated"
        )
        if "share_below_30_chrf" not in figures:  # written by version 0.1
            continue
        print(f"{name}: {describe_targets(figures)}")
        warning = warning_of_targets(name, figures)
        if warning is not None:
            print(warning, file=sys.stderr)
    print(f"written to {arguments.output}")


def translate_sharded(
    pairs: list["Pair"],
    teacher: "Teacher",
    arguments: DistillationArguments,
    options: "TeacherOptions",
    settings: dict[str, Any],
) -> dict[str, dict] | None:
    """Translate this process's shards; the statistics by teacher if the output is written, else None."""
    from ..distillation.sharded import Output, Unfinished, distill_shards
    from ..distillation.teachers import fingerprint_of_teacher

    parts = {name: getattr(arguments, name) for name in ("part_format", "part_sentences")}
    output = Output(arguments.output, **{name: value for name, value in parts.items() if value is not None})
    translate_tasks = None
    if arguments.ray is not None:
        from ..distillation.ray_actors import with_ray

        settings = {**settings, "process": 0, "processes": 1}
        load = partial(load_teacher, arguments.teacher[0], arguments.device)
        cluster = {"address": arguments.ray, "actors": arguments.ray_actors}
        cluster["gpus"] = int((arguments.device or "").startswith("cuda"))
        translate_tasks = with_ray(load, options, fingerprint_of_teacher(teacher), **cluster)
    try:
        figures = distill_shards(
            pairs,
            teacher,
            output,
            options=options,
            join_only=arguments.join,
            translate_tasks=translate_tasks,
            **settings,
        )
    except Unfinished as error:
        if arguments.join:
            raise
        print(f"The shards of process {settings['process']} of {settings['processes']} are finished. {error}")
        return None
    return {teacher.name: figures}


def load_teachers(arguments: DistillationArguments) -> Iterator["Teacher"]:
    """The teachers one at a time, so that only one is in memory."""
    device = arguments.device
    if device is None and "LOCAL_RANK" in os.environ:
        import torch

        device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    for name in arguments.teacher:
        yield load_teacher(name, device)


def load_teacher(name: str, device: str | None) -> "Teacher":
    from ..distillation.teachers import Teacher
    from .loading import load_model

    return Teacher(name, *load_model(name, device))


def tune(arguments: DistillationArguments) -> None:
    """Print γ for the candidates of sentences with several references."""
    from ..data.parallel_text import read_parallel
    from ..distillation.candidates import read_candidates, tune_gamma

    if arguments.references is None:
        raise ValueError("--tune_gamma needs --references: the corpus with several targets per sentence.")
    pairs, candidates = read_candidates(arguments.tune_gamma, arguments.source, arguments.target)
    real = read_parallel(arguments.references, arguments.source, arguments.target)[: len(pairs)]
    if [pair.source for pair in pairs] != [pair.source for pair in real]:
        raise ValueError(f"{arguments.tune_gamma} and {arguments.references} do not have the same sentences in order.")
    found = tune_gamma(candidates, [pair.references for pair in real])
    print(f"--gamma {' '.join(f'{weight:g}' for weight in found.gamma)}")
    print(
        f"The chosen candidates have {-found.distortion:.2f} sentence BLEU with other references, "
        f"{-found.distortion_of_equal_weights:.2f} with equal weights; {found.sentences:,} of {len(pairs):,} sentences "
        "have some.",
        file=sys.stderr,
    )

"""Translate a corpus with teachers, for distillation.

    hf-deqnar distill --teacher runs/teacher --data train.jsonl.gz --source en --target de --output distilled.jsonl.gz
    hf-deqnar distill --teacher runs/tiny runs/base --data train.jsonl.gz --source en --target de \\
        --output candidates.jsonl.gz
    hf-deqnar distill --teacher google-t5/t5-small --source_prefix "translate English to German: " …
    hf-deqnar distill --teacher facebook/nllb-200-distilled-600M --forced_bos_token deu_Latn …
    hf-deqnar distill --tune_gamma candidates.jsonl.gz --references validation.jsonl.gz --source en --target de

An interrupted run is resumed, and several processes share the work. With several teachers the output has a column of
candidates for `--objective dynamic_kd+…`, and each teacher has its own file beside it. The last form finds the weight γ
of each teacher, from candidates for sentences with several references.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from .extras import requires_extra

if TYPE_CHECKING:
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
        metadata={"help": "JSONL, TSV, CSV (.gz), Parquet, two aligned files, or datasets:…; or several of them."},
    )
    output: str | None = field(default=None, metadata={"help": "File to write, ending in .jsonl or .jsonl.gz."})
    limit: int | None = field(default=None, metadata={"help": "Translate only the first sentences, this many."})
    unique: bool = field(default=False, metadata={"help": "Translate a source that occurs several times only once."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    process: int | None = field(
        default=None, metadata={"help": "Number of this process, from 0. Default: the variable RANK, else 0."}
    )
    processes: int | None = field(
        default=None, metadata={"help": "Number of processes. Default: the variable WORLD_SIZE, else 1."}
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
        for name in ("teacher", "data", "output", "limit", "unique", "device", "process", "processes"):
            given = getattr(self, name)
            if self.tune_gamma is not None and not (given is None or given is False or given == []):
                raise ValueError(f"{name} has no effect with tune_gamma, which translates nothing.")
        if self.references is not None and self.tune_gamma is None:
            raise ValueError("references has no effect without tune_gamma.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}.")
        if self.process is None:
            self.process = read_integer("RANK", 0)
        if self.processes is None:
            self.processes = read_integer("WORLD_SIZE", 1)


ARGUMENTS = (
    DistillationArguments,
    "hf_deqnar.distillation.teachers:TeacherOptions",
    "hf_deqnar.distillation.selection:TargetOptions",
)


def read_integer(variable: str, default: int) -> int:
    """The value of an environment variable that torchrun sets."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise ValueError(f"{variable}='{text}' in the environment is not a number; unset or correct it.")
    return int(text)


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
    if len(arguments.teacher) == 1:
        teacher = next(teachers)
        found = {teacher.name: distill(pairs, teacher, arguments.output, options=options, **settings)}
    else:
        found = distill_candidates(pairs, teachers, arguments.output, options=options, **settings)
    if arguments.process != 0:
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


def load_teachers(arguments: DistillationArguments) -> Iterator["Teacher"]:
    """The teachers one at a time, so that only one is in memory."""
    from ..distillation.teachers import Teacher
    from .loading import load_model

    device = arguments.device
    if device is None and "LOCAL_RANK" in os.environ:
        import torch

        device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    for name in arguments.teacher:
        yield Teacher(name, *load_model(name, device))


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

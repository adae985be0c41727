"""Options of the benchmarks, in a module that imports neither torch nor transformers."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Preset = Literal["tiny", "small", "base", "big"]
RUNTIMES = ("onnx", "ctranslate2")  # that --without can exclude
BUDGETS = [2, 4, 8]
WAYS = [
    "solver=picard",
    "solver=broyden",
    "memory=1",
    "memory=2",
    "memory=3",
    "memory=8",
    "tol=0.1",
    "tol=0.03",
    "tol=0.01",
    "tol=0.0001",
    "max_nfe=1",
    "max_nfe=2",
    "max_nfe=3",
    "max_nfe=4",
    "stop_on_stable_tokens=1",
    "stop_on_stable_tokens=2",
]


@dataclass(kw_only=True)
class BenchmarkOptions:
    """Options of all benchmarks."""

    json: Path | None = field(default=None, metadata={"metavar": "FILE", "help": "Write the figures here."})

    def check_at_least_one(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}.")


@dataclass(kw_only=True)
class SolverOptions(BenchmarkOptions):
    model: str | None = field(
        default=None, metadata={"help": "A saved model. Default: a randomly initialised one of the preset small."}
    )
    rows: int = field(default=32, metadata={"help": "Sentences of the batch."})
    shortest: int = field(default=5, metadata={"help": "Tokens of the shortest sentence."})
    longest: int = field(default=60, metadata={"help": "Tokens of the longest sentence."})
    tol: float = field(default=1e-3, metadata={"help": "Relative residual at which a solve stops."})
    max_nfe: int = field(default=40, metadata={"help": "Maximum evaluations of a solve."})
    memory: int = field(default=5, metadata={"help": "Past steps of Anderson and Broyden, in both packages."})
    repeats: int = field(default=25, metadata={"help": "Timed repetitions of every solver."})
    threads: int = field(default=1, metadata={"help": "Threads of torch."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and sentences."})

    def __post_init__(self) -> None:
        self.check_at_least_one("rows", "max_nfe", "memory", "repeats", "threads")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"--shortest {self.shortest} must be between 1 and --longest {self.longest}.")


@dataclass(kw_only=True)
class MemoryOptions(BenchmarkOptions):
    preset: Preset = field(default="small", metadata={"help": "Size of the model."})
    vocabulary: int = field(default=8000, metadata={"help": "Tokens of the vocabulary."})
    layers: int = field(default=6, metadata={"help": "Layers of the encoder and of the stacked decoder."})
    rows: int = field(default=32, metadata={"help": "Sentences of the batch."})
    length: int = field(default=40, metadata={"help": "Tokens of every sentence."})
    budgets: list[int] = field(default_factory=lambda: [5, 20, 40], metadata={"help": "Evaluations of a solve."})
    seed: int = field(default=0, metadata={"help": "Seed of weights and sentences."})

    def __post_init__(self) -> None:
        self.check_at_least_one("vocabulary", "layers", "rows", "length")
        if min(self.budgets) < 1:
            raise ValueError(f"--budgets {min(self.budgets)}: a solve needs at least one evaluation.")


@dataclass(kw_only=True)
class TrainingOptions(BenchmarkOptions):
    objective: str = field(default="ctc+glat", metadata={"help": "Training objective, as in `hf-deqnar train`."})
    preset: Preset = field(default="tiny", metadata={"help": "Size of the model."})
    vocabulary: int = field(default=4000, metadata={"help": "Tokens of the vocabulary."})
    layers: int = field(default=6, metadata={"help": "Layers of the stacked decoder."})
    max_tokens: int = field(default=4096, metadata={"help": "Maximum of rows × longest sentence of a batch."})
    correction: float = field(
        default=0.5, metadata={"help": "Weight of the loss at intermediate states, where it is used."}
    )
    steps: int = field(default=10, metadata={"help": "Timed steps of every system."})
    threads: int = field(default_factory=os.cpu_count, metadata={"help": "Threads of torch, for every system."})
    only: list[str] = field(
        default_factory=lambda: [""],
        metadata={"metavar": "TEXT", "help": "Measure systems whose names contain one of these texts."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of weights and sentences."})

    def __post_init__(self) -> None:
        self.check_at_least_one("vocabulary", "layers", "threads")
        if self.steps < 1:
            raise ValueError(f"--steps {self.steps}: at least 1 is needed.")


@dataclass(kw_only=True)
class CorpusOptions(BenchmarkOptions):
    """Options of the benchmarks on sentences of a corpus.

    Attributes:
        load: name of a model → the model and its tokenizer. Set by the caller, because the function that reports errors
            to users is part of the command line.
    """

    model: str
    data: str = field(metadata={"help": "JSONL, TSV or CSV (.gz), or the common prefix of two aligned files."})
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the references."})
    sentences: int = field(default=100, metadata={"help": "Timed sentences, evenly spaced in the data."})
    repeats: int = field(default=3, metadata={"help": "Timed repetitions of every system with each input."})
    threads: int = field(default=1, metadata={"help": "Threads of a computation."})
    load: Callable[..., tuple[Any, Any]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.check_at_least_one("sentences", "repeats", "threads")


@dataclass(kw_only=True)
class DecodingOptions(CorpusOptions):
    model: str = field(metadata={"help": "An equilibrium model: a directory, hub id or export."})
    ways: list[str] = field(
        default_factory=lambda: list(WAYS),
        metadata={"metavar": "OPTION=VALUE[,…]", "help": "Decoding options to compare with the model's own."},
    )


@dataclass(kw_only=True)
class ComparisonOptions(CorpusOptions):
    """Options of the comparisons of a model with an autoregressive teacher."""

    model: str = field(metadata={"help": "A deqnar model: a directory or hub id."})
    teacher: str = field(metadata={"help": "An autoregressive model with the same tokenizer."})
    baseline: str | None = field(
        default=None,
        metadata={"help": "Second autoregressive model, such as one with a one-layer decoder."},
    )
    marian: Path | None = field(
        default=None,
        metadata={"metavar": "FOLDER", "help": "A student of Marian, trained by experiments/marian_student.py."},
    )
    export: Path | None = field(
        default=None,
        metadata={"metavar": "FOLDER", "help": "Output of hf-deqnar export. Default: the model is exported."},
    )
    budgets: list[int] | None = field(
        default=None,
        metadata={
            "nargs": "*",
            "help": "Values of max_nfe to compare with the model's own tolerance. "
            f"Default: {' '.join(map(str, BUDGETS))}.",
        },
    )
    ways: list[str] = field(
        default_factory=list,
        metadata={
            "metavar": "OPTION=VALUE[,…]",
            "help": "Decoding options, such as max_nfe=2,ctc_beam_size=3.",
        },
    )
    without: list[str] = field(default_factory=list, metadata={"choices": RUNTIMES, "help": "Runtimes to exclude."})


@dataclass(kw_only=True)
class LatencyOptions(ComparisonOptions):
    bleu_sentences: int | None = field(
        default=None, metadata={"help": "Sentences that BLEU is measured on. Default: all of the data."}
    )
    lengths: list[int] = field(
        default_factory=lambda: [5, 15, 30, 60],
        metadata={"nargs": "*", "help": "Source lengths in tokens, for the table by length."},
    )
    sentences_per_length: int = field(default=20, metadata={"help": "Sources of each length."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least_one("bleu_sentences", "sentences_per_length")
        if self.lengths != sorted(set(self.lengths)) or min(self.lengths, default=1) < 1:
            raise ValueError(f"--lengths {' '.join(map(str, self.lengths))} must be increasing and at least 1.")


@dataclass(kw_only=True)
class ThroughputOptions(ComparisonOptions):
    sentences: int = field(default=256, metadata={"help": "Timed sentences, evenly spaced in the data."})
    batches: list[int] = field(default_factory=lambda: [8, 32, 128], metadata={"help": "Sentences per batch."})

"""Measure speed and memory; every benchmark prints a table and can write its figures as JSON."""

import json
from functools import partial
from importlib import import_module

from ..benchmarks import options
from ..utils.source_dataclasses import read_docstring
from .command import Command
from .terminal_tables import print_results

OPTIONS = {
    "solver": options.SolverOptions,
    "memory": options.MemoryOptions,
    "training": options.TrainingOptions,
    "decoding": options.DecodingOptions,
    "latency": options.LatencyOptions,
    "throughput": options.ThroughputOptions,
}


def run(name: str, arguments: options.BenchmarkOptions) -> None:
    """Run a benchmark, print its table, and write its figures."""
    from ..utils.files import check_writable
    from .loading import load_model

    benchmark = import_module(f"hf_deqnar.benchmarks.{name}")
    check_writable(arguments.json)
    if isinstance(arguments, options.CorpusOptions):
        arguments.load = load_model
    figures = benchmark.measure(arguments)
    print_results(benchmark.table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


BENCHMARKS = {
    name: Command(read_docstring(f"hf_deqnar.benchmarks.{name}"), (kind,), partial(run, name))
    for name, kind in OPTIONS.items()
}

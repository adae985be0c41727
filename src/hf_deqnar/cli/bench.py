"""Measure speed and memory; every benchmark prints a table and can write its figures as JSON."""

import argparse
import json
from pathlib import Path

from ..benchmarks import decoding, latency, memory, solver, throughput, training
from ..corpus.files import check_writable
from .loading import load_model

BENCHMARKS = {
    "solver": solver,
    "memory": memory,
    "training": training,
    "decoding": decoding,
    "latency": latency,
    "throughput": throughput,
}

COUNTS = ("rows", "length", "layers", "vocabulary", "max_nfe", "memory", "repeats", "threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="benchmark")
    for name, module in BENCHMARKS.items():
        summary = module.__doc__.strip().splitlines()[0]
        benchmark = benchmarks.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        module.add_arguments(benchmark)
        benchmark.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
        # Benchmarks know nothing of the command line; those that load several models are given its way to do so.
        benchmark.set_defaults(measure=module.measure, table=module.table, load=load_model)


def run(options: argparse.Namespace) -> None:
    check_writable(options.json)
    for name in COUNTS:
        if getattr(options, name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}.")
    figures = options.measure(options)
    print(options.table(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

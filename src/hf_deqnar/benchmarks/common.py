"""Utilities of the benchmarks: description of the machine, interleaved timing, tables."""

import ast
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy
import torch
import transformers
from tqdm import tqdm

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.layers_deqnar import BranchEnd
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration


def machine(threads: int, *packages: str) -> dict[str, str | int]:
    """Processor, threads and package versions; further packages by name."""
    return {
        "processor": _processor(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{name: import_module(name).__version__ for name in packages},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
        return names[0] if names else platform.processor()
    except FileNotFoundError:  # not Linux
        return platform.processor() or platform.machine()


@torch.no_grad()
def untrained_model(config: DeqNarConfig) -> DeqNarForConditionalGeneration:
    """A model with random weights and the residual branches at full scale; otherwise solves converge immediately."""
    model = DeqNarForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, BranchEnd):
            module.weight.div_(module.initial_gain)
    return model


def interleaved_seconds(systems: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of every system. Runs are interleaved, so that background load affects all systems."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for repeat in range(repeats + 1):
        for name, run in systems.items():
            start = time.perf_counter()
            run()
            if repeat > 0:  # the first repeat is warm-up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


@dataclass
class Timings:
    """Times and outputs of systems on the same inputs: `seconds[name][repeat][input]`, `outputs[name][input]`."""

    seconds: dict[str, list[list[float]]]
    outputs: dict[str, list[Any]]


def time_interleaved(
    systems: dict[str, Callable[[Any], Any]], inputs: Sequence[Any], repeats: int, warm_up: int = 1
) -> Timings:
    """Time every system on every input. All systems process one input before the next, in rotating order, so that
    neither background load nor the order favours a system.

    Args:
        warm_up: number of untimed inputs of every system before the timed ones.
    """
    names = list(systems)
    for name in names:
        for one in inputs[:warm_up]:
            systems[name](one)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(repeats)] for name in names}
    outputs: dict[str, list[Any]] = {name: [] for name in names}
    runs = [(repeat, one) for repeat in range(repeats) for one in inputs]
    for number, (repeat, one) in enumerate(tqdm(runs, desc="timing", unit="input", disable=None)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            output = systems[name](one)
            seconds[name][repeat].append(time.perf_counter() - start)
            if repeat == 0:
                outputs[name].append(output)
    return Timings(seconds, outputs)


def in_milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """Median, 95th percentile (interpolated) and mean.

    >>> in_milliseconds([0.001, 0.002, 0.003, 0.004, 0.005])
    {'median': 3.0, 'p95': 4.8, 'mean': 3.0}
    """
    times = 1000 * numpy.array(list(seconds))
    figures = {"median": numpy.median(times), "p95": numpy.percentile(times, 95), "mean": times.mean()}
    return {name: round(float(figure), 6) for name, figure in figures.items()}


def read_options(text: str) -> dict[str, Any]:
    """Parse `option=value,…` to a dictionary.

    >>> read_options("length_beams=5,solver=broyden")
    {'length_beams': 5, 'solver': 'broyden'}
    """
    options: dict[str, Any] = {}
    for assignment in text.split(","):
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"'{assignment}' in '{text}' is not of the form option=value.")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = value  # a string
    return options


def markdown_table(headers: list[str], rows: list[list[object]]) -> str:
    """A Markdown table."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

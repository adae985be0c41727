"""What benchmarks share: the machine's description, taking turns, and tables."""

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
    """Where the figures come from; the versions of further packages if they had a part in them."""
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
    """Random weights whose layers add as much as trained ones do; else every equilibrium would be found at once."""
    model = DeqNarForConditionalGeneration(config)
    for module in model.modules():
        if isinstance(module, BranchEnd):
            module.weight.div_(module.initial_gain)
    return model


def interleaved_seconds(contenders: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median time of every contender. They take turns, so that a slow minute of the machine hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for repeat in range(repeats + 1):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if repeat > 0:  # the first turn warms up
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


@dataclass
class Turns:
    """What contenders did with the same inputs, by name: `seconds[name][repeat][place]`, `answers[name][place]`."""

    seconds: dict[str, list[list[float]]]
    answers: dict[str, list[Any]]


def take_turns(
    contenders: dict[str, Callable[[Any], Any]], inputs: Sequence[Any], repeats: int, warm_up: int = 1
) -> Turns:
    """Time every contender on every input. All of them take one input before any takes the next, and who begins
    rotates, so that neither a slow minute of the machine nor a place in the order is one contender's alone.

    Args:
        warm_up: how many inputs every contender is given before the clock starts.
    """
    names = list(contenders)
    for name in names:
        for one in inputs[:warm_up]:
            contenders[name](one)
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in range(repeats)] for name in names}
    answers: dict[str, list[Any]] = {name: [] for name in names}
    turns = [(repeat, one) for repeat in range(repeats) for one in inputs]
    for number, (repeat, one) in enumerate(tqdm(turns, desc="timing", unit="turn", disable=None)):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            answer = contenders[name](one)
            seconds[name][repeat].append(time.perf_counter() - start)
            if repeat == 0:
                answers[name].append(answer)
    return Turns(seconds, answers)


def in_milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """Median, 95th percentile (between neighbours it is interpolated) and mean.

    >>> in_milliseconds([0.001, 0.002, 0.003, 0.004, 0.005])
    {'median': 3.0, 'p95': 4.8, 'mean': 3.0}
    """
    times = 1000 * numpy.array(list(seconds))
    figures = {"median": numpy.median(times), "p95": numpy.percentile(times, 95), "mean": times.mean()}
    return {name: round(float(figure), 6) for name, figure in figures.items()}


def read_options(text: str) -> dict[str, Any]:
    """Options as users write them behind a name.

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
            options[key] = value  # a word
    return options


def markdown_table(headers: list[str], rows: list[list[object]]) -> str:
    """A Markdown table, ready for the README."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

"""What benchmarks share: the machine's description, taking turns, and tables."""

import platform
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from ..configuration_deqnar import DeqNarConfig
from ..layers_deqnar import BranchEnd
from ..modeling_deqnar import DeqNarForConditionalGeneration


def machine(threads: int) -> dict[str, str | int]:
    """Where the figures come from."""
    return {
        "processor": _processor(),
        "threads": threads,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
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


def markdown_table(headers: list[str], rows: list[list[object]]) -> str:
    """A Markdown table, ready for the README."""
    cells = [[str(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)

"""Throughput: sentences and tokens per second of the model and an autoregressive teacher, by batch size.

The systems of `bench latency`, with batches of sentences of similar length; every batch is translated by all systems
in rotating order. Times are from token ids to token ids. Tokens are those of the output, without special tokens; BLEU,
chrF and length ratio are of the same translations. Exports in int8 translate sentences of equal length together.
"""

import statistics
from typing import Any

from ..data.parallel_text import evenly_spaced
from . import systems
from .common import machine, markdown_table, time_interleaved
from .options import ThroughputOptions
from .systems import Comparison


def measure(options: ThroughputOptions) -> dict:
    check(options)
    with systems.compared(options) as comparison:
        chosen = evenly_spaced(comparison.pairs, options.sentences)
        results: dict[str, dict[str, Any]] = {
            name: {"system": one.role, "runtime": one.runtime, "search": one.search, "batches": {}}
            for name, one in comparison.systems.items()
        }
        for size in options.batches:
            for name, figures in measure_size(comparison, chosen, size, options.repeats).items():
                results[name]["batches"][str(size)] = figures
        return {
            "machine": machine(options.threads, *systems.packages_of(options)),
            "settings": comparison.describe(options),
            "results": results,
        }


def check(options: ThroughputOptions) -> None:
    """Raise ValueError for invalid options of this benchmark."""
    for size in options.batches:
        if size < 1:
            raise ValueError(f"--batches {size}: a batch has at least one sentence.")
        if options.sentences % size:
            raise ValueError(
                f"--sentences {options.sentences} cannot be divided into batches of {size}, because the last one would "
                "be smaller; choose a multiple."
            )
    if len(set(options.batches)) < len(options.batches):
        raise ValueError("--batches contains a duplicate; every size is one pair of columns.")


def measure_size(comparison: Comparison, chosen: list[int], size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Figures of every system with batches of one size; rates are medians over the repeats."""
    sources, pairs = ([items[place] for place in chosen] for items in (comparison.sources, comparison.pairs))
    batches = systems.batches_of_similar_length(sources, size)
    runs = {name: system.translate for name, system in comparison.systems.items()}
    timings = time_interleaved(runs, [[sources[place] for place in batch] for batch in batches], repeats)
    in_order = [pairs[place] for batch in batches for place in batch]
    figures = {}
    for name in runs:
        written = [tokens for output in timings.outputs[name] for tokens in output]
        tokens = systems.count_tokens(written, comparison.tokenizer)
        seconds = statistics.median(map(sum, timings.seconds[name]))
        figures[name] = {
            "sentences_per_second": len(written) / seconds,
            "tokens_per_second": tokens / seconds,
            "target_tokens": tokens,
            "every_second": timings.seconds[name],
            **systems.score(written, in_order, comparison.tokenizer),
        }
    return figures


def table(figures: dict) -> str:
    sizes = list(next(iter(figures["results"].values()))["batches"])
    headers = ["system", "runtime", "search", *systems.QUALITY_HEADERS]
    headers += [f"{unit}/s at {size}" for size in sizes for unit in ("sentences", "tokens")]
    rows = []
    for one in figures["results"].values():
        measured = [one["batches"][size] for size in sizes]
        rates = [f"{found[f'{unit}_per_second']:.1f}" for found in measured for unit in ("sentences", "tokens")]
        rows.append([one["system"], one["runtime"], one["search"], *systems.quality_cells(measured[0]), *rates])
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}"

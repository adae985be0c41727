"""Many sentences at once: sentences and tokens per second, ours and an autoregressive teacher's, by batch size.

The contenders of `bench latency`, with batches of real sentences of similar length; with every batch all of them take
turns. The clock runs from token ids to token ids. Tokens are those that a contender wrote, without padding and the
like; BLEU is of these very translations. Exports in int8 translate the sentences of a batch one by one.
"""

import statistics
from typing import Any

from ..data.parallel_text import evenly_spaced
from . import contenders
from .common import machine, markdown_table, take_turns
from .contenders import Comparison
from .options import ThroughputOptions


def measure(options: ThroughputOptions) -> dict:
    check(options)
    with contenders.compared(options) as comparison:
        chosen = evenly_spaced(comparison.pairs, options.sentences)
        results: dict[str, dict[str, Any]] = {
            name: {"system": one.system, "runtime": one.runtime, "search": one.search, "batches": {}}
            for name, one in comparison.contenders.items()
        }
        for size in options.batches:
            for name, figures in measure_size(comparison, chosen, size, options.repeats).items():
                results[name]["batches"][str(size)] = figures
        return {
            "machine": machine(options.threads, *contenders.packages_of(options)),
            "settings": comparison.describe(options),
            "results": results,
        }


def check(options: ThroughputOptions) -> None:
    """Refuse what is particular to this benchmark."""
    for size in options.batches:
        if size < 1:
            raise ValueError(f"--batches {size}: a batch has at least one sentence.")
        if options.sentences % size:
            raise ValueError(
                f"--sentences {options.sentences} cannot be divided into batches of {size}, the last would be smaller; "
                "take a multiple."
            )
    if len(set(options.batches)) < len(options.batches):
        raise ValueError("A number stands twice in --batches; each makes columns of its own.")


def measure_size(comparison: Comparison, chosen: list[int], size: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Figures of every contender with batches of one size; rates are medians over the repeats."""
    sources, pairs = ([items[place] for place in chosen] for items in (comparison.sources, comparison.pairs))
    batches = contenders.batches_of_similar_length(sources, size)
    runs = {name: contender.translate for name, contender in comparison.contenders.items()}
    turns = take_turns(runs, [[sources[place] for place in batch] for batch in batches], repeats)
    in_order = [pairs[place] for batch in batches for place in batch]
    figures = {}
    for name in runs:
        written = [tokens for answer in turns.answers[name] for tokens in answer]
        tokens = contenders.count_tokens(written, comparison.tokenizer)
        seconds = statistics.median(map(sum, turns.seconds[name]))
        figures[name] = {
            "sentences_per_second": len(written) / seconds,
            "tokens_per_second": tokens / seconds,
            "target_tokens": tokens,
            "every_second": turns.seconds[name],
            **contenders.score(written, in_order, comparison.tokenizer),
        }
    return figures


def table(figures: dict) -> str:
    sizes = list(next(iter(figures["results"].values()))["batches"])
    headers = ["system", "runtime", "search", "BLEU"]
    headers += [f"{unit}/s at {size}" for size in sizes for unit in ("sentences", "tokens")]
    rows = []
    for one in figures["results"].values():
        measured = [one["batches"][size] for size in sizes]
        rates = [f"{found[f'{unit}_per_second']:.1f}" for found in measured for unit in ("sentences", "tokens")]
        rows.append([one["system"], one["runtime"], one["search"], f"{measured[0]['bleu']:.2f}", *rates])
    return f"{figures['machine']}\n{figures['settings']}\n\n{markdown_table(headers, rows)}"

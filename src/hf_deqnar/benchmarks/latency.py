"""Latency of single sentences: the model and an autoregressive teacher, with BLEU, chrF and length ratio.

The sentences are evenly spaced in a test set; every sentence is translated by all systems in rotating order, in one
process. Times are from token ids to token ids, without tokenization. Median and 95th percentile are over all sentences
and repeats. Quality is of the complete test set (or --bleu_sentences of it), translated once by every system in
batches, untimed. The speed relative to a row of the teacher is the ratio of the medians.

A second table is by source length (in tokens, including the end token): sentences of about that length, joined from
several if there are too few, with the evaluations of the model. A last line gives the share of decoding time in torch
that is spent in the solver, outside the transition.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from tqdm import tqdm

from ..data.parallel_text import evenly_spaced
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
from ..models.deqnar.text import clean_text
from . import systems
from .common import Timings, in_milliseconds, machine, markdown_table, time_interleaved
from .options import LatencyOptions
from .systems import TEACHER, Comparison, System

BATCH = 32  # of untimed translations
WARM_UP = 3  # untimed sentences of every system before the timed ones
# Rows of the teacher that the systems are compared with, and their column headers.
REFERENCES = {
    (TEACHER, "transformers", "greedy"): "transformers greedy",
    (TEACHER, "transformers", "beam 5"): "transformers beam 5",
    (TEACHER, "CTranslate2 int8", "greedy"): "CTranslate2 int8 greedy",
    (TEACHER, "CTranslate2 int8", "beam 5"): "CTranslate2 int8 beam 5",
}


def measure(options: LatencyOptions) -> dict:
    with systems.compared(options) as comparison:
        if (options.bleu_sentences or 0) > len(comparison.pairs):
            raise ValueError(
                f"{options.data} has {len(comparison.pairs)} sentences, which is less than --bleu_sentences "
                f"{options.bleu_sentences}."
            )
        scored = evenly_spaced(comparison.pairs, options.bleu_sentences)
        timed = [comparison.sources[place] for place in evenly_spaced(comparison.pairs, options.sentences)]
        samples = samples_by_length(comparison, options.lengths, options.sentences_per_length)
        results = {
            name: describe(system, comparison, scored, timed)
            for name, system in tqdm(comparison.systems.items(), desc="scoring", disable=None)
        }
        add_times(results, time_one_by_one(comparison.systems, timed, options.repeats), comparison)
        return {
            "machine": machine(options.threads, *systems.packages_of(options)),
            "settings": {**comparison.describe(options), "bleu_sentences": len(scored)},
            "results": results,
            "lengths": measure_by_length(comparison.systems, samples, options.repeats),
            "solver_overhead": solver_overhead(comparison.model, timed),
        }


def describe(system: System, comparison: Comparison, scored: list[int], timed: list[list[int]]) -> dict[str, Any]:
    """Name and quality of a system, and its evaluations on the timed sentences."""
    sources, pairs = ([items[place] for place in scored] for items in (comparison.sources, comparison.pairs))
    found = systems.translate_in_batches(system.translate, sources, BATCH)
    figures = {"system": system.role, "runtime": system.runtime, "search": system.search}
    figures |= systems.score(found, pairs, comparison.tokenizer)
    if system.count_evaluations is not None:
        counts = systems.translate_in_batches(system.count_evaluations, timed, BATCH)
        figures["nfe"] = sum(counts) / len(counts)
    return figures


def time_one_by_one(chosen: dict[str, System], sources: list[list[int]], repeats: int) -> Timings:
    """Time every system with batches of one sentence."""
    runs = {name: system.translate for name, system in chosen.items()}
    return time_interleaved(runs, [[source] for source in sources], repeats, WARM_UP)


def add_times(results: dict[str, dict], timings: Timings, comparison: Comparison) -> None:
    """Add the statistics of each system, and its speed relative to the teacher."""
    for name, figures in results.items():
        every = [seconds for repeat in timings.seconds[name] for seconds in repeat]
        written = [tokens for output in timings.outputs[name] for tokens in output]
        figures["milliseconds"] = in_milliseconds(every)
        figures["target_tokens"] = systems.count_tokens(written, comparison.tokenizer) / len(written)
        figures["every_millisecond"] = [[round(1000 * one, 4) for one in repeat] for repeat in timings.seconds[name]]
    rows = {(one["system"], one["runtime"], one["search"]): one["milliseconds"]["median"] for one in results.values()}
    for figures in results.values():
        figures["speed_to"] = {
            title: rows[row] / figures["milliseconds"]["median"] for row, title in REFERENCES.items() if row in rows
        }


def samples_by_length(comparison: Comparison, lengths: list[int], count: int) -> dict[int, dict[str, Any]]:
    """For every length, sources of about that many tokens."""
    if lengths and lengths[-1] > comparison.longest:
        raise ValueError(
            f"--lengths {lengths[-1]} is more than the {comparison.longest} tokens that every system supports; "
            "lower it."
        )
    texts = [clean_text(pair.source) for pair in comparison.pairs]
    tokenize = comparison.tokenizer
    return {
        length: nearest(length, texts, comparison.sources, lambda text: tokenize(text)["input_ids"], count)
        for length in lengths
    }


def nearest(
    length: int, texts: list[str], sources: list[list[int]], tokenize: Callable[[str], list[int]], count: int
) -> dict[str, Any]:
    """`count` sources within 10 % of a length, spread over the data: single sentences first, then joined neighbours,
    then the nearest of all others."""

    def distance(candidate: tuple[list[int], bool]) -> int:
        return abs(len(candidate[0]) - length)

    slack = max(1, length // 10)
    single, joined = [(source, False) for source in sources], []
    if sum(distance(candidate) <= slack for candidate in single) < count:
        joined = [(tokenize(text), True) for text in joined_texts(length, texts, sources)]
    chosen = []
    for candidates in (single, joined):
        fitting = [candidate for candidate in candidates if distance(candidate) <= slack]
        chosen += [fitting[place] for place in evenly_spaced(fitting, count - len(chosen))]
    if len(chosen) < count:  # all that fit are included
        others = [candidate for candidate in single + joined if distance(candidate) > slack]
        chosen += sorted(others, key=distance)[: count - len(chosen)]
    return {"sources": [source for source, _ in chosen], "joined": sum(is_joined for _, is_joined in chosen)}


def joined_texts(length: int, texts: list[str], sources: list[list[int]]) -> list[str]:
    """For every sentence, its text joined with as many following ones as fit a length, cyclically."""
    joined = []
    for first in range(len(texts)):
        pieces, tokens = [texts[first]], len(sources[first])
        for step in range(1, len(texts)):
            place = (first + step) % len(texts)
            tokens += len(sources[place]) - 1  # without one end token
            if tokens > length:
                break
            pieces.append(texts[place])
        if len(pieces) > 1:
            joined.append(" ".join(pieces))
    return joined


def measure_by_length(
    chosen: dict[str, System], samples: dict[int, dict[str, Any]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Times of the main systems at every length, and their growth from one length to the next."""
    main = {name: system for name, system in chosen.items() if is_main(system)}
    # Lengths are interleaved as well.
    order = [(length, place) for place in range(max(map(_count, samples.values()), default=0)) for length in samples]
    order = [(length, place) for length, place in order if place < _count(samples[length])]
    timings = time_one_by_one(main, [samples[length]["sources"][place] for length, place in order], repeats)
    figures: dict[str, dict[str, Any]] = {}
    previous = None
    for length, sample in samples.items():
        places = [number for number, (of, _) in enumerate(order) if of == length]
        tokens = sum(map(len, sample["sources"])) / _count(sample)
        figures[str(length)] = {"tokens": tokens, "sentences": _count(sample), "joined": sample["joined"]}
        figures[str(length)]["milliseconds"] = {
            name: in_milliseconds(repeat[place] for repeat in timings.seconds[name] for place in places)
            for name in main
        }
        figures[str(length)]["nfe"] = {
            name: fmean(systems.translate_in_batches(system.count_evaluations, sample["sources"], BATCH))
            for name, system in main.items()
            if system.count_evaluations is not None
        }
        if previous is not None:
            before = figures[previous]
            figures[str(length)]["token_growth"] = tokens / before["tokens"]
            figures[str(length)]["growth"] = {
                name: times["median"] / before["milliseconds"][name]["median"]
                for name, times in figures[str(length)]["milliseconds"].items()
            }
        previous = str(length)
    return figures


def _count(sample: dict[str, Any]) -> int:
    return len(sample["sources"])


def is_main(system: System) -> bool:
    """Exclude budgets and decoding options except in ONNX int8, and CTranslate2 in fp32."""
    if system.role == systems.MODEL and not system.search.startswith(("tol ", "one evaluation")):
        return system.runtime == "ONNX int8"
    return system.runtime != "CTranslate2 fp32"


def solver_overhead(model: DeqNarForConditionalGeneration, sources: list[list[int]]) -> dict[str, float] | None:
    """Seconds of decoding in torch, one sentence at a time, and the share of the solver; None for stacked models."""
    if not model.config.seeks_equilibrium:
        return None
    translate = systems.model_translate(model, {})
    for source in sources[:WARM_UP]:
        translate([source])
    with timed_parts(model.model) as seconds:
        start = time.perf_counter()
        for source in sources:
            translate([source])
        decoding = time.perf_counter() - start
    overhead = seconds["solving"] - seconds["transition"]
    return {
        "decoding_seconds": decoding,
        "solving_seconds": seconds["solving"],
        "transition_seconds": seconds["transition"],
        "share_of_decoding": overhead / decoding,
        "share_of_solving": overhead / seconds["solving"],
    }


@contextmanager
def timed_parts(core: DeqNarModel) -> Iterator[dict[str, float]]:
    """Measure the seconds in `solve` and, within it, in the transition."""
    seconds = {"solving": 0.0, "transition": 0.0}

    def timed(part: str, function: Callable) -> Callable:
        def run(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds[part] += time.perf_counter() - start

        return run

    places = [(core, "solve", "solving"), (core.transition, "features", "transition")]
    places.append((core.transition, "next_state", "transition"))
    for owner, name, part in places:
        setattr(owner, name, timed(part, getattr(owner, name)))  # shadows the method of the class
    try:
        yield seconds
    finally:
        for owner, name, _ in places:
            delattr(owner, name)


def table(figures: dict) -> str:
    parts = [f"{figures['machine']}\n{figures['settings']}", system_table(figures["results"])]
    if figures["lengths"]:
        parts.append(length_table(figures["lengths"]))
    found = figures["solver_overhead"]
    if found is not None:
        parts.append(
            f"Solver overhead of the model in torch: {found['share_of_decoding']:.1%} of decoding is in the solver, "
            f"outside the transition ({found['share_of_solving']:.1%} of solving)."
        )
    return "\n\n".join(parts)


def system_table(results: dict[str, dict]) -> str:
    compared_with = list(next(iter(results.values()))["speed_to"])
    rows = [
        [
            one["system"],
            one["runtime"],
            one["search"],
            f"{one['milliseconds']['median']:.2f}",
            f"{one['milliseconds']['p95']:.2f}",
            *systems.quality_cells(one),
            f"{one['nfe']:.1f}" if "nfe" in one else "",
            *(f"{one['speed_to'][title]:.2f}×" for title in compared_with),
        ]
        for one in results.values()
    ]
    headers = ["system", "runtime", "search", "ms", "p95", *systems.QUALITY_HEADERS, "NFE"]
    return markdown_table([*headers, *(f"speed to {title}" for title in compared_with)], rows)


def length_table(lengths: dict[str, dict]) -> str:
    """A column of milliseconds for every length and, between two lengths, their ratio."""
    headers, tokens, joined = ["ms by source tokens"], ["source tokens, mean"], ["sources joined of several"]
    names = list(next(iter(lengths.values()))["milliseconds"])
    solved = [name for name in next(iter(lengths.values()))["nfe"] if "max_nfe" not in name]
    rows: dict[str, list[object]] = {name: [name] for name in names}
    evaluations: dict[str, list[object]] = {name: [f"evaluations of {name}"] for name in solved}
    for length, figures in lengths.items():
        if "growth" in figures:
            headers.append("growth")
            tokens.append(f"{figures['token_growth']:.2f}×")
            joined.append("")
            for name in names:
                rows[name].append(f"{figures['growth'][name]:.2f}×")
            for row in evaluations.values():
                row.append("")
        headers.append(length)
        tokens.append(f"{figures['tokens']:.1f}")
        joined.append(f"{figures['joined']} of {figures['sentences']}")
        for name in names:
            rows[name].append(f"{figures['milliseconds'][name]['median']:.2f}")
        for name, row in evaluations.items():
            row.append(f"{figures['nfe'][name]:.1f}")
    return markdown_table(headers, [tokens, joined, *rows.values(), *evaluations.values()])

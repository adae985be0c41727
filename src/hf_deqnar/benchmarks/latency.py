"""One sentence at a time: how long a translation takes, ours and an autoregressive teacher's, with BLEU beside it.

Real sentences, spread over a test set; with every sentence all contenders take turns, in one process. The clock runs
from token ids to token ids: texts become tokens before it, and tokens texts after it, for all alike. Median and 95th
percentile are over all sentences and repeats. BLEU is of the whole test set (or --bleu_sentences of it), translated
once by every contender in batches, untimed. The speed against a row of the teacher is the ratio of the medians.

A second table is by length of the source (in tokens, of which the end of the sentence is one): sentences of nearly that
length, several joined where there are too few, with the evaluations that ours takes there. A line tells how much of
decoding in torch is spent in the solver, outside the transition.
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
from . import contenders
from .common import Turns, in_milliseconds, machine, markdown_table, take_turns
from .contenders import TEACHER, Comparison, Contender
from .options import LatencyOptions

BATCH = 32  # of what is not timed
WARM_UP = 3  # sentences of every contender before the clock starts
# What ours is compared with: rows of the teacher, and what the table calls them.
MEASURES = {
    (TEACHER, "transformers", "greedy"): "transformers greedy",
    (TEACHER, "transformers", "beam 5"): "transformers beam 5",
    (TEACHER, "CTranslate2 int8", "greedy"): "CTranslate2 int8 greedy",
    (TEACHER, "CTranslate2 int8", "beam 5"): "CTranslate2 int8 beam 5",
}


def measure(options: LatencyOptions) -> dict:
    with contenders.compared(options) as comparison:
        if (options.bleu_sentences or 0) > len(comparison.pairs):
            raise ValueError(
                f"{options.data} has {len(comparison.pairs)} sentences, which is less than --bleu_sentences "
                f"{options.bleu_sentences}."
            )
        scored = evenly_spaced(comparison.pairs, options.bleu_sentences)
        timed = [comparison.sources[place] for place in evenly_spaced(comparison.pairs, options.sentences)]
        samples = samples_by_length(comparison, options.lengths, options.sentences_per_length)
        results = {
            name: describe(contender, comparison, scored, timed)
            for name, contender in tqdm(comparison.contenders.items(), desc="scoring", disable=None)
        }
        add_times(results, time_alone(comparison.contenders, timed, options.repeats), comparison)
        return {
            "machine": machine(options.threads, *contenders.packages_of(options)),
            "settings": {**comparison.describe(options), "bleu_sentences": len(scored)},
            "results": results,
            "lengths": measure_by_length(comparison.contenders, samples, options.repeats),
            "solver_overhead": solver_overhead(comparison.model, timed),
        }


def describe(contender: Contender, comparison: Comparison, scored: list[int], timed: list[list[int]]) -> dict[str, Any]:
    """Who it is, its BLEU, and how many evaluations the sentences take that will be timed."""
    sources, pairs = ([items[place] for place in scored] for items in (comparison.sources, comparison.pairs))
    found = contenders.translate_in_batches(contender.translate, sources, BATCH)
    figures = {"system": contender.system, "runtime": contender.runtime, "search": contender.search}
    figures |= contenders.score(found, pairs, comparison.tokenizer)
    if contender.count_evaluations is not None:
        counts = contenders.translate_in_batches(contender.count_evaluations, timed, BATCH)
        figures["nfe"] = sum(counts) / len(counts)
    return figures


def time_alone(chosen: dict[str, Contender], sources: list[list[int]], repeats: int) -> Turns:
    """Every source is a batch of its own."""
    runs = {name: contender.translate for name, contender in chosen.items()}
    return take_turns(runs, [[source] for source in sources], repeats, WARM_UP)


def add_times(results: dict[str, dict], turns: Turns, comparison: Comparison) -> None:
    """What the turns tell of each contender, and how it compares with the teacher's."""
    for name, figures in results.items():
        every = [seconds for repeat in turns.seconds[name] for seconds in repeat]
        written = [tokens for answer in turns.answers[name] for tokens in answer]
        figures["milliseconds"] = in_milliseconds(every)
        figures["target_tokens"] = contenders.count_tokens(written, comparison.tokenizer) / len(written)
        figures["every_millisecond"] = [[round(1000 * one, 4) for one in repeat] for repeat in turns.seconds[name]]
    rows = {(one["system"], one["runtime"], one["search"]): one["milliseconds"]["median"] for one in results.values()}
    for figures in results.values():
        figures["speed_to"] = {
            title: rows[row] / figures["milliseconds"]["median"] for row, title in MEASURES.items() if row in rows
        }


def samples_by_length(comparison: Comparison, lengths: list[int], count: int) -> dict[int, dict[str, Any]]:
    """For every length, sources of nearly that many tokens."""
    if lengths and lengths[-1] > comparison.longest:
        raise ValueError(
            f"--lengths {lengths[-1]} is more than the {comparison.longest} tokens that every contender can read; "
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
    """`count` sources within a tenth of a length, spread over the data: sentences as they are; if those are too few,
    neighbours joined; if even those are, whatever is nearest."""

    def distance(candidate: tuple[list[int], bool]) -> int:
        return abs(len(candidate[0]) - length)

    slack = max(1, length // 10)
    whole, several = [(source, False) for source in sources], []
    if sum(distance(candidate) <= slack for candidate in whole) < count:
        several = [(tokenize(text), True) for text in joined_texts(length, texts, sources)]
    chosen = []
    for candidates in (whole, several):
        fitting = [candidate for candidate in candidates if distance(candidate) <= slack]
        chosen += [fitting[place] for place in evenly_spaced(fitting, count - len(chosen))]
    if len(chosen) < count:  # then all that fit are among them
        others = [candidate for candidate in whole + several if distance(candidate) > slack]
        chosen += sorted(others, key=distance)[: count - len(chosen)]
    return {"sources": [source for source, _ in chosen], "joined": sum(is_joined for _, is_joined in chosen)}


def joined_texts(length: int, texts: list[str], sources: list[list[int]]) -> list[str]:
    """From every sentence on, as many of its followers as stay within a length; the first one follows the last."""
    joined = []
    for first in range(len(texts)):
        pieces, tokens = [texts[first]], len(sources[first])
        for step in range(1, len(texts)):
            place = (first + step) % len(texts)
            tokens += len(sources[place]) - 1  # one end of sentence less
            if tokens > length:
                break
            pieces.append(texts[place])
        if len(pieces) > 1:
            joined.append(" ".join(pieces))
    return joined


def measure_by_length(
    chosen: dict[str, Contender], samples: dict[int, dict[str, Any]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Times of the main contenders at every length, and how they grow from one to the next."""
    main = {name: contender for name, contender in chosen.items() if is_main(contender)}
    # Lengths take turns, too.
    order = [(length, place) for place in range(max(map(_count, samples.values()), default=0)) for length in samples]
    order = [(length, place) for length, place in order if place < _count(samples[length])]
    turns = time_alone(main, [samples[length]["sources"][place] for length, place in order], repeats)
    figures: dict[str, dict[str, Any]] = {}
    previous = None
    for length, sample in samples.items():
        places = [number for number, (of, _) in enumerate(order) if of == length]
        tokens = sum(map(len, sample["sources"])) / _count(sample)
        figures[str(length)] = {"tokens": tokens, "sentences": _count(sample), "joined": sample["joined"]}
        figures[str(length)]["milliseconds"] = {
            name: in_milliseconds(repeat[place] for repeat in turns.seconds[name] for place in places) for name in main
        }
        figures[str(length)]["nfe"] = {
            name: fmean(contenders.translate_in_batches(contender.count_evaluations, sample["sources"], BATCH))
            for name, contender in main.items()
            if contender.count_evaluations is not None
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


def is_main(contender: Contender) -> bool:
    """Budgets and other ways only of our fastest runtime, and of CTranslate2 the faster arithmetic."""
    if contender.system == contenders.OURS and not contender.search.startswith(("tol ", "one evaluation")):
        return contender.runtime == "ONNX int8"
    return contender.runtime != "CTranslate2 fp32"


def solver_overhead(model: DeqNarForConditionalGeneration, sources: list[list[int]]) -> dict[str, float] | None:
    """Seconds of decoding in torch, one sentence at a time, and the shares of it; None if nothing is solved."""
    if not model.config.seeks_equilibrium:
        return None
    translate = contenders.our_translate(model, {})
    for source in sources[:WARM_UP]:
        translate([source])
    with watched(model.model) as seconds:
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
def watched(core: DeqNarModel) -> Iterator[dict[str, float]]:
    """Counts the seconds in `solve` and, within it, in the transition."""
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
        setattr(owner, name, timed(part, getattr(owner, name)))  # stands before the method of the class
    try:
        yield seconds
    finally:
        for owner, name, _ in places:
            delattr(owner, name)


def table(figures: dict) -> str:
    parts = [f"{figures['machine']}\n{figures['settings']}", contender_table(figures["results"])]
    if figures["lengths"]:
        parts.append(length_table(figures["lengths"]))
    found = figures["solver_overhead"]
    if found is not None:
        parts.append(
            f"Solver overhead of ours in torch: {found['share_of_decoding']:.1%} of decoding is in the solver and not "
            f"in the transition ({found['share_of_solving']:.1%} of solving)."
        )
    return "\n\n".join(parts)


def contender_table(results: dict[str, dict]) -> str:
    compared_with = list(next(iter(results.values()))["speed_to"])
    rows = [
        [
            one["system"],
            one["runtime"],
            one["search"],
            f"{one['milliseconds']['median']:.2f}",
            f"{one['milliseconds']['p95']:.2f}",
            f"{one['bleu']:.2f}",
            f"{one['nfe']:.1f}" if "nfe" in one else "",
            *(f"{one['speed_to'][title]:.2f}×" for title in compared_with),
        ]
        for one in results.values()
    ]
    headers = ["system", "runtime", "search", "ms", "p95", "BLEU", "NFE"]
    return markdown_table([*headers, *(f"speed to {title}" for title in compared_with)], rows)


def length_table(lengths: dict[str, dict]) -> str:
    """A column of milliseconds for every length and, between two, how many times more it is."""
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

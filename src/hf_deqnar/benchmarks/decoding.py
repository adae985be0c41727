"""Evaluations, time and BLEU of one model with different decoding options.

An entry of --ways is options of `generate`, such as tol=0.03 or solver=picard,max_nfe=4, or the configuration fields
`memory` and `damping` of the solver. Sentences are translated one by one in one process, with all options interleaved;
the first row has the default options of the model. BLEU and evaluations are of the complete data, translated once in
batches, untimed. Times are given as ratios of the medians to the first row.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from ..data.parallel_text import evenly_spaced, read_parallel
from ..evaluation.metrics import metrics
from ..export.runtime import DeqNarOnnxModel
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.text import clean_text, longest_source
from . import systems
from .common import in_milliseconds, machine, markdown_table, read_options, time_interleaved
from .options import DecodingOptions

DEFAULT = "default"
CONFIGURATION_FIELDS = ("memory", "damping")  # options of the solver that `generate` does not accept
BATCH = 32  # of untimed translations
WARM_UP = 3  # untimed sentences before the timed ones


def measure(options: DecodingOptions) -> dict:
    ways = check(options)
    pairs = [pair for pair in read_parallel(options.data, options.source, options.target) if clean_text(pair.source)]
    if len(pairs) < options.sentences:
        raise ValueError(
            f"{options.data} has {len(pairs)} sentences, which is less than --sentences {options.sentences}."
        )
    model, tokenizer = options.load(options.model, "cpu", threads=options.threads)
    if not getattr(model.config, "seeks_equilibrium", False):
        raise ValueError(f"--model {options.model} is a stacked model; name an equilibrium model.")
    if not isinstance(model, DeqNarOnnxModel):
        model = model.float()
    sources, _ = systems.as_tokens([pair.source for pair in pairs], tokenizer, longest_source(model.config))
    results: dict[str, dict[str, Any]] = {}
    for name, settings in tqdm(ways.items(), desc="scoring", disable=None):
        found = systems.translate_in_batches(with_settings(model, settings, systems.model_translate), sources, BATCH)
        count = with_settings(model, settings, systems.model_evaluations)
        evaluations = systems.translate_in_batches(count, sources, BATCH)
        results[name] = systems.score(found, pairs, tokenizer) | {"nfe": sum(evaluations) / len(evaluations)}
    runs = {name: with_settings(model, settings, systems.model_translate) for name, settings in ways.items()}
    timed = [[sources[place]] for place in evenly_spaced(pairs, options.sentences)]
    timings = time_interleaved(runs, timed, options.repeats, WARM_UP)
    for name, figures in results.items():
        figures["milliseconds"] = in_milliseconds(seconds for repeat in timings.seconds[name] for seconds in repeat)
        figures["time_ratio"] = figures["milliseconds"]["median"] / results[DEFAULT]["milliseconds"]["median"]
    names = ("model", "data", "source", "target", "sentences", "repeats")
    return {
        "machine": machine(options.threads),
        "settings": {name: getattr(options, name) for name in names} | default_settings(model),
        "results": results,
    }


def check(options: DecodingOptions) -> dict[str, dict[str, Any]]:
    """The decoding options by name, checked before anything is loaded."""
    if len(set(options.ways)) < len(options.ways):
        raise ValueError("--ways contains a duplicate; every entry is one row.")
    metrics()  # raises ImportError with the package to install
    return {DEFAULT: {}} | {way: read_options(way) for way in options.ways}


def default_settings(model: DeqNarForConditionalGeneration | DeqNarOnnxModel) -> dict[str, Any]:
    """The default decoding options of the model."""
    names = ("solver", "max_nfe", "tol", "memory", "damping")
    chosen = {name: getattr(model.generation_config, name, None) for name in names}
    return {name: getattr(model.config, name) if value is None else value for name, value in chosen.items()}


def with_settings(
    model: DeqNarForConditionalGeneration | DeqNarOnnxModel,
    settings: dict[str, Any],
    make: Callable[[Any, dict[str, Any]], Callable],
) -> Callable:
    """`make` with these options of `generate`; the configuration is changed during each call."""
    run = make(model, {name: value for name, value in settings.items() if name not in CONFIGURATION_FIELDS})
    solver = {name: value for name, value in settings.items() if name in CONFIGURATION_FIELDS}

    def decode(batch: list[list[int]]) -> list:
        with configured(model, solver):
            return run(batch)

    return decode


@contextmanager
def configured(model: DeqNarForConditionalGeneration | DeqNarOnnxModel, settings: dict[str, Any]) -> Iterator[None]:
    previous = {name: getattr(model.config, name) for name in settings}
    for name, value in settings.items():
        setattr(model.config, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            setattr(model.config, name, value)


def table(figures: dict) -> str:
    rows = [
        [
            name,
            f"{one['nfe']:.2f}",
            *systems.quality_cells(one),
            f"{one['milliseconds']['median']:.2f}",
            f"{one['milliseconds']['p95']:.2f}",
            f"{one['time_ratio']:.2f}",
        ]
        for name, one in figures["results"].items()
    ]
    head = f"{figures['machine']}\n{figures['settings']}"
    return f"{head}\n\n{markdown_table(['way', 'NFE', *systems.QUALITY_HEADERS, 'ms', 'p95', 'time'], rows)}"

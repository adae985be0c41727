"""Ways to decode with one model: what each saves in evaluations and time, and what it costs in BLEU.

A way is options of `generate`, such as tol=0.03 or solver=picard,max_nfe=4; `memory` and `damping` of the solver, which
are the model's, are taken, too. With every sentence all ways take turns, alone, in one process; the first way is how
the model decodes if nothing is asked for. BLEU and evaluations are of the whole data, translated once in batches,
untimed. The time is told as the ratio of the medians to the first.
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
from . import contenders
from .common import in_milliseconds, machine, markdown_table, read_options, take_turns
from .options import DecodingOptions

OWN = "as it is"
OF_THE_MODEL = ("memory", "damping")  # options of its solver that `generate` does not take
BATCH = 32  # of what is not timed
WARM_UP = 3  # sentences before the clock starts


def measure(options: DecodingOptions) -> dict:
    ways = check(options)
    pairs = [pair for pair in read_parallel(options.data, options.source, options.target) if clean_text(pair.source)]
    if len(pairs) < options.sentences:
        raise ValueError(
            f"{options.data} has {len(pairs)} sentences, which is less than --sentences {options.sentences}."
        )
    model, tokenizer = options.load(options.model, "cpu", threads=options.threads)
    if not getattr(model.config, "seeks_equilibrium", False):
        raise ValueError(f"--model {options.model} solves nothing; name a model that seeks an equilibrium.")
    if not isinstance(model, DeqNarOnnxModel):
        model = model.float()
    sources, _ = contenders.as_tokens([pair.source for pair in pairs], tokenizer, longest_source(model.config))
    results: dict[str, dict[str, Any]] = {}
    for name, settings in tqdm(ways.items(), desc="scoring", disable=None):
        found = contenders.translate_in_batches(in_its_way(model, settings, contenders.our_translate), sources, BATCH)
        count = in_its_way(model, settings, contenders.our_evaluations)
        evaluations = contenders.translate_in_batches(count, sources, BATCH)
        results[name] = contenders.score(found, pairs, tokenizer) | {"nfe": sum(evaluations) / len(evaluations)}
    runs = {name: in_its_way(model, settings, contenders.our_translate) for name, settings in ways.items()}
    timed = [[sources[place]] for place in evenly_spaced(pairs, options.sentences)]
    turns = take_turns(runs, timed, options.repeats, WARM_UP)
    for name, figures in results.items():
        figures["milliseconds"] = in_milliseconds(seconds for repeat in turns.seconds[name] for seconds in repeat)
        figures["time_ratio"] = figures["milliseconds"]["median"] / results[OWN]["milliseconds"]["median"]
    names = ("model", "data", "source", "target", "sentences", "repeats")
    return {
        "machine": machine(options.threads),
        "settings": {name: getattr(options, name) for name in names} | own_settings(model),
        "results": results,
    }


def check(options: DecodingOptions) -> dict[str, dict[str, Any]]:
    """The ways by name, after refusing what cannot be measured before anything is loaded."""
    if len(set(options.ways)) < len(options.ways):
        raise ValueError("A way stands twice in --ways; each makes a row of its own.")
    metrics()  # says what to install if scoring is not possible
    return {OWN: {}} | {way: read_options(way) for way in options.ways}


def own_settings(model: DeqNarForConditionalGeneration | DeqNarOnnxModel) -> dict[str, Any]:
    """How the model decodes if nothing is asked for."""
    names = ("solver", "max_nfe", "tol", "memory", "damping")
    chosen = {name: getattr(model.generation_config, name, None) for name in names}
    return {name: getattr(model.config, name) if value is None else value for name, value in chosen.items()}


def in_its_way(
    model: DeqNarForConditionalGeneration | DeqNarOnnxModel,
    settings: dict[str, Any],
    make: Callable[[Any, dict[str, Any]], Callable],
) -> Callable:
    """What `make` gives for these options of `generate`, with those of the solver set while it runs."""
    run = make(model, {name: value for name, value in settings.items() if name not in OF_THE_MODEL})
    solver = {name: value for name, value in settings.items() if name in OF_THE_MODEL}

    def decode(batch: list[list[int]]) -> list:
        with configured(model, solver):
            return run(batch)

    return decode


@contextmanager
def configured(model: DeqNarForConditionalGeneration | DeqNarOnnxModel, settings: dict[str, Any]) -> Iterator[None]:
    own = {name: getattr(model.config, name) for name in settings}
    for name, value in settings.items():
        setattr(model.config, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            setattr(model.config, name, value)


def table(figures: dict) -> str:
    rows = [
        [
            name,
            f"{one['nfe']:.2f}",
            f"{one['bleu']:.2f}",
            f"{one['milliseconds']['median']:.2f}",
            f"{one['milliseconds']['p95']:.2f}",
            f"{one['time_ratio']:.2f}",
        ]
        for name, one in figures["results"].items()
    ]
    head = f"{figures['machine']}\n{figures['settings']}"
    return f"{head}\n\n{markdown_table(['way', 'NFE', 'BLEU', 'ms', 'p95', 'time'], rows)}"

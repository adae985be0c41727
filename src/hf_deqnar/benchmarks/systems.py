"""Systems compared by `bench latency` and `bench throughput`, and the sentences they translate.

    model      eager torch, exported to ONNX in fp32 and int8; at its own tolerance, and at several budgets
    teacher    transformers' `generate` (with its key-value cache), CTranslate2 in fp32 and int8; greedy, beam 5
    baseline   CTranslate2 in fp32 and int8; greedy, beam 5
    student    Marian in int8, with and without shortlist; greedy, beam 5

A system maps token ids to token ids. All systems receive identical token ids: they share one tokenizer, and neither
tokenization nor detokenization is timed.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.parallel_text import Pair, evenly_spaced, read_parallel
from ..distillation.teachers import Teacher, TeacherOptions, Translate, make_translate
from ..evaluation.metrics import corpus_scores, metrics
from ..export.graphs import check_exportable, check_packages, export_model
from ..export.manifest import PRECISIONS
from ..export.parity import LEAST_AGREEMENT, agreement
from ..export.runtime import DeqNarOnnxModel, import_onnxruntime
from ..models.deqnar.configuration_deqnar import DeqNarConfig, is_deqnar
from ..models.deqnar.generation_config_deqnar import Options
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.reranking import check_same_tokens
from ..models.deqnar.text import clean_text, longest_source
from .common import read_options
from .marian import check_pymarian, load_translator
from .options import BUDGETS, RUNTIMES, ComparisonOptions

MODEL, TEACHER, BASELINE, STUDENT = "model", "teacher", "baseline", "student"
SEARCHES = {"greedy": 1, "beam 5": 5}
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}  # names of the precisions in CTranslate2
COMPARED = 20  # sentences on which an export is compared with its model

# Name of a model → the model and its tokenizer; `hf_deqnar.cli.loading.load_model` on the command line.
Load = Callable[..., tuple[PreTrainedModel, PreTrainedTokenizerBase]]


@dataclass
class System:
    """A model with its runtime and search options."""

    role: str  # model, teacher, baseline or student
    runtime: str
    search: str  # tolerance or budget of the model; greedy or beam search of the others
    translate: Translate
    count_evaluations: Callable[[list[list[int]]], list[int]] | None = None  # of the model only

    @property
    def name(self) -> str:
        return f"{self.role}, {self.runtime}, {self.search}"


@dataclass
class Comparison:
    """The loaded systems and sentences."""

    systems: dict[str, System]
    model: DeqNarForConditionalGeneration
    tokenizer: PreTrainedTokenizerBase
    pairs: list[Pair]
    sources: list[list[int]]  # token ids of every pair's source
    longest: int  # maximum source tokens that every system supports
    cut: int  # number of truncated sources

    def describe(self, options: ComparisonOptions) -> dict[str, Any]:
        """Settings of the comparison, for the report."""
        names = ("model", "teacher", "baseline", "data", "source", "target", "sentences", "repeats", "without")
        own = self.model.generation_config
        changed = [option.name for option in fields(Options) if getattr(own, option.name) != option.default]
        return {
            **{name: getattr(options, name) for name in names},
            "marian": None if options.marian is None else str(options.marian),
            "export": None if options.export is None else str(options.export),
            "cut_sources": self.cut,
            "generation_config": {name: str(getattr(own, name)) for name in changed},
        }


def check(options: ComparisonOptions) -> None:
    """Raise ValueError for invalid options, before anything is loaded."""
    if options.budgets and min(options.budgets) < 1:
        raise ValueError(f"--budgets {min(options.budgets)}: a solve needs at least one evaluation.")
    if options.budgets and len(set(options.budgets)) < len(options.budgets):
        raise ValueError("--budgets contains a duplicate; every budget is one row.")
    if len(set(options.ways)) < len(options.ways):
        raise ValueError("--ways contains a duplicate; every entry is one row.")
    if "onnx" in options.without and options.export is not None:
        raise ValueError("--export has no effect with --without onnx; leave out one of them.")
    if "ctranslate2" in options.without and options.baseline is not None:
        raise ValueError("--baseline runs in CTranslate2, which --without excludes; leave out one of them.")
    metrics()  # raises ImportError with the package to install
    if options.marian is not None:
        check_pymarian()
    if "onnx" not in options.without:
        (check_packages if options.export is None else import_onnxruntime)()
    if "ctranslate2" not in options.without and find_spec("ctranslate2") is None:
        raise ImportError(
            "The comparison with CTranslate2 needs ctranslate2: pip install 'hf_deqnar[ctranslate2]', or leave it out "
            "with --without ctranslate2."
        )


@contextmanager
def compared(options: ComparisonOptions) -> Iterator[Comparison]:
    """Context manager: the systems, loaded by `options.load`, converted and checked to be comparable."""
    check(options)
    load = options.load
    pairs = [
        pair for pair in read_parallel(options.data, options.source, options.target) if clean_text(pair.source)
    ]  # empty sentences are skipped
    if len(pairs) < options.sentences:
        raise ValueError(
            f"{options.data} has {len(pairs)} sentences, which is less than --sentences {options.sentences}."
        )
    torch.set_num_threads(options.threads)  # CTranslate2 uses the same number
    model, tokenizer = load(options.model, "cpu", runtime="torch")
    if not is_deqnar(model.config):
        raise ValueError(
            f"--model {options.model} is of type {model.config.model_type}, not deqnar; name a deqnar model."
        )
    budgets = check_budgets(options.budgets, model.config)
    ways = {f"max_nfe {budget}": {"max_nfe": budget} for budget in budgets}
    ways |= {way: read_options(way) for way in options.ways}
    teachers = {TEACHER: load_teacher(options.teacher, load, tokenizer, pairs)}
    if options.baseline is not None:
        teachers[BASELINE] = load_teacher(options.baseline, load, tokenizer, pairs)
    limits = [longest_source(one.config) for one in (model, *(teacher.model for teacher in teachers.values()))]
    longest = min(limit for limit in limits if limit is not None)
    sources, cut = as_tokens([pair.source for pair in pairs], tokenizer, longest)
    with tempfile.TemporaryDirectory() as folder:
        systems = model_systems(model.float(), "torch fp32", ways)
        if "onnx" not in options.without:
            exports = load_exports(model, tokenizer, options, Path(folder))
            check_same_model(
                model, exports["fp32"], options.export, [sources[place] for place in evenly_spaced(pairs, COMPARED)]
            )
            for precision, export in exports.items():
                systems += model_systems(export, f"ONNX {precision}", ways)
        systems += transformers_systems(teachers[TEACHER])
        if "ctranslate2" not in options.without:
            for role, teacher in teachers.items():
                systems += ctranslate2_systems(role, teacher, Path(folder) / role)
        if options.marian is not None:
            systems += marian_systems(options.marian, tokenizer, options.threads)
        named = {system.name: system for system in systems}
        yield Comparison(named, model, tokenizer, pairs, sources, longest, cut)


def packages_of(options: ComparisonOptions) -> list[str]:
    """Packages besides torch and transformers whose versions are reported."""
    return [{"onnx": "onnxruntime"}.get(group, group) for group in RUNTIMES if group not in options.without]


def check_budgets(budgets: list[int] | None, config: DeqNarConfig) -> list[int]:
    if config.seeks_equilibrium:
        return BUDGETS if budgets is None else budgets
    if budgets:
        raise ValueError(
            f"--budgets {' '.join(map(str, budgets))} has no effect on a stacked model, which is evaluated once; "
            "leave it out."
        )
    return []


def load_teacher(name: str, load: Load, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair]) -> Teacher:
    """An autoregressive model with the same tokenizer as the deqnar model."""
    model, its_tokenizer = load(name, "cpu", runtime="torch")
    if is_deqnar(model.config):
        raise ValueError(f"{name} is a deqnar model; --teacher and --baseline must be autoregressive.")
    check_same_tokens(tokenizer, its_tokenizer, name)
    for pair in pairs:
        text = clean_text(pair.source)
        if tokenizer(text)["input_ids"] != its_tokenizer(text)["input_ids"]:
            raise ValueError(
                f"The tokenizer of {name} splits '{text}' differently from the model's; both must be the same."
            )
    model.generation_config.use_cache = True
    return Teacher(name, model.float(), tokenizer)


def load_exports(
    model: DeqNarForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    options: ComparisonOptions,
    folder: Path,
) -> dict[str, DeqNarOnnxModel]:
    """Exports by precision, from --export or newly exported."""
    check_exportable(model.config)
    given = options.export
    if given is None:
        given = folder / "export"
        export_model(model, tokenizer, given)
    return {name: DeqNarOnnxModel.from_pretrained(given / name, threads=options.threads) for name in PRECISIONS}


def check_same_model(
    model: DeqNarForConditionalGeneration, export: DeqNarOnnxModel, folder: Path | None, sources: list[list[int]]
) -> None:
    """Check that the export belongs to the model."""
    found = []
    for candidate in (model, export):
        translate = model_translate(candidate, {})
        found.append([translate([source])[0] for source in sources])
    same = agreement(*found).tokens
    if same < LEAST_AGREEMENT:
        raise ValueError(
            f"{folder or 'The export'}: fp32 has only {same:.1%} of its tokens in common with the model; it belongs "
            "to another model or to older weights. Export the model again."
        )


def model_systems(
    model: DeqNarForConditionalGeneration | DeqNarOnnxModel, runtime: str, ways: dict[str, dict[str, Any]]
) -> list[System]:
    """The model with its default options and with each of `ways`."""
    own = model.config.tol if model.generation_config.tol is None else model.generation_config.tol
    every = {"one evaluation" if not model.config.seeks_equilibrium else f"tol {own:g}": {}, **ways}
    every = {way: {"num_return_sequences": 1, **settings} for way, settings in every.items()}
    return [
        System(MODEL, runtime, way, model_translate(model, settings), model_evaluations(model, settings))
        for way, settings in every.items()
    ]


def model_translate(model: DeqNarForConditionalGeneration | DeqNarOnnxModel, settings: dict[str, Any]) -> Translate:
    def translate(batch: list[list[int]]) -> list[list[int]]:
        return model.generate(**padded(batch, model.config.pad_token_id), **settings).tolist()

    return translate


def model_evaluations(
    model: DeqNarForConditionalGeneration | DeqNarOnnxModel, settings: dict[str, Any]
) -> Callable[[list[list[int]]], list[int]]:
    def count(batch: list[list[int]]) -> list[int]:
        inputs = padded(batch, model.config.pad_token_id)
        return model.generate(**inputs, **settings, return_dict_in_generate=True).nfe.tolist()

    return count


def padded(batch: list[list[int]], padding: int) -> dict[str, Tensor]:
    longest = max(map(len, batch))
    tokens = [row + [padding] * (longest - len(row)) for row in batch]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in batch]
    return {"input_ids": torch.tensor(tokens), "attention_mask": torch.tensor(mask)}


def transformers_systems(teacher: Teacher) -> list[System]:
    return [
        System(TEACHER, "transformers", search, make_translate(teacher, TeacherOptions(num_beams=beams), Path()))
        for search, beams in SEARCHES.items()
    ]


def ctranslate2_systems(role: str, teacher: Teacher, folder: Path) -> list[System]:
    """CTranslate2 takes tokens as strings; converting ids is timed (a few hundredths of a millisecond)."""
    folder.mkdir()
    return [
        System(
            role,
            f"CTranslate2 {precision}",
            search,
            make_translate(
                teacher, TeacherOptions(num_beams=beams, backend="ctranslate2", compute_type=compute_type), folder
            ),
        )
        for precision, compute_type in COMPUTE_TYPES.items()
        for search, beams in SEARCHES.items()
    ]


def marian_systems(folder: Path, tokenizer: PreTrainedTokenizerBase, threads: int) -> list[System]:
    """Token ids are passed to Marian as text; converting them is timed (a few hundredths of a millisecond)."""
    return [
        System(
            STUDENT,
            "Marian int8",
            f"{search}{', shortlist' if shortlist else ''}",
            load_translator(folder, tokenizer, threads=threads, num_beams=beams, shortlist=shortlist),
        )
        for search, beams in SEARCHES.items()
        for shortlist in (False, True)
    ]


def as_tokens(texts: list[str], tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[list[list[int]], int]:
    """Token ids of every text, and the number of truncated texts."""
    tokenized = [tokenizer(clean_text(text))["input_ids"] for text in texts]
    cut = [place for place, tokens in enumerate(tokenized) if len(tokens) > longest]
    for place in cut:
        tokenized[place] = tokenizer(clean_text(texts[place]), truncation=True, max_length=longest)["input_ids"]
    return tokenized, len(cut)


def translate_in_batches(translate: Translate, sources: list[list[int]], size: int) -> list[list[int]]:
    """Token ids of all translations in the order of the sources, in batches of similar length."""
    found: list[list[int]] = [[]] * len(sources)
    for places in batches_of_similar_length(sources, size):
        for place, tokens in zip(places, translate([sources[place] for place in places]), strict=True):
            found[place] = tokens
    return found


def batches_of_similar_length(sources: list[list[int]], size: int) -> list[list[int]]:
    """Indices of the sources of every batch."""
    order = sorted(range(len(sources)), key=lambda place: len(sources[place]))
    return [order[first : first + size] for first in range(0, len(order), size)]


def score(found: list[list[int]], pairs: list[Pair], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """BLEU, chrF and length ratio of translations given as token ids."""
    texts = [text.strip() for text in tokenizer.batch_decode(found, skip_special_tokens=True)]
    return corpus_scores(texts, [pair.references for pair in pairs])


QUALITY_HEADERS = ["BLEU", "chrF", "length ratio"]


def quality_cells(figures: dict[str, Any]) -> list[str]:
    """The cells of a table below `QUALITY_HEADERS`."""
    return [f"{figures['bleu']:.2f}", f"{figures['chrf']:.2f}", f"{figures['length_ratio']:.3f}"]


def count_tokens(found: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> int:
    """Number of tokens of translations, without special tokens."""
    special = set(tokenizer.all_special_ids)
    return sum(token not in special for row in found for token in row)

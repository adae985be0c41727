"""The report on what models learned: preparing and measuring them, tables and the plot."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarks.common import markdown_table
from ..data.parallel_text import Pair, read_parallel
from ..evaluation.metrics import score, sentence_bleu
from ..evaluation.mple_report import conditional_total_correlation, measure_losses, pearson, target_loss
from ..evaluation.translation import labelled_batches, translate_sentences
from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.generation_config_deqnar import SEARCH_OPTIONS
from ..models.deqnar.reranking import check_same_tokens
from ..objectives.input_predictor import check_vanilla, fit_input_predictor
from ..objectives.inputs import masked
from ..objectives.objective import Objective, check_objective, parse_objective
from ..utils.files import check_parent, check_writable
from .evaluate import parse_system
from .extras import load_figure
from .loading import load_model
from .report import ReportArguments
from .terminal_tables import print_results

Reader = Callable[[str], list[Pair]]


@dataclass
class Entry:
    """A model of the report, as named on the command line."""

    text: str
    model: str
    objective: str | None = None
    targets: str | None = None
    train: str | None = None
    vanilla: str | None = None
    save: str | None = None


@dataclass
class Subject:
    """A model of the report with everything that its measurement needs."""

    entry: Entry
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    vanilla: PreTrainedModel | None
    training: list[Pair] | None  # pairs to fit its input predictor on, if it has none
    targets: list[str]
    references: list[list[str]]  # that the proxy targets are compared with


def report(options: ReportArguments) -> None:
    """Measure the models, print the tables, and write the figures and the plot."""
    for path in (options.json, options.plot):
        check_writable(path)
    entries = [parse_entry(text) for text in options.model]
    if options.plot is not None:
        load_figure()
    read = cache(lambda path: read_parallel(path, options.source, options.target))
    pairs = read(options.data)[: options.limit]
    subjects = [prepare(entry, options, pairs, read) for entry in entries]
    figures: dict[str, Any] = {
        "data": options.data,
        "sentences": len(pairs),
        "references": sum(len(pair.references) for pair in pairs) / len(pairs),
        "beta": options.beta,
        "samples": options.samples,
        "seed": options.seed,
    }
    if options.total_correlation is not None:
        figures["total_correlation"] = correlate(options, pairs)
    if subjects:
        figures["models"] = {subject.entry.text: measure(subject, options, pairs) for subject in subjects}
        found = figures["models"].values()
        figures["pearson"] = {
            name: pearson([one["mple"] for one in found], [one[name] for one in found])
            for name in ("bleu", "sampled_bleu")
        }
    print_results(tables(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(figures, options.plot)


def parse_entry(text: str) -> Entry:
    """'model,objective=glat' → Entry('model,objective=glat', 'model', 'glat')."""
    name, settings = parse_system(text)
    known = [field.name for field in fields(Entry)][2:]
    for key in settings:
        if key not in known:
            raise ValueError(f"'{key}' in '{text}' is not an option of a report's model; use {', '.join(known)}.")
    entry = Entry(text, name, **{key: str(value) for key, value in settings.items()})
    check_parent(None if entry.save is None else Path(entry.save))
    return entry


def prepare(entry: Entry, options: ReportArguments, pairs: list[Pair], read: Reader) -> Subject:
    """Load what the figures of a model need; an error if they cannot be measured."""
    targets, references = proxy_targets(entry, options, pairs, read)
    model, tokenizer = load_deqnar(entry.model, options.device)
    name = entry.objective or model.config.objective
    if name is None:
        raise ValueError(f"{entry.model} has no objective in its config; name it, as in {entry.model},objective=ce.")
    objective = parse_objective(name)
    check_objective(objective, model.config)
    training = None
    if objective.input is not masked and model.model.input_head is None:
        file = entry.train or options.train_data
        if file is None:
            raise ValueError(
                f"{entry.model} has no input predictor, which objective '{name}' needs; give --train_data to fit one."
            )
        training = read(file)[: options.fit_sentences]
    vanilla = None
    if entry.vanilla is not None:
        vanilla, its_tokenizer = load_deqnar(entry.vanilla, options.device)
        check_same_tokens(tokenizer, its_tokenizer, entry.vanilla)
        check_vanilla(model.config, vanilla.config)
    return Subject(entry, model, tokenizer, objective, vanilla, training, targets, references)


def proxy_targets(
    entry: Entry, options: ReportArguments, pairs: list[Pair], read: Reader
) -> tuple[list[str], list[list[str]]]:
    """The proxy target of every sentence, and the references that it is compared with.

    A target that is a reference itself is compared with the other references, if there are any: L_target measures the
    distance to another draw from the data.
    """
    if entry.targets is None:
        return [pair.references[0] for pair in pairs], [pair.references[1:] or pair.references for pair in pairs]
    others = read(entry.targets)[: options.limit]
    if len(others) != len(pairs):
        raise ValueError(
            f"{entry.targets} has {len(others):,} targets but {options.data} has {len(pairs):,} sentences; "
            "there must be one for each."
        )
    for number, (pair, other) in enumerate(zip(pairs, others, strict=True), start=1):
        if pair.source != other.source:
            raise ValueError(f"{entry.targets}, pair {number}: its source differs from that in {options.data}.")
    return [pair.references[0] for pair in others], [pair.references for pair in pairs]


def load_deqnar(name: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_model(name, device, runtime="torch")
    if not is_deqnar(model.config):
        raise ValueError(f"{name} is of type {model.config.model_type}, not deqnar; only deqnar models are reported.")
    return model, tokenizer


def measure(subject: Subject, options: ReportArguments, pairs: list[Pair]) -> dict[str, Any]:
    """All figures of one model."""
    model, tokenizer, objective = subject.model, subject.tokenizer, subject.objective
    figures: dict[str, Any] = {"objective": objective.name}
    if subject.training is not None:
        examples = [(pair.source, pair.references[0]) for pair in subject.training]
        batches, _ = labelled_batches(model, tokenizer, examples, options.batch_size)
        fit = fit_input_predictor(model, objective, batches, steps=options.fit_steps, seed=options.seed)
        figures["fit"] = {"sentences": len(examples), **asdict(fit)}
    if subject.entry.save is not None:
        model.save_pretrained(subject.entry.save)
        tokenizer.save_pretrained(subject.entry.save)
    sources = [pair.source for pair in pairs]
    examples = list(zip(sources, subject.targets, strict=True))
    batches, order = labelled_batches(model, tokenizer, examples, options.batch_size)
    losses = measure_losses(
        model, objective, batches, vanilla=subject.vanilla, draws=options.samples, seed=options.seed
    )
    texts = tokenizer.batch_decode(losses.targets, skip_special_tokens=True)
    similarities = sentence_bleu([text.strip() for text in texts], [subject.references[index] for index in order])
    target = target_loss(similarities, options.beta)
    figures |= {"nat": losses.nat, "input": losses.input, "target": target}
    figures |= {"mple": losses.nat + losses.input + target, "tokens": losses.tokens, "left_out": losses.dropped}

    def bleu(**decoding: Any) -> float:
        plain = {"refinement_passes": 1, **dict.fromkeys(SEARCH_OPTIONS, 1), **decoding}
        return score(translate_sentences(model, tokenizer, sources, options.batch_size, **plain), pairs)["bleu"]

    figures["bleu"] = bleu(input_sampling=False)
    # The input of these is always the fully masked canvas.
    if objective.input is masked or model.length_model.reads_once:
        return {**figures, "sampled_bleu": figures["bleu"]}
    return {**figures, "sampled_bleu": bleu(input_sampling=True, sampling_seed=options.seed)}


def correlate(options: ReportArguments, pairs: list[Pair]) -> dict[str, Any]:
    """The conditional total correlation of the data, estimated from the first references."""
    name, other = options.total_correlation
    model, tokenizer = load_deqnar(name, options.device)
    autoregressive, its_tokenizer = load_model(other, options.device)
    if is_deqnar(autoregressive.config):
        raise ValueError(
            f"{other} is not autoregressive; --total_correlation takes a deqnar model and an autoregressive one."
        )
    check_same_tokens(tokenizer, its_tokenizer, other)
    examples = [(pair.source, pair.references[0]) for pair in pairs]
    batches, _ = labelled_batches(model, tokenizer, examples, options.batch_size)
    return {"models": [name, other], **asdict(conditional_total_correlation(model, autoregressive, batches))}


def tables(figures: dict[str, Any]) -> str:
    lines = []
    if "models" in figures:
        headers = ["model", "objective", "L_NAT", "L_input", "L_target", "L_MPLE", "BLEU", "sampled BLEU"]
        rows = [
            [label(text), found["objective"]]
            + [f"{found[name]:.2f}" for name in ("nat", "input", "target", "mple", "bleu", "sampled_bleu")]
            for text, found in figures["models"].items()
        ]
        lines += [markdown_table(headers, rows), "", correlation_line(figures["pearson"])]
        left_out = {label(text): found["left_out"] for text, found in figures["models"].items() if found["left_out"]}
        lines += [f"{name}: {count} targets do not fit on their canvas." for name, count in left_out.items()]
        if figures["references"] < 2:
            lines.append("With one reference, the distance of a raw target from it is 0; L_target needs several.")
    if "total_correlation" in figures:
        found = figures["total_correlation"]
        lines.append(
            f"C = {found['bits']:.3f} bits per token ({found['parallel']:.3f} in parallel, "
            f"{found['autoregressive']:.3f} autoregressively, {found['tokens']:,} tokens)"
        )
    lines.append(
        f"{figures['sentences']} sentences, {figures['references']:.1f} references each, β = {figures['beta']}"
    )
    return "\n".join(lines)


def label(text: str) -> str:
    """The label of a model in tables and plots: the last part of its path, and its options."""
    name, *settings = text.split(",")
    return ",".join([Path(name).name or name, *settings])


def correlation_line(correlations: dict[str, float | None]) -> str:
    if None in correlations.values():
        return "r needs three models that differ."
    return f"r(L_MPLE, BLEU) = {correlations['bleu']:.2f}, r(L_MPLE, sampled BLEU) = {correlations['sampled_bleu']:.2f}"


def plot(figures: dict[str, Any], path: Path) -> None:
    """L_MPLE on x, BLEU on y, a point for every model and decoding."""
    drawing = load_figure()(figsize=(7, 5), layout="constrained")
    axes = drawing.add_subplot(xlabel="L_MPLE", ylabel="BLEU", title=correlation_line(figures["pearson"]))
    names, found = zip(*figures["models"].items(), strict=True)
    losses = [one["mple"] for one in found]
    for column, marker, meaning in (("bleu", "o", "default decoding"), ("sampled_bleu", "s", "input sampling")):
        axes.scatter(losses, [one[column] for one in found], marker=marker, label=meaning, alpha=0.8)
    for name, one in zip(names, found, strict=True):
        place = (one["mple"], max(one["bleu"], one["sampled_bleu"]))
        axes.annotate(label(name), place, xytext=(4, 4), textcoords="offset points", fontsize="small")
    axes.legend()
    drawing.savefig(path, dpi=150)

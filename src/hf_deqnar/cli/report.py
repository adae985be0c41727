"""Report what models learned, what that cost, and how it goes with BLEU (the MPLE paper's tables 2 and 3).

    hf-deqnar report cmlm glat,targets=dev.distilled.jsonl --data dev.jsonl.gz --train-data train.jsonl.gz \\
        --source en --target de --plot report.png
    hf-deqnar report --total-correlation model teacher --data dev.jsonl.gz --source en --target de

Each model is a directory or hub id with options behind commas:

    objective=ctc+glat   what it was trained with; its config knows, if our trainer made it
    targets=FILE         the proxy targets of --data, where they are not its references: distilled ones, say
    train=FILE           what its input predictor is fitted on, instead of --train-data
    vanilla=MODEL        the model whose P(t_i | X) is meant in L_input; the model itself if not given
    save=FOLDER          where to keep the model with the input predictor that was fitted

A model whose objective reveals tokens needs an input predictor; one that has none gets it from the training data.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..benchmarks.common import markdown_table
from ..corpus.evaluation import labelled_batches, score, sentence_bleu, translate_sentences
from ..corpus.files import check_parent, check_writable
from ..corpus.reading import Pair, read_parallel
from ..objectives.input_predictor import check_vanilla, fit_input_predictor
from ..objectives.inputs import masked
from ..objectives.objective import Objective, check_objective, parse_objective
from ..objectives.report import conditional_total_correlation, measure_losses, pearson, target_loss
from ..scoring_deqnar import check_same_tokens
from .evaluate import parse_system
from .loading import load_model

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
    """A model of the report with everything that is measured with it."""

    entry: Entry
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    objective: Objective
    vanilla: PreTrainedModel | None
    training: list[Pair] | None  # what its input predictor is fitted on, if it has to be
    targets: list[str]
    references: list[list[str]]  # real targets that the proxy targets are compared with


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="*", help="model[,option=value…]")
    parser.add_argument("--data", required=True, help="validation data: JSONL, TSV, CSV (.gz) or two aligned files")
    parser.add_argument("--train-data", help="what missing input predictors are fitted on")
    parser.add_argument("--source", required=True, help="column (or file ending) of the source language")
    parser.add_argument("--target", required=True, help="column (or file ending) of the references")
    parser.add_argument("--total-correlation", nargs=2, metavar=("NAT", "AR"), help="estimate C of the data by these")
    parser.add_argument("--beta", type=float, default=0.2, help="weight of sentence BLEU in L_target (default: 0.2)")
    parser.add_argument("--samples", type=int, default=1, help="proxy inputs drawn per sentence (default: 1)")
    parser.add_argument("--fit-sentences", type=int, default=2000, help="training pairs for a fit (default: 2000)")
    parser.add_argument("--fit-steps", type=int, default=100, help="most steps of a fit (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of all draws (default: 0)")
    parser.add_argument("--batch-size", type=int, default=32, help="sentences at a time (default: 32)")
    parser.add_argument("--limit", type=int, help="only the first so many sentences")
    parser.add_argument("--device", help="such as cpu or cuda:0")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw L_MPLE against BLEU: .png, .svg or .pdf")


def run(options: argparse.Namespace) -> None:
    check_arguments(options)
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
    print(tables(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.plot is not None:
        plot(figures, options.plot)


def check_arguments(options: argparse.Namespace) -> None:
    for name in ("batch_size", "limit", "samples", "fit_sentences", "fit_steps"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
    if options.beta < 0:
        raise ValueError(f"--beta must not be negative, but is {options.beta}.")
    if options.seed < 0:
        raise ValueError(f"--seed must not be negative, but is {options.seed}.")
    if not options.model and options.total_correlation is None:
        raise ValueError("There is nothing to report; name models, or two of them after --total-correlation.")
    if len(set(options.model)) < len(options.model):
        raise ValueError("A model is named twice; once is enough.")
    if options.plot is not None and not options.model:
        raise ValueError("--plot draws models, but none is named.")
    if options.plot is not None and options.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {options.plot} should end in .png, .svg or .pdf.")
    for path in (options.json, options.plot):
        check_writable(path)


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


def prepare(entry: Entry, options: argparse.Namespace, pairs: list[Pair], read: Reader) -> Subject:
    """Load what a model's figures need, and refuse what cannot be measured before anything has cost time."""
    targets, references = proxy_targets(entry, options, pairs, read)
    model, tokenizer = load_deqnar(entry.model, options.device)
    name = entry.objective or model.config.objective
    if name is None:
        raise ValueError(
            f"{entry.model} does not say what it was trained with; name it, as in {entry.model},objective=ce."
        )
    objective = parse_objective(name)
    check_objective(objective, model.config)
    training = None
    if objective.input is not masked and model.model.input_head is None:
        file = entry.train or options.train_data
        if file is None:
            raise ValueError(
                f"{entry.model} has no input predictor, which objective '{name}' needs; give --train-data to fit one."
            )
        training = read(file)[: options.fit_sentences]
    vanilla = None
    if entry.vanilla is not None:
        vanilla, its_tokenizer = load_deqnar(entry.vanilla, options.device)
        check_same_tokens(tokenizer, its_tokenizer, entry.vanilla)
        check_vanilla(model.config, vanilla.config)
    return Subject(entry, model, tokenizer, objective, vanilla, training, targets, references)


def proxy_targets(
    entry: Entry, options: argparse.Namespace, pairs: list[Pair], read: Reader
) -> tuple[list[str], list[list[str]]]:
    """What a model is asked to say for every sentence, and what that is compared with.

    A target that is a reference itself is compared with the others, if there are some: it is a draw from the data, and
    L_target is about another one.
    """
    if entry.targets is None:
        return [pair.references[0] for pair in pairs], [pair.references[1:] or pair.references for pair in pairs]
    theirs = read(entry.targets)[: options.limit]
    if len(theirs) != len(pairs):
        raise ValueError(
            f"{entry.targets} has {len(theirs):,} targets but {options.data} has {len(pairs):,} sentences; "
            "there must be one for each."
        )
    for number, (pair, other) in enumerate(zip(pairs, theirs, strict=True), start=1):
        if pair.source != other.source:
            raise ValueError(f"{entry.targets}, pair {number}: its source is not that of {options.data}.")
    return [pair.references[0] for pair in theirs], [pair.references for pair in pairs]


def load_deqnar(name: str, device: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model, tokenizer = load_model(name, device, runtime="torch")
    if model.config.model_type != "deqnar":
        raise ValueError(f"{name} is of type {model.config.model_type}, but only deqnar models have proxies to report.")
    return model, tokenizer


def measure(subject: Subject, options: argparse.Namespace, pairs: list[Pair]) -> dict[str, Any]:
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
    figures |= {"mple": losses.nat + losses.input + target, "tokens": losses.tokens, "left_out": losses.left_out}

    def bleu(**decoding: Any) -> float:
        plain = {"refinement_passes": 1, "ctc_beam_size": 1, **decoding}
        return score(translate_sentences(model, tokenizer, sources, options.batch_size, **plain), pairs)["bleu"]

    figures["bleu"] = bleu(input_sampling=False)
    if objective.input is masked:  # its only input is the empty canvas
        return {**figures, "sampled_bleu": figures["bleu"]}
    return {**figures, "sampled_bleu": bleu(input_sampling=True, sampling_seed=options.seed)}


def correlate(options: argparse.Namespace, pairs: list[Pair]) -> dict[str, Any]:
    """The conditional total correlation of the data, by its first references."""
    name, other = options.total_correlation
    model, tokenizer = load_deqnar(name, options.device)
    autoregressive, its_tokenizer = load_model(other, options.device)
    if autoregressive.config.model_type == "deqnar":
        raise ValueError(f"{other} is not autoregressive; --total-correlation takes a deqnar model and another one.")
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
        lines += [f"{name}: {count} targets do not fit on their CTC canvas." for name, count in left_out.items()]
        if figures["references"] < 2:
            lines.append("With one reference, raw targets are at no distance from it; L_target needs several.")
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
    """A model as it is called in tables and plots: without the folders it is in, but with its options."""
    name, *settings = text.split(",")
    return ",".join([Path(name).name or name, *settings])


def correlation_line(correlations: dict[str, float | None]) -> str:
    if None in correlations.values():
        return "r needs three models that differ."
    return f"r(L_MPLE, BLEU) = {correlations['bleu']:.2f}, r(L_MPLE, sampled BLEU) = {correlations['sampled_bleu']:.2f}"


def load_figure() -> type:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'hf_deqnar[plot]'.") from error
    return Figure


def plot(figures: dict[str, Any], path: Path) -> None:
    """L_MPLE on x, BLEU on y, a point for every model and way of decoding. Drawn without a display."""
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

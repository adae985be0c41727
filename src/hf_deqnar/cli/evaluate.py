"""Translate a test set with one or more models and score the translations.

    hf-deqnar evaluate my-model --data test.jsonl.gz --source en --target de
    hf-deqnar evaluate my-model,length_beams=5 teacher,num_beams=5 --data test.jsonl.gz --source en --target de

Each system is a directory or hub id, with options of its `generate` behind commas. With several, the others are
compared with the first by paired bootstrap.

    hf-deqnar evaluate my-model --data test.jsonl.gz --source en --target de --other-names train.jsonl.gz

evaluates the sentences with names alone, each with another name of the corpus in its place, and tells how many of these
names arrive in the translation: corpora speak of few people and places, and users of many.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from ..benchmarks.common import markdown_table, read_options
from ..corpus.evaluation import compare, score, translate_sentences
from ..corpus.files import check_parent, check_writable
from ..corpus.names import share_kept, with_other_names
from ..corpus.reading import read_parallel
from ..pipeline_deqnar import source_prefix
from .loading import load_model

SEED = 0  # of the draw of other names: all systems are asked for the same


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("system", nargs="+", help="model[,option=value…]")
    parser.add_argument("--data", required=True, help="JSONL, TSV or CSV (.gz), or the beginning of two aligned files")
    parser.add_argument("--source", required=True, help="column (or file ending) of the source language")
    parser.add_argument("--target", required=True, help="column (or file ending) of the references")
    parser.add_argument("--batch-size", type=int, default=32, help="sentences translated together (default: 32)")
    parser.add_argument("--limit", type=int, help="only the first so many sentences")
    parser.add_argument("--other-names", metavar="CORPUS", help="evaluate what has a name, with others of this corpus")
    parser.add_argument(
        "--source-prefix",
        metavar="TEXT",
        help="what other models than ours see before every source (default: what their configurations say)",
    )
    parser.add_argument("--device", help="such as cpu or cuda:0")
    parser.add_argument("--samples", type=int, default=1000, help="bootstrap samples (default: 1000)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write each system's translations there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")


def parse_system(text: str) -> tuple[str, dict[str, Any]]:
    """'model,length_beams=5' → ('model', {'length_beams': 5})."""
    name, comma, options = text.partition(",")
    return name, read_options(options) if comma else {}


def run(options: argparse.Namespace) -> None:
    if options.batch_size < 1:
        raise ValueError(f"--batch-size must be at least 1, not {options.batch_size}.")
    if options.samples < 1:
        raise ValueError(f"--samples must be at least 1, not {options.samples}.")
    if options.limit is not None and options.limit < 1:
        raise ValueError(f"--limit must be at least 1, not {options.limit}.")
    if len(set(options.system)) < len(options.system):
        raise ValueError("A system is named twice; comparing it with itself says nothing.")
    check_writable(options.json)
    check_parent(options.output)
    pairs = read_parallel(options.data, options.source, options.target)[: options.limit]
    names = None
    if options.other_names is not None:
        pairs, names = with_other_names(pairs, read_parallel(options.other_names, options.source, options.target), SEED)
        if not pairs:
            raise ValueError(f"No sentence of {options.data} has a name of {options.other_names} that has another.")
    systems = {}
    for text in options.system:
        name, settings = parse_system(text)
        model, tokenizer = load_model(name, options.device)
        sentences = [pair.source for pair in pairs]
        prefix = options.source_prefix
        if prefix is None or model.config.model_type == "deqnar":
            prefix = source_prefix(model.config, options.source, options.target)
        systems[text] = translate_sentences(model, tokenizer, sentences, options.batch_size, prefix=prefix, **settings)
        if options.output is not None:
            options.output.mkdir(exist_ok=True)
            file = options.output / f"{len(systems)}.txt"
            file.write_text("\n".join(systems[text].texts) + "\n", encoding="utf-8")
    figures = {"data": options.data, "systems": {text: score(found, pairs) for text, found in systems.items()}}
    if names is not None:
        figures["other_names"] = options.other_names
        for text, found in systems.items():
            figures["systems"][text]["names_kept"] = share_kept(found.texts, names)
    if len(systems) > 1:
        figures["paired_bootstrap"] = compare(systems, pairs, options.samples)
    print(table(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(figures: dict) -> str:
    headers = ["system", "BLEU", "chrF", "NFE", "converged", "repetition", "length ratio", "seconds"]
    compared = figures.get("paired_bootstrap", {})
    rows = []
    for position, (text, found) in enumerate(figures["systems"].items()):
        name = f"Baseline: {text}" if position == 0 else text
        chance = [""] * 2
        if position > 0 and compared:
            chance = [f" (p = {compared[name][metric]['p_value']:.3f})" for metric in ("BLEU", "chrF2")]
        rows.append(
            [
                text,
                f"{found['bleu']:.2f}{chance[0]}",
                f"{found['chrf']:.2f}{chance[1]}",
                f"{found['mean_nfe']:.1f}" if "mean_nfe" in found else "",
                f"{found['share_converged']:.1%}" if "share_converged" in found else "",
                f"{found['repetition_rate']:.2%}",
                f"{found['length_ratio']:.3f}",
                f"{found['seconds']:.1f}",
            ]
        )
    first = next(iter(figures["systems"].values()))
    if "names_kept" in first:
        headers.append("names kept")
        rows = [
            [*row, f"{found['names_kept']:.1%}"] for row, found in zip(rows, figures["systems"].values(), strict=True)
        ]
    signatures = f"BLEU {first['bleu_signature']}\nchrF {first['chrf_signature']}"
    return f"{markdown_table(headers, rows)}\n\n{signatures}\n{first['sentences']} sentences"

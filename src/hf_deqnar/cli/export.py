"""Export a model to ONNX, in fp32 and int8, and check that it still says the same.

    hf-deqnar export my-model exported --data test.jsonl.gz --source en --target de
    hf-deqnar translate --runtime onnx --model exported/int8 "A man is riding a horse."

Each precision is a folder of its own, complete with tokenizer and a list of its files and their hashes. The check
translates sentences with the model and with every export; with references it also scores them.
"""

import argparse
from pathlib import Path

from ..benchmarks.common import markdown_table
from ..corpus.evaluation import metrics
from ..corpus.reading import Pair, read_parallel
from ..export.agreement import LEAST_AGREEMENT, SENTENCES, compare_systems
from ..export.graphs import check_exportable, check_packages, export_model
from ..export.manifest import PRECISIONS
from ..export.runtime import DeqNarOnnxModel
from .loading import load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory or hub id")
    parser.add_argument("output", type=Path, help="folder for the subfolders fp32 and int8")
    parser.add_argument("--fp32", action="store_true", help="only fp32, unless --int8 is given too")
    parser.add_argument("--int8", action="store_true", help="only int8, unless --fp32 is given too")
    parser.add_argument(
        "--eight-bits",
        action="store_true",
        help="int8 weights in 8 bits instead of 7, for processors with VNNI instructions alone",
    )
    parser.add_argument("--data", help="sentences to check with: JSONL, TSV or CSV (.gz), or two aligned files")
    parser.add_argument("--source", help="column (or file ending) of the source language")
    parser.add_argument("--target", help="column (or file ending) of the references")
    parser.add_argument("--limit", type=int, default=100, help="only the first so many sentences (default: 100)")
    parser.add_argument("--batch-size", type=int, default=16, help="sentences translated together (default: 16)")


def run(options: argparse.Namespace) -> None:
    precisions = tuple(precision for precision in PRECISIONS if getattr(options, precision)) or PRECISIONS
    check_options(options, precisions)
    check_packages()
    pairs = [Pair(sentence, []) for sentence in SENTENCES]
    if options.data is not None:
        metrics()  # if scoring is not possible, that is told before the work
        pairs = read_parallel(options.data, options.source, options.target)[: options.limit]
    model, tokenizer = load_model(options.model, "cpu", runtime="torch")
    check_exportable(model.config)
    model = model.float()
    folders = export_model(model, tokenizer, options.output, precisions, options.eight_bits)
    systems = {"torch": model, **{name: DeqNarOnnxModel.from_pretrained(folder) for name, folder in folders.items()}}
    figures = compare_systems(systems, tokenizer, pairs, options.batch_size)
    print(table(figures, folders))
    print(f"\n{len(pairs)} sentences" + ("" if options.data else ", built in; BLEU needs --data with references"))
    found = figures.get("fp32", {"same_tokens": 1.0})
    least = min(found["same_tokens"], found.get("same_tokens_alone", 1.0))
    if least < LEAST_AGREEMENT:
        raise ValueError(
            f"{folders['fp32']} has only {least:.1%} of its tokens in common with the model; do not use it, and report "
            "the model's configuration."
        )


def check_options(options: argparse.Namespace, precisions: tuple[str, ...]) -> None:
    for name in ("limit", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(options, name)}.")
    given = [name for name in ("data", "source", "target") if getattr(options, name) is not None]
    if given and len(given) < 3:
        raise ValueError("--data, --source and --target belong together; give all of them or none.")
    if options.eight_bits and "int8" not in precisions:
        raise ValueError("--eight-bits is about int8 weights; leave out --fp32 or add --int8.")


def table(figures: dict[str, dict], folders: dict[str, Path]) -> str:
    headers = ["runtime", "same sentences", "same tokens", "in one call", "NFE", "BLEU", "megabytes", "folder"]
    rows = []
    for name, found in figures.items():
        size = ""
        if name in folders:
            size = f"{sum(path.stat().st_size for path in folders[name].glob('*.onnx')) / 1e6:.1f}"
        bleu = f"{found['bleu']:.2f}" if "bleu" in found else ""
        shares = [""] * 3
        if name in folders:
            shares = [f"{found['same_sentences']:.1%}", f"{found['same_tokens']:.1%}"]
            shares.append(f"{found['same_tokens_alone']:.1%}" if "same_tokens_alone" in found else "")
        rows.append([name, *shares, f"{found['mean_nfe']:.1f}", bleu, size, str(folders.get(name, ""))])
    return markdown_table(headers, rows)

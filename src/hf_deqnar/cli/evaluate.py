"""Translate a test set with one or more models and score the translations.

    hf-deqnar evaluate my-model --data test.jsonl.gz --source en --target de
    hf-deqnar evaluate my-model,length_beams=5 teacher,num_beams=5 --data test.jsonl.gz --source en --target de

Each system is a directory or hub id, followed by options of its `generate` after commas. The second and later systems
are compared with the first by paired bootstrap.

    hf-deqnar evaluate my-model --data test.jsonl.gz --source en --target de --other_names train.jsonl.gz

evaluates only the sentences with names. Each name is replaced by another name of the given corpus, and the share of the
names that are copied into the translation is reported.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .terminal_tables import print_results

SEED = 0  # of the choice of other names: the same for all systems


@dataclass
class EvaluationArguments:
    """Systems, test set and output."""

    system: list[str] = field(
        metadata={
            "positional": True,
            "nargs": "+",
            "metavar": "MODEL[,OPTION=VALUE…]",
            "help": "Directories or hub ids of models, with options of generate.",
        }
    )
    data: str = field(metadata={"help": "JSONL, TSV or CSV (.gz), or the common prefix of two aligned files."})
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the references."})
    batch_size: int = field(default=32, metadata={"help": "Sentences translated together."})
    limit: int | None = field(default=None, metadata={"help": "Evaluate only the first sentences, this many."})
    other_names: str | None = field(
        default=None,
        metadata={"metavar": "CORPUS", "help": "Evaluate sentences with names, replaced by others of this corpus."},
    )
    source_prefix: str | None = field(
        default=None,
        metadata={
            "metavar": "TEXT",
            "help": "Text before every source, for other architectures. Default: from their configurations.",
        },
    )
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    samples: int = field(default=1000, metadata={"help": "Bootstrap samples."})
    output_dir: Path | None = field(
        default=None,
        metadata={"aliases": ["--output"], "metavar": "FOLDER", "help": "Write the translations of each system here."},
    )
    json: Path | None = field(default=None, metadata={"metavar": "FILE", "help": "Write the figures here."})

    def __post_init__(self) -> None:
        for name in ("batch_size", "samples", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}.")
        if len(set(self.system)) < len(self.system):
            raise ValueError("A system is named twice; remove one.")


ARGUMENTS = (EvaluationArguments,)


def parse_system(text: str) -> tuple[str, dict[str, Any]]:
    """'model,length_beams=5' → ('model', {'length_beams': 5})."""
    from ..benchmarks.common import read_options

    name, comma, options = text.partition(",")
    return name, read_options(options) if comma else {}


def run(arguments: EvaluationArguments) -> None:
    from ..data.name_augmentation import replace_names, share_copied
    from ..data.parallel_text import read_parallel
    from ..evaluation.metrics import compare, score
    from ..evaluation.translation import translate_sentences
    from ..export.manifest import is_export
    from ..models.deqnar.configuration_deqnar import is_deqnar
    from ..models.deqnar.text import source_prefix
    from ..utils.files import check_parent, check_writable
    from .loading import check_local, check_model, load_model

    check_writable(arguments.json)
    check_parent(arguments.output_dir)
    pairs = read_parallel(arguments.data, arguments.source, arguments.target)[: arguments.limit]
    names = None
    if arguments.other_names is not None:
        others = read_parallel(arguments.other_names, arguments.source, arguments.target)
        pairs, names = replace_names(pairs, others, SEED)
        if not pairs:
            raise ValueError(
                f"No sentence of {arguments.data} has a name that can be replaced by one of {arguments.other_names}."
            )
    for text in arguments.system:  # a mistake in the last one is reported before the first is translated
        name, _ = parse_system(text)
        check_local(name)
        if not is_export(Path(name)):
            check_model(name)
    systems = {}
    for text in arguments.system:
        name, settings = parse_system(text)
        model, tokenizer = load_model(name, arguments.device)
        sentences = [pair.source for pair in pairs]
        prefix = arguments.source_prefix
        if prefix is None or is_deqnar(model.config):
            prefix = source_prefix(model.config, arguments.source, arguments.target)
        systems[text] = translate_sentences(
            model, tokenizer, sentences, arguments.batch_size, prefix=prefix, **settings
        )
        if arguments.output_dir is not None:
            arguments.output_dir.mkdir(exist_ok=True)
            file = arguments.output_dir / f"{len(systems)}.txt"
            file.write_text("\n".join(systems[text].texts) + "\n", encoding="utf-8")
    figures = {"data": arguments.data, "systems": {text: score(found, pairs) for text, found in systems.items()}}
    if names is not None:
        figures["other_names"] = arguments.other_names
        for text, found in systems.items():
            figures["systems"][text]["names_copied"] = share_copied(found.texts, names)
    if len(systems) > 1:
        figures["paired_bootstrap"] = compare(systems, pairs, arguments.samples)
    print_results(table(figures))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(figures: dict) -> str:
    from ..benchmarks.common import markdown_table

    headers = ["system", "BLEU", "chrF", "NFE", "converged", "repetition", "length ratio", "brevity penalty"]
    headers.append("seconds")
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
                f"{found['brevity_penalty']:.3f}",
                f"{found['seconds']:.1f}",
            ]
        )
    first = next(iter(figures["systems"].values()))
    if "names_copied" in first:
        headers.append("names copied")
        rows = [
            [*row, f"{found['names_copied']:.1%}"] for row, found in zip(rows, figures["systems"].values(), strict=True)
        ]
    signatures = f"BLEU {first['bleu_signature']}\nchrF {first['chrf_signature']}"
    return f"{markdown_table(headers, rows)}\n\n{signatures}\n{first['sentences']} sentences"

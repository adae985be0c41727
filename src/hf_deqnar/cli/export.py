"""Export a model to ONNX, in fp32 and int8, and compare the translations of the exports with those of the model.

    hf-deqnar export --model my-model --output_dir exported --data test.jsonl.gz --source en --target de
    hf-deqnar translate --runtime onnx --model exported/int8 "A man is riding a horse."

Each precision is written to a subfolder with the tokenizer and a list of its files and their hashes. With references
the translations are also scored. `hf-deqnar export my-model exported` is accepted as well.
"""

from dataclasses import dataclass, field
from pathlib import Path

from .terminal_tables import print_results


@dataclass
class ExportArguments:
    """Model, output folder, precisions, and sentences for the comparison."""

    model: str | None = field(default=None, metadata={"help": "Directory or hub id of a model."})
    output_dir: Path | None = field(
        default=None, metadata={"metavar": "FOLDER", "help": "Folder for the subfolders fp32 and int8."}
    )
    folders: list[str] = field(
        default_factory=list,
        metadata={
            "positional": True,
            "nargs": "*",
            "metavar": "MODEL FOLDER",
            "help": "Short form of --model and --output_dir.",
        },
    )
    fp32: bool = field(default=False, metadata={"help": "Only fp32, unless --int8 is given too."})
    int8: bool = field(default=False, metadata={"help": "Only int8, unless --fp32 is given too."})
    eight_bits: bool = field(
        default=False,
        metadata={"help": "int8 weights with 8 bits instead of 7, for processors with VNNI instructions only."},
    )
    calibration_data: str | None = field(
        default=None,
        metadata={
            "help": "Sentences on which the ranges of int8 activations are measured, with --source and --target, in "
            "the formats of --data. Default: a few built-in English ones."
        },
    )
    data: str | None = field(
        default=None, metadata={"help": "Sentences to compare with: JSONL, TSV or CSV (.gz), or two aligned files."}
    )
    source: str | None = field(default=None, metadata={"help": "Column (or file ending) of the source language."})
    target: str | None = field(default=None, metadata={"help": "Column (or file ending) of the references."})
    limit: int = field(default=100, metadata={"help": "Compare only the first sentences, this many."})
    batch_size: int = field(default=16, metadata={"help": "Sentences translated together."})

    def __post_init__(self) -> None:
        if len(self.folders) == 2 and self.model is None and self.output_dir is None:
            self.model, self.output_dir = self.folders[0], Path(self.folders[1])
        elif self.folders or self.model is None or self.output_dir is None:
            raise ValueError("Name the model and the output folder: --model MODEL --output_dir FOLDER.")
        for name in ("limit", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, not {getattr(self, name)}.")
        if self.calibration_data is not None and self.fp32 and not self.int8:
            raise ValueError("--calibration_data is about int8 activations; leave out --fp32 or add --int8.")
        files = [name for name in ("data", "calibration_data") if getattr(self, name) is not None]
        columns = [name for name in ("source", "target") if getattr(self, name) is not None]
        if files and len(columns) < 2:
            raise ValueError(f"--{files[0]} needs --source and --target.")
        if columns and not files:
            raise ValueError(f"--{columns[0]} needs --data or --calibration_data.")
        if self.eight_bits and self.fp32 and not self.int8:
            raise ValueError("--eight_bits is about int8 weights; leave out --fp32 or add --int8.")


ARGUMENTS = (ExportArguments,)
MOST_CALIBRATION_SENTENCES = 200  # evenly spaced in the data


def run(arguments: ExportArguments) -> None:
    from ..data.parallel_text import Pair, evenly_spaced, read_parallel
    from ..evaluation.metrics import metrics
    from ..export.calibration import SENTENCES as CALIBRATION_SENTENCES
    from ..export.graphs import check_exportable, check_packages, export_model
    from ..export.manifest import PRECISIONS
    from ..export.parity import LEAST_AGREEMENT, SENTENCES, compare_systems
    from ..export.runtime import DeqNarOnnxModel
    from .loading import load_model

    precisions = tuple(precision for precision in PRECISIONS if getattr(arguments, precision)) or PRECISIONS
    check_packages()
    pairs = [Pair(sentence, []) for sentence in SENTENCES]
    if arguments.data is not None:
        metrics()  # raises an error if sacrebleu is missing
        pairs = read_parallel(arguments.data, arguments.source, arguments.target)[: arguments.limit]
    calibration = list(CALIBRATION_SENTENCES)
    if arguments.calibration_data is not None:
        every = read_parallel(arguments.calibration_data, arguments.source, arguments.target)
        calibration = [every[place].source for place in evenly_spaced(every, MOST_CALIBRATION_SENTENCES)]
    model, tokenizer = load_model(arguments.model, "cpu", runtime="torch")
    check_exportable(model.config)
    model = model.float()
    folders = export_model(model, tokenizer, arguments.output_dir, precisions, arguments.eight_bits, calibration)
    systems = {"torch": model, **{name: DeqNarOnnxModel.from_pretrained(folder) for name, folder in folders.items()}}
    figures = compare_systems(systems, tokenizer, pairs, arguments.batch_size)
    print_results(table(figures, folders))
    print(f"\n{len(pairs)} sentences" + ("" if arguments.data else ", built in; BLEU needs --data with references"))
    found = figures.get("fp32", {"same_tokens": 1.0})
    least = min(found["same_tokens"], found.get("same_tokens_sentence_graph", 1.0))
    if least < LEAST_AGREEMENT:
        raise ValueError(
            f"{folders['fp32']} has only {least:.1%} of its tokens in common with the model; do not use it, and report "
            "the model's configuration."
        )


def table(figures: dict[str, dict], folders: dict[str, Path]) -> str:
    from ..benchmarks.common import markdown_table

    headers = ["runtime", "same sentences", "same tokens", "in one call", "NFE", "BLEU", "megabytes", "folder"]
    rows = []
    for name, found in figures.items():
        size = ""
        if name in folders:
            size = f"{sum(path.stat().st_size for path in folders[name].glob('*.onnx*')) / 1e6:.1f}"
        bleu = f"{found['bleu']:.2f}" if "bleu" in found else ""
        shares = [""] * 3
        if name in folders:
            shares = [f"{found['same_sentences']:.1%}", f"{found['same_tokens']:.1%}"]
            shares.append(f"{found['same_tokens_sentence_graph']:.1%}" if "same_tokens_sentence_graph" in found else "")
        rows.append([name, *shares, f"{found['mean_nfe']:.1f}", bleu, size, str(folders.get(name, ""))])
    return markdown_table(headers, rows)

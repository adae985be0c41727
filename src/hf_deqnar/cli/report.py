"""Report what models learned and how it correlates with BLEU (tables 2 and 3 of the MPLE paper).

    hf-deqnar report cmlm glat,targets=dev.distilled.jsonl --data dev.jsonl.gz --train_data train.jsonl.gz \\
        --source en --target de --plot report.png
    hf-deqnar report --total_correlation model teacher --data dev.jsonl.gz --source en --target de

Each model is a directory or hub id, followed by options after commas:

    objective=ctc+glat   its training objective; required only if its config does not name it
    targets=FILE         proxy targets of --data, such as distilled ones, if they are not the references
    train=FILE           pairs that its input predictor is fitted on, instead of --train_data
    vanilla=MODEL        model of P(t_i | X) in L_input; the model itself by default
    save=FOLDER          where to save the model with its fitted input predictor

A model whose objective reveals tokens needs an input predictor. If it has none, one is fitted on the training data.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class ReportArguments:
    """Models, data and output."""

    model: list[str] = field(
        metadata={
            "positional": True,
            "nargs": "*",
            "metavar": "MODEL[,OPTION=VALUE…]",
            "help": "Directories or hub ids of models, with options as above.",
        }
    )
    data: str = field(metadata={"help": "Validation data: JSONL, TSV, CSV (.gz) or two aligned files."})
    source: str = field(metadata={"help": "Column (or file ending) of the source language."})
    target: str = field(metadata={"help": "Column (or file ending) of the references."})
    train_data: str | None = field(
        default=None, metadata={"help": "Pairs that missing input predictors are fitted on."}
    )
    total_correlation: list[str] | None = field(
        default=None,
        metadata={
            "nargs": 2,
            "metavar": ("NAT", "AR"),
            "help": "Estimate the conditional total correlation C of the data with these two models.",
        },
    )
    beta: float = field(default=0.2, metadata={"help": "Weight of sentence BLEU in L_target."})
    samples: int = field(default=1, metadata={"help": "Proxy inputs drawn per sentence."})
    fit_sentences: int = field(default=2000, metadata={"help": "Training pairs of a fit."})
    fit_steps: int = field(default=100, metadata={"help": "Maximum number of steps of a fit."})
    seed: int = field(default=0, metadata={"help": "Seed of all random draws."})
    batch_size: int = field(default=32, metadata={"help": "Sentences per batch."})
    limit: int | None = field(default=None, metadata={"help": "Measure only the first sentences, this many."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    json: Path | None = field(default=None, metadata={"metavar": "FILE", "help": "Write the figures here."})
    plot: Path | None = field(
        default=None, metadata={"metavar": "FILE", "help": "Draw L_MPLE against BLEU: .png, .svg or .pdf."}
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "limit", "samples", "fit_sentences", "fit_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, not {value}.")
        for name in ("beta", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name} must not be negative, but is {getattr(self, name)}.")
        if not self.model and self.total_correlation is None:
            raise ValueError("There is nothing to report; name models, or two of them after --total_correlation.")
        if len(set(self.model)) < len(self.model):
            raise ValueError("A model is named twice; remove one.")
        if self.plot is not None and not self.model:
            raise ValueError("--plot draws models, but none is named.")
        if self.plot is not None and self.plot.suffix.lower() not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--plot {self.plot} should end in .png, .svg or .pdf.")


ARGUMENTS = (ReportArguments,)


def run(arguments: ReportArguments) -> None:
    from .learning_report import report

    report(arguments)

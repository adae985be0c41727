"""Train a model to write what an autoregressive teacher finds likely (ENGINE); `scripts/train_energy.py` is the same.

    hf-deqnar energy --student runs/cmlm --teacher runs/teacher --train_data train.jsonl.gz \\
        --validation_data validation.jsonl.gz --source en --target de --output_dir runs/energy
    hf-deqnar energy --operator-grid --grid_steps 200 --student runs/cmlm --teacher runs/teacher … --json grid.json

    hf-deqnar energy --student bilstm --teacher lstm …

The last makes the recurrent pair of the paper's first table from the texts, before it learns from the energy. A YAML
file named first holds any of the flags; flags override it. `hf-deqnar energy --help` lists them all: those of
the models, of the data, and of `EnergyTrainingArguments`. A run whose folder holds checkpoints goes on from the last
one, a grid from its last finished pair. Energies are per sentence, in nats, on canvases of the reference's length.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from transformers.utils import logging

from ..benchmarks.common import markdown_table
from .loading import load_model, train_extra

TAKES_ALL = True  # its flags are those of dataclasses, which are imported when it runs


def run(options: argparse.Namespace) -> None:
    with train_extra("Training"):
        from ..training.arguments import CorpusArguments, parse_arguments
        from ..training.energy_run import (
            EnergyArguments,
            check_effects,
            make_recurrent_pair,
            operator_grid,
            set_up,
            train_energy,
        )
        from ..training.energy_trainer import EnergyTrainingArguments
    kinds = (EnergyArguments, CorpusArguments, EnergyTrainingArguments)
    names, data, arguments = parse_arguments(kinds, options.arguments, "hf-deqnar energy")
    check_effects(names, arguments)
    if names.student == "bilstm":
        names = make_recurrent_pair(names, data, arguments)
    said = logging.get_verbosity()
    student, teacher = load_model(names.student, "cpu"), load_model(names.teacher, "cpu")
    logging.set_verbosity(said)  # loading is quiet, training need not be
    setting = set_up(names, student, teacher, data, arguments)
    figures = operator_grid(setting, arguments) if names.operator_grid else train_energy(setting, arguments)
    if not arguments.should_save:
        return  # another process says it
    print(grid_table(figures) if names.operator_grid else table(figures))
    if names.json is not None:
        Path(names.json).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(figures: dict[str, dict[str, float]]) -> str:
    """The student as it was given, and what became of it."""
    columns = {
        "discrete_energy": "energy",
        "energy": "relaxed energy",
        "reference_length_bleu": "BLEU, reference lengths",
        "bleu": "BLEU",
        "chrf": "chrF",
    }
    rows = [[name, *(f"{found[key]:.2f}" for key in columns)] for name, found in figures.items()]
    return markdown_table(["model", *columns.values()], rows)


def grid_table(grid: dict[str, Any]) -> str:
    """energy (BLEU) with reference lengths, O₁ down and O₂ across: the layout of ENGINE's table 2."""

    def cell(found: dict[str, float]) -> str:
        return f"{found['discrete_energy']:.1f} ({found['reference_length_bleu']:.1f})"

    names = list(dict.fromkeys(name.split()[0] for name in grid["cells"]))
    rows = [[fed, *(cell(grid["cells"][f"{fed} {compared}"]) for compared in names)] for fed in names]
    steps = grid["settings"]["max_steps"]
    given = f"The student as it was given: {cell(grid['student'])}. Every cell: after {steps} updates."
    headers = ["O₁ \\ O₂", *names]
    return f"{markdown_table(headers, rows)}\n\n{given}"

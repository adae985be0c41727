"""Train a model on the energy of an autoregressive teacher (ENGINE).

    hf-deqnar energy --student runs/cmlm --teacher runs/teacher --train_data train.jsonl.gz \\
        --validation_data validation.jsonl.gz --source en --target de --output_dir runs/energy
    hf-deqnar energy --operator_grid --grid_steps 200 --student runs/cmlm --teacher runs/teacher … --json grid.json
    hf-deqnar energy --student bilstm --teacher lstm …

The last form first trains the recurrent pair of the paper's first table. A YAML file named first contains any of the
flags; flags override it. `--help` lists the flags of this package; `--help_all` also lists those of transformers'
Seq2SeqTrainingArguments, all of which are accepted. A run whose folder contains checkpoints is resumed from the last
one, a grid from its last finished pair. Energies are per sentence, in nats, on canvases of the reference's length.
`accelerate launch scripts/train_energy.py` does the same.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .extras import check_trackers, requires_extra
from .terminal_tables import print_results

if TYPE_CHECKING:
    from ..training.arguments import CorpusArguments
    from ..training.energy_run import EnergyArguments
    from ..training.energy_trainer import EnergyTrainingArguments

ARGUMENTS = (
    "hf_deqnar.training.energy_run:EnergyArguments",
    "hf_deqnar.training.arguments:CorpusArguments",
    "hf_deqnar.training.energy_trainer:EnergyTrainingArguments",
)
COLUMNS = {
    "discrete_energy": "energy",
    "energy": "relaxed energy",
    "reference_length_bleu": "BLEU, reference lengths",
    "bleu": "BLEU",
    "chrf": "chrF",
}


def run(models: "EnergyArguments", data: "CorpusArguments", arguments: "EnergyTrainingArguments") -> None:
    with requires_extra("train", "This command"):
        from transformers.utils import logging

        from ..training.energy_run import check_effects, make_recurrent_pair, operator_grid, set_up, train_energy
        from .loading import load_model
    check_trackers(arguments.report_to)
    check_effects(models, arguments)
    if models.student == "bilstm":
        models = make_recurrent_pair(models, data, arguments)
    verbosity = logging.get_verbosity()
    student, teacher = load_model(models.student, "cpu"), load_model(models.teacher, "cpu")
    logging.set_verbosity(verbosity)  # loading silences transformers
    setting = set_up(models, student, teacher, data, arguments)
    figures = operator_grid(setting, arguments) if models.operator_grid else train_energy(setting, arguments)
    if not arguments.should_save:
        return  # the main process prints the figures
    print_results(grid_table(figures) if models.operator_grid else table(figures))
    if models.json is not None:
        Path(models.json).write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def table(figures: dict[str, dict[str, float]]) -> str:
    """The student before and after training."""
    from ..benchmarks.common import markdown_table

    rows = [[name, *(f"{found[key]:.2f}" for key in COLUMNS)] for name, found in figures.items()]
    return markdown_table(["model", *COLUMNS.values()], rows)


def grid_table(grid: dict[str, Any]) -> str:
    """Energy (BLEU) with reference lengths, O₁ in rows and O₂ in columns: the layout of ENGINE's table 2."""
    from ..benchmarks.common import markdown_table

    def cell(found: dict[str, float]) -> str:
        return f"{found['discrete_energy']:.1f} ({found['reference_length_bleu']:.1f})"

    names = list(dict.fromkeys(name.split()[0] for name in grid["cells"]))
    rows = [[first, *(cell(grid["cells"][f"{first} {second}"]) for second in names)] for first in names]
    steps = grid["settings"]["max_steps"]
    initial = f"The student before training: {cell(grid['student'])}. Every cell: after {steps} updates."
    headers = ["O₁ \\ O₂", *names]
    return f"{markdown_table(headers, rows)}\n\n{initial}"

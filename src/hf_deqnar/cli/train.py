"""Train a model on parallel text, with any objective.

    hf-deqnar train settings.yaml
    hf-deqnar train --train_data train.jsonl.gz --source en --target de --objective ctc+glat --config length=ctc \\
        --output_dir runs/first --max_steps 2000

A YAML file named first contains any of the flags; flags override it. `--help` lists the flags of this package;
`--help_all` also lists those of transformers' Seq2SeqTrainingArguments, all of which are accepted. A run whose folder
contains checkpoints is resumed from the last one. `accelerate launch scripts/train.py` does the same.
"""

from typing import TYPE_CHECKING

from .extras import check_trackers, requires_extra

if TYPE_CHECKING:
    from ..training.arguments import DataArguments, DeqNarTrainingArguments, ModelArguments

ARGUMENTS = (
    "hf_deqnar.training.arguments:ModelArguments",
    "hf_deqnar.training.arguments:DataArguments",
    "hf_deqnar.training.arguments:DeqNarTrainingArguments",
)


def run(model: "ModelArguments", data: "DataArguments", arguments: "DeqNarTrainingArguments") -> None:
    check_trackers(arguments.report_to)
    with requires_extra("train", "This command"):
        from ..training.run import train
    train(model, data, arguments)

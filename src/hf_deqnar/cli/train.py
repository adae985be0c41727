"""Train a model on parallel text, with any objective; `accelerate launch scripts/train.py` does the same.

    hf-deqnar train settings.yaml
    hf-deqnar train --train_data train.jsonl.gz --source en --target de --objective ctc+glat --config length=ctc \\
        --output_dir runs/first --max_steps 2000

A YAML file named first holds any of the flags; flags override it. `hf-deqnar train --help` lists them all: those of the
model, of the data, and of `DeqNarTrainingArguments`. A run whose folder holds checkpoints goes on from the last one.
"""

import argparse

from .loading import train_extra

TAKES_ALL = True  # its flags are those of dataclasses, which are imported when it runs


def run(options: argparse.Namespace) -> None:
    with train_extra("Training"):
        from ..training.run import main
    main(options.arguments, "hf-deqnar train")

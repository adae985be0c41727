"""Train an autoregressive teacher; `accelerate launch scripts/train_teacher.py` does the same.

    hf-deqnar teacher --train_data train.jsonl.gz --validation_data validation.jsonl.gz --source en --target de \\
        --size tiny --config dropout=0.3 --output_dir runs/teacher --max_steps 10000 --eval_strategy steps

A YAML file named first holds any of the flags; `--help` lists them all. The result is an ordinary MarianMTModel, with
the tokenizer that its students will use.
"""

import argparse

from .loading import train_extra

TAKES_ALL = True  # its flags are those of dataclasses, which are imported when it runs


def run(options: argparse.Namespace) -> None:
    with train_extra("Training"):
        from ..training.teacher import main
    main(options.arguments, "hf-deqnar teacher")

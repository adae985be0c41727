"""Train an autoregressive teacher; `accelerate launch scripts/train_teacher.py` does the same.

    hf-deqnar teacher --train_data train.jsonl.gz --validation_data validation.jsonl.gz --source en --target de \\
        --size tiny --config dropout=0.3 --output_dir runs/teacher --max_steps 10000 --eval_strategy steps

A YAML file named first holds any of the flags; `--help` lists them all. The result is an ordinary MarianMTModel, with
the tokenizer that its students will use.
"""

import argparse

TAKES_ALL = True  # its flags are those of dataclasses, which are imported when it runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="[settings.yaml] [--flag value …]")


def run(options: argparse.Namespace) -> None:
    try:
        from ..training.teacher import main
    except ImportError as error:
        raise ImportError(f"Training needs more packages ({error.name}): pip install 'hf_deqnar[train]'.") from error
    main(options.arguments, "hf-deqnar teacher")

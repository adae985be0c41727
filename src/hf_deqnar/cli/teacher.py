"""Train an autoregressive teacher.

    hf-deqnar teacher --train_data train.jsonl.gz --validation_data validation.jsonl.gz --source en --target de \\
        --size tiny --config dropout=0.3 --output_dir runs/teacher --max_steps 10000 --eval_strategy steps

A YAML file named first contains any of the flags; flags override it. `--help` lists the flags of this package;
`--help_all` also lists those of transformers' Seq2SeqTrainingArguments, all of which are accepted. The result is a
MarianMTModel with the tokenizer that its students will use. `accelerate launch scripts/train_teacher.py` does the same.
"""

from typing import TYPE_CHECKING

from .extras import check_trackers

if TYPE_CHECKING:
    from ..training.arguments import DataArguments, TranslationTrainingArguments
    from ..training.teacher_trainer import TeacherArguments

ARGUMENTS = (
    "hf_deqnar.training.teacher_trainer:TeacherArguments",
    "hf_deqnar.training.arguments:DataArguments",
    "hf_deqnar.training.arguments:TranslationTrainingArguments",
)


def run(teacher: "TeacherArguments", data: "DataArguments", arguments: "TranslationTrainingArguments") -> None:
    from ..training.teacher_trainer import train_teacher

    check_trackers(arguments.report_to)
    train_teacher(teacher, data, arguments)

"""An ENGINE training run and the grid of operators, for `hf-deqnar energy` and `scripts/train_energy.py`."""

import copy
import itertools
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from ..data.parallel_text import Pair
from ..data.tokenized_dataset import TokenizedPairs
from ..distillation.teachers import Teacher, fingerprint_of_teacher
from ..evaluation.metrics import score
from ..evaluation.translation import Translations
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.reranking import check_same_tokens
from ..objectives.energy import OPERATORS, check_student, check_teacher, written_tokens
from ..utils.files import check_writable, write_json
from ..utils.fingerprints import fingerprint_of
from .arguments import (
    CorpusArguments,
    DataArguments,
    DeqNarTrainingArguments,
    ModelArguments,
    TranslationTrainingArguments,
)
from .base_trainer import VALIDATION_BATCH_SIZE
from .energy_trainer import EnergyTrainer, EnergyTrainingArguments
from .run import (
    OPTIMISATION,
    SETTINGS,
    beyond_defaults,
    check_same_run,
    locked_output,
    prepare,
    read_corpus,
    read_run,
    settings_of,
    start_or_resume,
    tokenize,
    train,
    train_and_save,
    validation_set,
)
from .samplers import collate
from .teacher_trainer import SIZES, TeacherArguments, train_teacher

GRID = "grid.json"
RESUME_SETTINGS = f"decoder_input_operator target_operator temperature forbid_early_end max_nfe {OPTIMISATION}"
FIGURES = ("discrete_energy", "energy", "reference_length_bleu", "bleu", "chrf", "length_ratio")


# Options without effect on the grid, and the reason.
SET_BY_THE_GRID = {
    "max_steps": "every pair is trained for grid_steps updates",
    "num_train_epochs": "every pair is trained for grid_steps updates",
    "decoder_input_operator": "every pair of operators is trained",
    "target_operator": "every pair of operators is trained",
    "eval_strategy": "every pair is evaluated once, after training",
    "early_stopping_patience": "every pair is evaluated once, after training",
    "save_strategy": "only metrics are saved",
}


@dataclass
class EnergyArguments:
    """Student, teacher, and the operator grid."""

    student: str = field(
        metadata={"help": "Directory or hub id of a model trained with cmlm or glat; or bilstm, see pair_steps."}
    )
    teacher: str = field(
        metadata={"help": "A seq2seq model with the vocabulary of the student; or lstm, see pair_steps."}
    )
    pair_steps: int = field(
        default=2000,
        metadata={"help": "Updates of the recurrent models, which --student bilstm --teacher lstm trains first."},
    )
    pair_size: str = field(default="tiny", metadata={"help": f"Size of the recurrent models: {', '.join(SIZES)}."})
    pair_vocab_size: int = field(default=4000, metadata={"help": "Vocabulary size of the recurrent models."})
    pair_learning_rate: float = field(
        default=2e-3, metadata={"help": "Learning rate of the recurrent models, with a tenth of warm-up."}
    )
    operator_grid: bool = field(default=False, metadata={"help": "Train and compare all pairs of operators."})
    grid_steps: int = field(default=100, metadata={"help": "Updates of every pair of the grid."})
    json: str | None = field(default=None, metadata={"help": "Also write the metrics to this file."})

    def __post_init__(self) -> None:
        for name in ("grid_steps", "pair_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if (self.student == "bilstm") != (self.teacher == "lstm"):
            raise ValueError("The recurrent models are trained together: use --student bilstm --teacher lstm.")
        check_writable(None if self.json is None else Path(self.json))


def check_effects(names: EnergyArguments, arguments: EnergyTrainingArguments) -> None:
    """Raise ValueError for options without effect."""
    for entry in fields(names):
        value = getattr(names, entry.name)
        needed = None
        if entry.name == "grid_steps" and not names.operator_grid:
            needed = "--operator-grid"
        if entry.name.startswith("pair_") and names.student != "bilstm":
            needed = "--student bilstm --teacher lstm"
        if needed is not None and value != entry.default:
            raise ValueError(f"{entry.name}={value} has no effect without {needed}.")
    if names.student == "bilstm" and arguments.optimizer is not None:
        raise ValueError(f"optimizer={arguments.optimizer} does not support LSTMs; leave it unset.")
    if names.operator_grid:
        check_grid(arguments)


def check_grid(arguments: EnergyTrainingArguments) -> None:
    """Raise ValueError for options without effect on the grid."""
    for entry in fields(arguments):
        value = getattr(arguments, entry.name)
        if entry.name in SET_BY_THE_GRID and value != entry.default:
            value = getattr(value, "value", value)
            raise ValueError(
                f"{entry.name}={value} has no effect on the operator grid: {SET_BY_THE_GRID[entry.name]}. Leave it out."
            )
    if arguments.world_size > 1:
        raise ValueError(f"The operator grid runs in one process, not in {arguments.world_size}.")


@dataclass
class Setting:
    """A student, its teacher, and the tokenized corpora."""

    student: DeqNarForConditionalGeneration
    teacher: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    train: TokenizedPairs
    validation: Any
    names: EnergyArguments

    def trainer(self, arguments: EnergyTrainingArguments, student: DeqNarForConditionalGeneration) -> EnergyTrainer:
        set_seed(arguments.seed)
        return EnergyTrainer(
            student,
            arguments,
            teacher=self.teacher,
            train_dataset=self.train.dataset,
            eval_dataset=self.validation,
            processing_class=self.tokenizer,
        )

    def identity(self) -> dict[str, Any]:
        """Settings besides the arguments that must be identical when resuming."""
        models = {"config": self.student, "teacher_config": self.teacher}
        configs = {name: beyond_defaults(model.config) for name, model in models.items()}
        texts = {"data": self.train.fingerprint, "validation": fingerprint_of(map(str, self.validation["references"]))}
        pair = {"student": self.student, "teacher": self.teacher}
        weights = {
            f"{name}_weights": fingerprint_of_teacher(Teacher(name, model, self.tokenizer))
            for name, model in pair.items()
        }
        return {**configs, **weights, **texts}


def make_recurrent_pair(
    names: EnergyArguments, data: CorpusArguments, arguments: EnergyTrainingArguments
) -> EnergyArguments:
    """Train the models of ENGINE's table 1: an LSTM teacher, and a BiLSTM with cross-entropy.

    Both are separate runs in the output folder, which are resumed if interrupted; returns their names.
    """
    output = Path(arguments.output_dir)
    shared = {"max_steps": names.pair_steps, "learning_rate": names.pair_learning_rate, "warmup_steps": 0.1}
    shared |= {"max_tokens": arguments.max_tokens, "seed": arguments.seed, "use_cpu": arguments.use_cpu}
    shared |= {"report_to": arguments.report_to, "disable_tqdm": arguments.disable_tqdm}
    shared |= {"eval_strategy": "steps", "save_strategy": "steps"}
    shared |= dict.fromkeys(("eval_steps", "save_steps"), max(1, names.pair_steps // 10))
    texts = {entry.name: getattr(data, entry.name) for entry in fields(CorpusArguments)}
    train_teacher(
        TeacherArguments(architecture="lstm", size=names.pair_size),
        DataArguments(**texts, vocab_size=names.pair_vocab_size),
        TranslationTrainingArguments(str(output / "teacher"), **shared),
    )
    layers = ["architecture=bilstm", "refinement=stacked", "encoder_layers=2", "decoder_layers=2"]
    train(
        ModelArguments(preset=names.pair_size, config=layers),
        DataArguments(**texts, tokenizer=str(output / "teacher")),
        DeqNarTrainingArguments(str(output / "student"), objective="ce", **shared),
    )
    return replace(names, student=str(output / "student"), teacher=str(output / "teacher"))


def set_up(
    names: EnergyArguments,
    student: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    teacher: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    data: CorpusArguments,
    arguments: EnergyTrainingArguments,
) -> Setting:
    """Check that student and teacher are compatible, and tokenize the texts."""
    if data.validation_data is None:
        raise ValueError("Give --validation_data: the energy on it selects the final weights.")
    (model, tokenizer), (teacher_model, teacher_tokenizer) = student, teacher
    if not isinstance(model, DeqNarForConditionalGeneration):
        raise ValueError(f"{names.student} is a {model.config.model_type} model; the student must be a deqnar model.")
    check_student(model.config)
    check_same_tokens(tokenizer, teacher_tokenizer, names.teacher)
    check_teacher(teacher_model, model.config.vocab_size)
    longest = getattr(teacher_model.config, "max_position_embeddings", None)
    if longest is not None and data.max_length > longest:
        raise ValueError(f"max_length={data.max_length}, but the teacher supports {longest} tokens; lower it.")
    pairs = read_corpus(data)
    with arguments.main_process_first(local=False, desc="tokenizing"):
        train = tokenize(pairs, tokenizer, model.config, data)
    return Setting(model, teacher_model, tokenizer, train, validation_set(data, tokenizer), names)


def train_energy(setting: Setting, arguments: EnergyTrainingArguments) -> dict[str, dict[str, float]]:
    """Train the student and save it; returns metrics of the initial student and of the result."""
    log = prepare(arguments)
    log(f"{setting.train.describe()}.")
    with locked_output(arguments):
        settings = {**settings_of(arguments, RESUME_SETTINGS), **setting.identity()}
        checkpoint = start_or_resume(arguments, settings, log)
        trainer = setting.trainer(arguments, setting.student)
        output = Path(arguments.output_dir)
        if "student" not in read_run(output):
            given = measure(trainer, "given")
            if arguments.should_save:
                write_json(output / SETTINGS, {**read_run(output), "student": given})
        else:
            given = read_run(output)["student"]
        train_and_save(trainer, checkpoint, log)
        return {"student": given, "result": measure(trainer, "result")}


def operator_grid(setting: Setting, arguments: EnergyTrainingArguments) -> dict[str, Any]:
    """Every pair of operators, each trained for `grid_steps` updates from the same student (ENGINE table 2).

    Metrics are written to the folder after each pair; an interrupted pair is trained again.
    """
    check_grid(arguments)
    log = prepare(arguments)
    log(f"{setting.train.describe()}.")
    output = Path(arguments.output_dir)
    arguments = replace(
        arguments,
        max_steps=setting.names.grid_steps,
        eval_strategy="no",
        save_strategy="no",
        early_stopping_patience=None,
    )
    shared = " ".join(name for name in RESUME_SETTINGS.split() if not name.endswith("_operator"))
    settings = {**settings_of(arguments, f"max_steps {shared}"), **setting.identity()}
    grid = {"settings": settings, "student": None, "cells": {}}
    with locked_output(arguments):
        if (output / GRID).is_file():
            grid = {**grid, **check_same_run(output, settings, GRID)}
        if grid["student"] is None:
            grid["student"] = measure(setting.trainer(arguments, copy.deepcopy(setting.student)), "given")
            write_json(output / GRID, grid)
        for decoder_input, target in itertools.product(OPERATORS, OPERATORS):
            name = f"{decoder_input} {target}"
            if name in grid["cells"]:
                continue
            operators = {"decoder_input_operator": decoder_input, "target_operator": target}
            trainer = setting.trainer(replace(arguments, **operators), copy.deepcopy(setting.student))
            trainer.train()
            grid["cells"][name] = found = measure(trainer, "cell")
            write_json(output / GRID, grid)
            log(f"{name}: energy {found['discrete_energy']:.2f}, BLEU {found['reference_length_bleu']:.2f}")
    return grid


def measure(trainer: EnergyTrainer, name: str) -> dict[str, float]:
    """Energies and BLEU on the validation set, the latter with reference lengths and with predicted ones."""
    figures = trainer.evaluate(metric_key_prefix=name)
    found = {key.removeprefix(f"{name}_"): value for key, value in figures.items()}
    found["reference_length_bleu"] = reference_length_bleu(
        trainer.model, trainer.processing_class, trainer.eval_dataset, trainer.args.device
    )
    return {key: found[key] for key in FIGURES}


@torch.no_grad()
def reference_length_bleu(
    model: DeqNarForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, dataset: Any, device: torch.device
) -> float:
    """BLEU of the student with the reference lengths given, as in ENGINE's tables 2 and 5."""
    training = model.training
    model.eval()
    start = time.perf_counter()
    lengths = [len(labels) for labels in dataset["labels"]]
    order = sorted(range(len(dataset)), key=lengths.__getitem__)
    texts = [""] * len(dataset)
    for first in range(0, len(order), VALIDATION_BATCH_SIZE):
        places = order[first : first + VALIDATION_BATCH_SIZE]
        batch = collate([dataset[place] for place in places], model.config.pad_token_id)
        batch = {name: values.to(device) for name, values in batch.items()}
        source = model.prepare(batch["input_ids"], batch["attention_mask"])
        canvas = model.lay_out(source, batch["labels"])
        tokens = written_tokens(model.read(model.solve(source, canvas)), model.config)
        for place, row, length in zip(places, tokens.tolist(), canvas.lengths.tolist(), strict=True):
            written = [token for token in row[:length] if token != model.config.blank_token_id]
            texts[place] = tokenizer.decode(written, skip_special_tokens=True).strip()
    model.train(training)
    pairs = [Pair(*row) for row in zip(dataset["source"], dataset["references"], strict=True)]
    return score(Translations(texts, time.perf_counter() - start), pairs)["bleu"]

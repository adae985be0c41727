"""A small trainer with a real tokenizer and real files; its model trains in a second."""

import pytest
import torch

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.data.tokenized_dataset import tokenize_for_validation, tokenize_pairs
from hf_deqnar.models.deqnar.lengths import LENGTH_MODELS
from hf_deqnar.objectives.objective import parse_objective
from hf_deqnar.training.arguments import DeqNarTrainingArguments
from hf_deqnar.training.base_trainer import canvas_limit
from hf_deqnar.training.energy_trainer import EnergyTrainer, EnergyTrainingArguments
from hf_deqnar.training.trainer import DeqNarTrainer

from ..conftest import SENTENCES, small_model
from ..teachers import small_teacher

PAIRS = [Pair(source, [target]) for source, target in SENTENCES] * 4


def length_for(objective: str) -> str:
    likelihood = parse_objective(objective).likelihood
    return next(name for name, lengths in LENGTH_MODELS.items() if likelihood == lengths.likelihood)


@pytest.fixture
def make_trainer(tmp_path, tokenizer):
    def make(folder: str = "run", model=None, dtype: torch.dtype = torch.float32, prepare=lambda data: data, **options):
        options = {"objective": "ctc+glat", "max_steps": 6, "max_tokens": 100, "logging_steps": 2, **options}
        options = {"learning_rate": 1e-3, "warmup_steps": 2, "use_cpu": True, "disable_tqdm": True, **options}
        options = {"report_to": "none", "save_strategy": "no", "seed": 7, **options}
        fields = {"length": length_for(options["objective"]), "vocab_size": len(tokenizer), "max_nfe": 6}
        fields["dag_upsampling"] = 3
        network = small_model(dtype, **{**fields, **(model or {})})
        canvas = canvas_limit(network.config)
        train = tokenize_pairs(PAIRS, tokenizer, max_length=60, canvas=canvas, cache=tmp_path / "cache")
        return DeqNarTrainer(
            network,
            DeqNarTrainingArguments(str(tmp_path / folder), **options),
            train_dataset=prepare(train.dataset),
            eval_dataset=prepare(tokenize_for_validation(PAIRS[:6], tokenizer, max_length=60)),
            processing_class=tokenizer,
        )

    return make


@pytest.fixture
def make_energy_trainer(tmp_path, tokenizer):
    def make(folder: str = "run", model: dict | None = None, teacher: str | torch.nn.Module = "marian", **options):
        options = {"max_steps": 6, "max_tokens": 100, "logging_steps": 2, "learning_rate": 1e-3, "seed": 7, **options}
        options = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", **options}
        options = {"save_strategy": "no", "eval_strategy": "no", **options}
        train = tokenize_pairs(PAIRS, tokenizer, max_length=60, cache=tmp_path / "cache")
        return EnergyTrainer(
            small_model(torch.float32, **{"vocab_size": len(tokenizer), "max_nfe": 6, **(model or {})}),
            EnergyTrainingArguments(str(tmp_path / folder), **options),
            teacher=small_teacher(teacher, len(tokenizer)) if isinstance(teacher, str) else teacher,
            train_dataset=train.dataset,
            eval_dataset=tokenize_for_validation(PAIRS[:6], tokenizer, max_length=60),
            processing_class=tokenizer,
        )

    return make

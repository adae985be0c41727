"""A whole training run: data, tokenizer, model, trainer, result. `hf-deqnar train` and `scripts/train.py` call it."""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase, set_seed
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..configuration_deqnar import DeqNarConfig
from ..corpus.candidates import read_candidates, tokenize_candidates
from ..corpus.reading import Pair, read_parallel
from ..corpus.tokenized import TokenizedPairs, tokenize_for_validation, tokenize_pairs
from ..corpus.tokenizer import train_tokenizer
from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..objectives.objective import Objective, check_objective
from ..objectives.targets import dynamically_distilled
from .allocator import keep_freed_memory
from .arguments import DataArguments, DeqNarTrainingArguments, ModelArguments, parse_arguments
from .trainer import DeqNarTrainer, objective_of

SETTINGS = "run.json"

# Settings that decide which weights come out; a run that goes on must have the same.
DECISIVE = (
    "objective correction correction_share initial jacobian random_nfe max_nfe denoising_steps gamma beta max_tokens "
    "learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon optim max_grad_norm "
    "label_smoothing_factor gradient_accumulation_steps seed data_seed"
)


def main(arguments: list[str] | None = None, program: str | None = None) -> None:
    """Parse, train, save. A run whose folder holds checkpoints goes on from the last of them."""
    kinds = (ModelArguments, DataArguments, DeqNarTrainingArguments)
    train(*parse_arguments(kinds, arguments, program))


def train(model_arguments: ModelArguments, data: DataArguments, arguments: DeqNarTrainingArguments) -> DeqNarTrainer:
    """One run, from texts to a saved model in `arguments.output_dir`."""
    output = Path(arguments.output_dir)
    logging.disable_progress_bar()  # of files being written; training has its own
    say = functools.partial(print, file=sys.stderr) if arguments.should_log else lambda text: None
    if arguments.device.type == "cpu":
        kept = keep_freed_memory()
        say(kept or "The allocator is left as it is.")
    if data.validation_data is None and arguments.eval_strategy != "no":
        raise ValueError(f"eval_strategy={arguments.eval_strategy.value} needs --validation_data.")
    pairs, candidates = read_training_data(data, arguments)
    with arguments.main_process_first(desc="tokenizing"):
        tokenizer = find_tokenizer(model_arguments, data, pairs, output)
        set_seed(arguments.seed)
        model = find_model(model_arguments, tokenizer)
        check_objective(objective_of(arguments), model.config)
        tokenized = tokenize(pairs, tokenizer, model.config, data, candidates)
    left_out = ", ".join(f"{count:,} {fate}" for fate, count in tokenized.left_out.items()) or "none"
    used = f"{len(tokenized.dataset):,} of {len(pairs):,} pairs are used"
    say(f"{used} (left out: {left_out}); {len(tokenizer):,} tokens.")
    if candidates is not None:
        gamma = " ".join(f"{weight:g}" for weight in arguments.gamma)
        say(f"gamma is {gamma}; {tokenized.replaced:,} unusable candidates are replaced by their raw target.")
    validation = None
    if data.validation_data is not None:
        pairs = read_parallel(data.validation_data, data.source, data.target)[: data.validation_limit]
        validation = tokenize_for_validation(pairs, tokenizer, max_length=data.max_length)

    settings = {name: plain(getattr(arguments, name)) for name in DECISIVE.split()}
    settings |= {"model": model_arguments.model, "config": model.config.to_diff_dict(), "data": tokenized.fingerprint}
    checkpoint = get_last_checkpoint(str(output)) if output.is_dir() else None
    with arguments.main_process_first(desc="settings"):
        if checkpoint is not None:
            check_same_run(output, settings)
        elif arguments.should_save:
            output.mkdir(parents=True, exist_ok=True)
            write_json(output / SETTINGS, {"settings": settings})
    trainer = DeqNarTrainer(
        model, arguments, train_dataset=tokenized.dataset, eval_dataset=validation, processing_class=tokenizer
    )
    if checkpoint is not None:
        say(f"Going on from {checkpoint}.")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()
    return trainer


def read_training_data(
    data: DataArguments, arguments: DeqNarTrainingArguments
) -> tuple[list[Pair], list[list[str]] | None]:
    """The training pairs, and for Dynamic KD their candidates, for which `arguments` get a γ each."""
    if objective_of(arguments).target is not dynamically_distilled:
        return read_parallel(data.train_data, data.source, data.target)[: data.train_limit], None
    pairs, candidates = (
        part[: data.train_limit] for part in read_candidates(data.train_data, data.source, data.target)
    )
    arguments.gamma = gamma_for(len(candidates[0]), arguments.gamma)
    return pairs, candidates


def gamma_for(count: int, gamma: list[float] | None = None) -> list[float]:
    """One weight per candidate: those given, else the paper's if there are as many candidates as there, else ones."""
    if gamma is None:
        return list(Objective.gamma) if count == len(Objective.gamma) else [1.0] * count
    if len(gamma) != count:
        raise ValueError(f"gamma has {len(gamma)} weights but the data {count} candidates per sentence; give {count}.")
    return gamma


def find_tokenizer(
    model_arguments: ModelArguments, data: DataArguments, pairs: list[Pair], output: Path
) -> PreTrainedTokenizerBase:
    """The named tokenizer, the model's own, the one this run trained before, or a new one."""
    name = data.tokenizer or model_arguments.model
    folder = output / "tokenizer"
    if name is None and folder.is_dir():
        name = str(folder)
    if name is not None:
        try:
            return AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{name} has no tokenizer that can be loaded; save it there with save_pretrained."
            ) from error
    texts = (text for pair in pairs for text in (pair.source, pair.references[0]))
    tokenizer = train_tokenizer(texts, data.vocab_size)
    unfinished = output / "_tokenizer"
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, folder)
    return tokenizer


def find_model(arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> DeqNarForConditionalGeneration:
    """The named model, with its configuration changed where asked; or a new one."""
    special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "blank": "<blank>"}
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in special.values() if token not in vocabulary]
    if arguments.model is not None:
        model = DeqNarForConditionalGeneration.from_pretrained(arguments.model, **arguments.settings())
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens but {arguments.model} only {model.config.vocab_size}; "
                "they do not belong together."
            )
        return model
    if missing:
        raise ValueError(f"The tokenizer has no {missing[0]}; add it, or let the run train a tokenizer.")
    tokens = {f"{name}_token_id": vocabulary[token] for name, token in special.items()}
    fields = {"vocab_size": len(tokenizer), **tokens, **arguments.settings()}
    return DeqNarForConditionalGeneration(DeqNarConfig.preset(arguments.preset, **fields))


def tokenize(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerBase,
    config: DeqNarConfig,
    data: DataArguments,
    candidates: list[list[str]] | None = None,
) -> TokenizedPairs:
    canvas = config.ctc_upsampling if config.length == "ctc" else None
    longest = config.max_position_embeddings // (canvas or 1)
    if data.max_length > longest:
        raise ValueError(f"max_length={data.max_length}, but the model takes {longest} tokens; lower it.")
    options = {"max_length": data.max_length, "canvas": canvas, "cache": data.cache_dir}
    if candidates is None:
        return tokenize_pairs(pairs, tokenizer, **options)
    return tokenize_candidates(pairs, candidates, tokenizer, **options, processes=data.preprocessing_processes)


def check_same_run(output: Path, settings: dict[str, Any]) -> None:
    """A run may go on only as it began, else its result would be nobody's."""
    path = output / SETTINGS
    if not path.is_file():
        raise ValueError(f"{output} holds checkpoints of something else; choose another output_dir.")
    before = json.loads(path.read_text(encoding="utf-8"))["settings"]
    for name, value in json.loads(json.dumps(settings)).items():
        if before.get(name) != value:
            if isinstance(value, dict):
                name, value, before = next(
                    (key, value.get(key), before[name])
                    for key in sorted({*value, *before[name]})
                    if value.get(key) != before[name].get(key)
                )
            raise ValueError(
                f"{output} holds a run with {name}={before.get(name)}, but now it is {value}; choose another "
                "output_dir, or go on as it began."
            )


def plain(value: Any) -> Any:
    """An enumeration's value; anything else as it is."""
    return getattr(value, "value", value)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)

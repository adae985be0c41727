"""A training run: data, tokenizer, model, trainer, result. `hf-deqnar train` and `scripts/train.py` call it."""

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from ..data.name_augmentation import vary_names
from ..data.ngram_counts import remove_ngrams
from ..data.number_augmentation import vary_numbers
from ..data.parallel_text import Pair, evenly_spaced, read_parallel
from ..data.surface_augmentation import join_pairs, vary_surface
from ..data.tokenized_dataset import TokenizedPairs, tokenize_for_validation, tokenize_pairs
from ..data.tokenizer import load_tokenizer, train_tokenizer
from ..data.word_augmentation import vary_words
from ..distillation.candidates import read_candidates, tokenize_candidates
from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.reranking import check_same_tokens
from ..models.deqnar.text import longest_source
from ..objectives.objective import Objective, check_objective, length_model_of
from ..objectives.targets import dynamically_distilled
from ..utils.files import read_json, reading_weights, write_json
from ..utils.fingerprints import fingerprint_of, fingerprint_of_weights
from ..utils.locks import try_lock
from .arguments import (
    AUGMENTATIONS,
    CorpusArguments,
    DataArguments,
    DeqNarTrainingArguments,
    ModelArguments,
    TranslationTrainingArguments,
    parse_arguments,
)
from .base_trainer import WRITING_ERRORS, TranslationTrainer, canvas_limit, last_intact_checkpoint
from .schedule import WarnOfShortTraining
from .trainer import DeqNarTrainer, objective_of

SETTINGS = "run.json"
ORIGIN = "trained_on.json"  # beside a tokenizer: what it was made from

# Settings that decide which weights come out; must be identical when a run resumes.
OPTIMISATION = (
    "max_tokens learning_rate lr_scheduler_type warmup_steps weight_decay adam_beta1 adam_beta2 adam_epsilon optim "
    "optimizer max_grad_norm label_smoothing_factor subword_dropout subword_dropout_target "
    "gradient_accumulation_steps seed data_seed max_steps "
    "num_train_epochs lr_scheduler_kwargs bf16 fp16 average_best metric_for_best_model ema_decay"
)
RESUME_SETTINGS = (
    "objective correction correction_share initial jacobian random_nfe noisy_start max_nfe glance_nfe denoising_steps "
    "state_weights segment_nfe detach_states truth_share damage_share random_segments equilibrium_weight "
    "overlap_weight layer_weight sampled_words "
    f"gamma beta {OPTIMISATION}"
)


def main(arguments: list[str] | None = None, program: str | None = None) -> None:
    """Parse, train, save. A run whose folder holds checkpoints resumes from the last one."""
    kinds = (ModelArguments, DataArguments, DeqNarTrainingArguments)
    train(*parse_arguments(kinds, arguments, program))


def train(model_arguments: ModelArguments, data: DataArguments, arguments: DeqNarTrainingArguments) -> DeqNarTrainer:
    """One run, from texts to a saved model in `arguments.output_dir`."""

    def make_model(tokenizer: PreTrainedTokenizerBase) -> DeqNarForConditionalGeneration:
        model = find_model(model_arguments, tokenizer, objective_of(arguments))
        check_objective(objective_of(arguments), model.config)
        return model

    pairs, candidates = read_training_data(data, arguments)
    names = {"resume_settings": RESUME_SETTINGS, "start": model_arguments.start}
    return run_training(pairs, data, arguments, make_model, DeqNarTrainer, candidates=candidates, **names)


def run_training(
    pairs: list[Pair],
    data: DataArguments,
    arguments: TranslationTrainingArguments,
    make_model: Callable[[PreTrainedTokenizerBase], PreTrainedModel],
    make_trainer: Callable[..., TranslationTrainer],
    *,
    resume_settings: str,
    start: str | None = None,
    candidates: list[list[str]] | None = None,
) -> TranslationTrainer:
    """Tokenize, make the model, train or resume, save.

    Args:
        make_model: from the tokenizer to the model; called after seeding.
        make_trainer: from model, arguments, data sets and tokenizer to the trainer.
        resume_settings: names of the arguments that must be identical when a run resumes.
        start: the model that training starts from, whose tokenizer is then used; None for a new one.
        candidates: of every pair, for Dynamic KD.
    """
    log = prepare(arguments)
    arguments.set_evaluation(data.validation_data is not None)
    if data.validation_data is None and arguments.eval_strategy != "no":
        raise ValueError(f"eval_strategy={arguments.eval_strategy.value} needs --validation_data.")
    if data.validation_data is not None and arguments.eval_strategy == "no":
        raise ValueError(
            f"--validation_data {data.validation_data} is unused; set --eval_strategy steps or epoch, or leave it out."
        )
    with locked_output(arguments):
        with arguments.main_process_first(local=False, desc="tokenizing"):
            tokenizer = find_tokenizer(data.tokenizer or start, data, pairs, Path(arguments.output_dir))
            if start is not None:
                check_belongs(tokenizer, start, data)
            set_seed(arguments.seed)
            model = make_model(tokenizer)
            tokenized = tokenize(pairs, tokenizer, model.config, data, candidates)
        # After tokenizing, which counts and drops longer pairs: no warning about them is needed.
        tokenizer.model_max_length = longest_source(model.config) or tokenizer.model_max_length
        log(f"{tokenized.describe()}; {len(tokenizer):,} tokens, {model.num_parameters():,} parameters.")
        if candidates is not None:
            gamma = " ".join(f"{weight:g}" for weight in arguments.gamma)
            log(f"gamma is {gamma}; {tokenized.replaced:,} unusable candidates are replaced by their raw target.")
        validation = None if data.validation_data is None else validation_set(data, tokenizer)
        settings = settings_of(arguments, resume_settings)
        settings |= {"config": beyond_defaults(model.config), "data": tokenized.fingerprint}
        settings["starting_weights"] = None if start is None else fingerprint_of_weights(model)
        settings["validation"] = None if validation is None else fingerprint_of(map(str, validation["references"]))
        checkpoint = start_or_resume(arguments, settings, log)
        datasets = {"train_dataset": tokenized.dataset, "eval_dataset": validation}
        trainer = make_trainer(model, arguments, **datasets, processing_class=tokenizer)
        if start is None:
            trainer.add_callback(WarnOfShortTraining())
        train_and_save(trainer, checkpoint, log)
        return trainer


@contextmanager
def locked_output(arguments: TranslationTrainingArguments) -> Iterator[None]:
    """Lock the output folder; the lock of a dead process is taken over."""
    output = Path(arguments.output_dir)
    if not arguments.should_save:  # the main process acquires the lock
        yield
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"output_dir={output} cannot be made ({error.strerror}); choose another.") from error
    lock = output / "run.lock"
    with try_lock(lock) as acquired:
        if not acquired:
            raise ValueError(
                f"Another run is writing to {output}; wait for it, choose another output_dir, or, if there is none, "
                f"remove {lock}."
            )
        yield


def prepare(arguments: TranslationTrainingArguments) -> Callable[[str], None]:
    """Set the process up for training; returns a function that logs on the main process."""
    logging.disable_progress_bar()  # of files being written; training has its own
    return functools.partial(print, file=sys.stderr) if arguments.should_log else lambda text: None


def validation_set(data: CorpusArguments, tokenizer: PreTrainedTokenizerBase) -> Any:
    every = read_parallel(data.validation_data, data.source, data.target)
    pairs = [every[place] for place in evenly_spaced(every, data.validation_limit)]
    return tokenize_for_validation(pairs, tokenizer, max_length=data.max_length)


def start_or_resume(
    arguments: TranslationTrainingArguments, settings: dict[str, Any], log: Callable[[str], None]
) -> str | None:
    """The checkpoint to resume from, if its settings are identical; None for a new run, whose settings are written."""
    output = Path(arguments.output_dir)
    checkpoint = last_intact_checkpoint(output)
    with arguments.main_process_first(local=False, desc="settings"):
        if checkpoint is not None or (output / "config.json").is_file():
            run = check_same_run(output, settings)
            if run["processes"] != arguments.world_size:
                log(
                    f"This run was started with {run['processes']} processes and resumes with {arguments.world_size}: "
                    "the batches are the same, random draws are not."
                )
        elif arguments.should_save:
            output.mkdir(parents=True, exist_ok=True)
            write_json(output / SETTINGS, {"settings": settings, "processes": arguments.world_size, "finished": False})
    return checkpoint


def train_and_save(trainer: TranslationTrainer, checkpoint: str | None, log: Callable[[str], None]) -> None:
    """Train or resume, and save; a finished run is not changed."""
    output = Path(trainer.args.output_dir)
    if read_run(output)["finished"]:
        log(f"{output} contains a finished run; nothing to do.")
        trainer._load_from_checkpoint(str(output))
        return
    if checkpoint is not None:
        log(f"Resuming from {checkpoint}.")
    trainer.train(resume_from_checkpoint=checkpoint)
    try:
        trainer.save_model()
        trainer.save_state()
    except WRITING_ERRORS as error:
        raise OSError(f"The model could not be written to {output} ({error}); its checkpoints are intact.") from error
    if trainer.args.should_save:
        write_json(output / SETTINGS, {**read_run(output), "finished": True})


def read_corpus(data: CorpusArguments) -> list[Pair]:
    """The pairs of all files of `train_data`, up to `train_limit`."""
    pairs = [pair for path in data.train_data for pair in read_parallel(path, data.source, data.target)]
    return pairs[: data.train_limit]


def read_pairs(data: DataArguments, seed: int) -> list[Pair]:
    """The training pairs, augmented as the options say."""
    pairs = read_corpus(data)
    if data.vary_words:
        pairs = vary_words(pairs, data.vary_words, seed)
    if data.vary_names or data.vary_listed_names:
        pairs = vary_names(pairs, data.vary_names, seed, list_share=data.vary_listed_names)
    if data.vary_numbers:
        pairs = vary_numbers(pairs, data.vary_numbers, seed)
    if data.join_pairs:
        pairs = join_pairs(pairs, data.join_pairs, seed)
    return vary_surface(pairs, data.vary_surface, seed) if data.vary_surface else pairs


def read_training_data(
    data: DataArguments, arguments: DeqNarTrainingArguments
) -> tuple[list[Pair], list[list[str]] | None]:
    """The training pairs, and for Dynamic KD their candidates, for which `arguments` get a γ each."""
    if objective_of(arguments).target is not dynamically_distilled:
        return read_pairs(data, arguments.seed), None
    for option in AUGMENTATIONS:
        if getattr(data, option):
            raise ValueError(f"{option}={getattr(data, option)} has no candidates for dynamic_kd; leave it out.")
    if len(data.train_data) > 1:
        raise ValueError(f"dynamic_kd takes one file of candidates, not {len(data.train_data)}.")
    pairs, candidates = (
        part[: data.train_limit] for part in read_candidates(data.train_data[0], data.source, data.target)
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


def find_tokenizer(name: str | None, data: DataArguments, pairs: list[Pair], output: Path) -> PreTrainedTokenizerBase:
    """The named tokenizer, the one this run trained before, or a new one."""
    folder = output / "tokenizer"
    vocabulary = 8000 if data.vocab_size is None else data.vocab_size
    texts = [text for pair in pairs for text in (pair.source, pair.references[0])]
    origin = {"vocab_size": vocabulary, "texts": fingerprint_of(texts)}
    if name is None and (folder / ORIGIN).is_file():
        if read_json(folder / ORIGIN, remedy=f"remove {folder}, and it is made anew") == origin:
            name = str(folder)
        elif get_last_checkpoint(str(output)) is not None:
            raise ValueError(
                f"{folder} was trained on other texts or for another vocab_size; choose another output_dir."
            )
    if name is not None:
        return load_tokenizer(name)
    tokenizer = train_tokenizer(texts, vocabulary)
    unfinished = output / "_tokenizer"
    tokenizer.save_pretrained(unfinished)
    write_json(unfinished / ORIGIN, origin)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)
    return tokenizer


def check_belongs(tokenizer: PreTrainedTokenizerBase, start: str, data: DataArguments) -> None:
    """A model that training starts from has its tokenizer, and there is no other vocabulary to choose."""
    if data.vocab_size is not None:
        raise ValueError(f"vocab_size={data.vocab_size} has no effect: {start} has its vocabulary; leave it out.")
    if data.tokenizer is not None:
        check_same_tokens(load_tokenizer(start), tokenizer, data.tokenizer)


def find_model(
    arguments: ModelArguments, tokenizer: PreTrainedTokenizerBase, objective: Objective | None = None
) -> DeqNarForConditionalGeneration:
    """The named model, one made from the named teacher or backbone, or a new one; configured as asked.

    A new model, and one made from a teacher, has the length model of the objective's likelihood unless `config` sets
    another: `ctc+glat` implies `length=ctc`.
    What was counted for a trained model, its n-grams, is not inherited: `hf-deqnar ngrams` gives the new one its own.
    """
    special = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>", "blank": "<blank>"}
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in special.values() if token not in vocabulary]
    settings = {**({} if objective is None else {"length": length_model_of(objective)}), **arguments.settings()}
    if arguments.start is not None:
        if arguments.model is not None:
            model = remove_ngrams(load_complete(arguments.model, **arguments.settings()))
        elif arguments.teacher is not None:
            with reading_weights(arguments.teacher):
                teacher = AutoModelForSeq2SeqLM.from_pretrained(arguments.teacher)
            model = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, **settings)
        else:
            with reading_weights(arguments.backbone):
                backbone = remove_ngrams(DeqNarForConditionalGeneration.from_pretrained(arguments.backbone))
            model = DeqNarForConditionalGeneration.from_backbone(backbone, **arguments.settings())
        if len(tokenizer) > model.config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(tokenizer)} tokens but {arguments.start} only {model.config.vocab_size}; "
                "they do not belong together."
            )
        return model
    if missing:
        raise ValueError(f"The tokenizer has no {missing[0]}; add it, or let the run train a tokenizer.")
    tokens = {f"{name}_token_id": vocabulary[token] for name, token in special.items()}
    fields = {"vocab_size": len(tokenizer), **tokens, **settings}
    return DeqNarForConditionalGeneration(DeqNarConfig.preset(arguments.preset or "tiny", **fields))


def load_complete(name: str, **settings: Any) -> DeqNarForConditionalGeneration:
    """A model whose weights all find their place in it, with the requested changes of its configuration."""
    asked = ", ".join(f"{key}={value}" for key, value in settings.items())
    with reading_weights(name, f"{asked} would need" if asked else "its config.json describes"):
        model, found = DeqNarForConditionalGeneration.from_pretrained(name, output_loading_info=True, **settings)
    lost = sorted(found["unexpected_keys"])
    if lost:
        raise ValueError(
            f"With {asked} the new configuration has no parameters for {lost[0]} of "
            f"{name}; a stacked model becomes one that seeks equilibria with --backbone."
        )
    if any(key.endswith(".transition.feedback.weight") for key in found["missing_keys"]):
        torch.nn.init.eye_(model.model.transition.feedback.weight)  # default of older checkpoints
    return model


def tokenize(
    pairs: list[Pair],
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    data: CorpusArguments,
    candidates: list[list[str]] | None = None,
) -> TokenizedPairs:
    longest = getattr(config, "max_source_length", config.max_position_embeddings)
    if data.max_length > longest:
        raise ValueError(f"max_length={data.max_length}, but the model takes {longest} tokens; lower it.")
    options = {"max_length": data.max_length, "canvas": canvas_limit(config), "cache": data.cache_dir}
    if candidates is None:
        return tokenize_pairs(pairs, tokenizer, **options)
    return tokenize_candidates(pairs, candidates, tokenizer, **options, processes=data.preprocessing_processes)


DEFAULT = "the default"


def check_same_run(output: Path, settings: dict[str, Any], file: str = SETTINGS) -> dict[str, Any]:
    """The recorded settings of a run, after checking that they are identical; resuming requires that."""
    path = output / file
    if not path.is_file():
        raise ValueError(f"{output} contains a model or checkpoints of another run; choose another output_dir.")
    run = read_run(output, file)
    before = run["settings"]
    for name, value in json.loads(json.dumps(settings)).items():
        if before.get(name) != value:
            if isinstance(value, dict) and isinstance(before.get(name), dict):
                now, then = value, before[name]
                name = next(key for key in sorted({*now, *then}) if now.get(key, DEFAULT) != then.get(key, DEFAULT))
                value, before = now.get(name, DEFAULT), {name: then.get(name, DEFAULT)}
            raise ValueError(
                f"{output} holds a run with {name}={before.get(name)}, but now it is {value}; choose another "
                "output_dir, or resume with the same settings."
            )
    return run


def read_run(output: Path, file: str = SETTINGS) -> dict[str, Any]:
    """What a run, or a grid of runs, has recorded in its settings file."""
    names = ("settings", "processes", "finished") if file == SETTINGS else ("settings",)
    return read_json(output / file, *names, remedy=f"choose another output_dir, or remove {output}")


def beyond_defaults(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields that differ from their defaults. Only these are compared, so a run can resume after an upgrade."""
    usual = type(config)().to_dict()
    given = {name: value for name, value in config.to_diff_dict().items() if name != "transformers_version"}
    return {name: value for name, value in given.items() if name not in usual or usual[name] != value}


def settings_of(arguments: TranslationTrainingArguments, names: str) -> dict[str, Any]:
    """The named fields; an enumeration by its value."""
    values = {name: getattr(arguments, name) for name in names.split()}
    return {name: getattr(value, "value", value) for name, value in values.items()}

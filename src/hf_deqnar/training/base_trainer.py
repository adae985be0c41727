"""Base class of the trainers: token-budget batches, validation by translation, atomic and averaged checkpoints."""

import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    EarlyStoppingCallback,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Seq2SeqTrainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.modeling_utils import unwrap_model
from transformers.trainer_utils import PredictionOutput, TrainOutput, get_last_checkpoint, rotate_checkpoints
from transformers.utils import logging

from ..data.parallel_text import Pair, pairs_of_rows
from ..data.subword_regularization import merges_of
from ..data.tokenized_dataset import CanvasLimit, tokenize_for_validation, tokenize_pairs
from ..evaluation.metrics import score
from ..evaluation.translation import Translations, translate_sentences
from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.generation_deqnar import gathered_weights
from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.text import longest_source
from ..objectives.objective import Term, combine
from ..utils.files import find_damage, write_checksums
from .arguments import TranslationTrainingArguments
from .averaging import (
    MovingAverage,
    average_weights,
    best_steps,
    is_sharded,
    load_weights,
    remove_all_but,
    save_weights,
    whole_weights,
)
from .muon import make_muon
from .samplers import SubwordDropout, TokenBudgetLoader, TokenBudgetSampler, collate, pad
from .schedule import WarnOfWarmup
from .termination import StopOnTermination

logger = logging.get_logger(__name__)

UNFINISHED = "_unfinished"  # transformers does not upload names that begin with an underscore
BEST = "best"
AVERAGED = "averaged"  # what the metrics of the average of the best weights begin with
VALIDATION_BATCH_SIZE = 64  # sentences per batch when validation translates
WRITING_ERRORS = (
    OSError,
    RuntimeError,
    SafetensorError,
)  # exceptions that Python, torch and safetensors raise when the disk is full


class TranslationTrainer(Seq2SeqTrainer):
    """Trains any translation model; subclasses implement `compute_terms`.

    Data sets have `input_ids` and `labels`; the validation set also has `source` and `references` as text, against
    which translations are scored. A data set without `input_ids` is tokenized: its texts are the columns `source` and
    `target`, or those named by the arguments `source` and `target`, which may be languages of a column `translation`.

    Batches have a budget of tokens and depend only on the seed and the epoch, not on the number of processes. After
    training the model has the average of the best weights.

    A checkpoint is written beside the others and is renamed when it is complete, so that a run that was killed at any
    moment resumes from the last one: `trainer.train(resume_from_checkpoint=True)`.
    """

    args: TranslationTrainingArguments

    def __init__(self, model: nn.Module, args: TranslationTrainingArguments, **options) -> None:
        if options.get("processing_class") is None:
            raise ValueError(f"{type(self).__name__} needs processing_class=tokenizer, to score and to save.")
        for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
            if options.get(name) is not None:
                raise ValueError(
                    f"{name} has no effect: the trainer scores translations, and the loss comes from compute_terms."
                )
        columns = {side: options.pop(side, None) for side in ("source", "target")}
        self._tokenize = functools.partial(
            tokenize_raw_texts, tokenizer=options["processing_class"], config=model.config, args=args, **columns
        )
        options["train_dataset"] = self._tokenize(options.get("train_dataset"), "train_dataset", for_training=True)
        options["eval_dataset"] = self._tokenize(options.get("eval_dataset"), "eval_dataset")
        if isinstance(options["eval_dataset"], dict) and args.eval_strategy != "no" and args.average_best:
            raise ValueError(
                "Checkpoints cannot be ranked on several validation sets; give one, or set average_best=0."
            )
        if options["eval_dataset"] is None and args.eval_strategy != "no":
            raise ValueError(f"eval_strategy='{args.eval_strategy}' needs an eval_dataset.")
        if getattr(model.config, "input_predictor", False):
            args.ddp_find_unused_parameters = True  # it is fitted afterwards, and has no part in training
        if args.bf16 and args.device.type == "cpu":
            # The backward pass of torch's fused attention takes a quarter of a step in bfloat16 on a CPU.
            model.set_attn_implementation("eager")
        options.setdefault("data_collator", functools.partial(collate, padding=model.config.pad_token_id))
        super().__init__(model=model, args=args, **options)
        if args.n_gpu > 1:
            raise ValueError(f"One process cannot use {args.n_gpu} devices; start one for each with accelerate launch.")
        for plugin, enabled in (("FSDP", self.is_fsdp_enabled), ("DEEPSPEED", self.is_deepspeed_enabled)):
            if os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true" and not enabled:
                raise ValueError(
                    f"The configuration of accelerate asks for {plugin}, which it ignores on {args.device.type}; use "
                    "DDP, such as examples/accelerate/ddp.yaml."
                )
        self.label_smoother = None  # smoothing is part of the terms
        self.model_accepts_loss_kwargs = False  # else transformers would not divide by the parts of a batch
        if args.enable_jit_checkpoint:
            raise ValueError("enable_jit_checkpoint is not needed: SIGTERM always writes a checkpoint; leave it out.")
        self.add_callback(EvaluateLast())
        self.add_callback(WarnOfWarmup())
        self.moving_average: MovingAverage | None = None
        if args.ema_decay is not None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError("ema_decay averages whole weights, but FSDP and DeepSpeed shard them; leave it unset.")
            self.moving_average = MovingAverage(model, args.ema_decay)
            self.add_callback(UpdateAverage(self.moving_average))
        if args.early_stopping_patience:
            self.add_callback(EarlyStoppingCallback(args.early_stopping_patience))
        self._termination = StopOnTermination(self._in_any_process)
        self.add_callback(self._termination)
        self._average_in_place = False  # whether the model has the moving average instead of its weights
        self._writing_into: Path | None = None
        self._place = (-1, 0)  # the update, and which of its batches
        self._numbers: list[int] = []
        self._rows = 0  # pairs of this process in training
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}  # a term may begin or end between two logs
        self._processor_seconds = time.process_time()  # up to the last log; validation does not count

    def compute_terms(
        self, model: nn.Module, batch: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> dict[str, Term]:
        """The terms of the loss of a batch.

        Args:
            model: the model as it is wrapped for training; its parameters must be used inside its `forward` only.
            progress: the share of training that is done.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement compute_terms.")

    def validation_figures(self, batch: dict[str, Tensor]) -> dict[str, float]:
        """Additional metrics of the first validation batch."""
        return {}

    # ---- Data

    def get_train_dataloader(self) -> TokenBudgetLoader:
        return self._loader(self.train_dataset, shuffle=True)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> TokenBudgetLoader:
        return self._loader(self.eval_dataset if eval_dataset is None else eval_dataset, shuffle=False)

    def get_test_dataloader(self, test_dataset: Any) -> TokenBudgetLoader:
        return self._loader(self._tokenize(test_dataset, "test_dataset"), shuffle=False)

    def _loader(self, dataset: Any, shuffle: bool) -> TokenBudgetLoader:
        lengths = [
            max(len(source), len(target))
            for source, target in zip(dataset["input_ids"], dataset["labels"], strict=True)
        ]
        if "candidates" in dataset.column_names:  # any of which may become the target
            lengths = [
                max(length, *map(len, several)) for length, several in zip(lengths, dataset["candidates"], strict=True)
            ]
        # A validation sentence longer than the budget gets its own batch.
        budget = self.args.max_tokens if shuffle else max(self.args.max_tokens, max(lengths) * self.args.world_size)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        sampler = TokenBudgetSampler(
            lengths,
            budget,
            seed=seed,
            processes=self.args.world_size,
            process=self.args.process_index,
            shuffle=shuffle,
        )
        collator = self.data_collator
        if shuffle and (self.args.subword_dropout or self.args.subword_dropout_target):
            if "number" not in dataset.column_names:
                dataset = dataset.add_column("number", list(range(len(dataset))))
            collator = SubwordDropout(
                collator,
                sampler,
                merges_of(self.processing_class),
                self.args.subword_dropout,
                self.args.subword_dropout_target,
                seed,
                max_length=longest_source(self.model.config) or self.model.config.max_position_embeddings,
                canvas=canvas_limit(self.model.config),
            )
        return TokenBudgetLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    # ---- A step

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Muon if the arguments say so; else as in transformers."""
        if self.args.optimizer == "muon" and self.optimizer is None:
            if self.is_fsdp_enabled or self.is_deepspeed_enabled:
                raise ValueError(
                    "optimizer=muon needs unsharded matrices, but FSDP and DeepSpeed shard them; leave it unset."
                )
            chosen = self.model if model is None else model
            self.optimizer = make_muon(
                chosen,
                self.get_decay_parameter_names(chosen),
                lr=self.args.learning_rate,
                betas=(self.args.adam_beta1, self.args.adam_beta2),
                eps=self.args.adam_epsilon,
                weight_decay=self.args.weight_decay,
                precision=torch.bfloat16 if self.args.bf16 else torch.float32,
            )
        return super().create_optimizer(model)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The loss, divided by the counts of the full batch, independently of how processes share it."""
        numbers = inputs.pop("number", None)
        self._numbers = [] if numbers is None else numbers.tolist()
        progress, generator = self.state.global_step / max(1, self.state.max_steps), self._generator()

        try:
            with self.accelerator.autocast():
                terms = combine(self.compute_terms(model, inputs, progress, generator), self._share)
        except FloatingPointError as error:  # raised by the solver
            raise FloatingPointError(self._not_finite("loss", "not finite")) from error
        loss = terms["loss"]
        if not loss.isfinite():
            raise FloatingPointError(self._not_finite("loss", loss.item()))
        if model.training:
            self._rows += len(inputs["input_ids"])
            for name, value in terms.items():
                if name != "loss":
                    self._sums[name] = self._sums.get(name, 0.0) + value.detach().double()
                    self._counts[name] = self._counts.get(name, 0) + 1
        return (loss, terms) if return_outputs else loss

    def _share(self, counts: Tensor) -> Tensor:
        """Gradients are averaged over processes, so each divides by its share of the sum of all counts."""
        if self.args.world_size == 1:
            return counts
        return self.accelerator.reduce(counts, reduction="sum") / self.args.world_size

    def _in_any_process(self, flag: bool) -> bool:
        if self.args.world_size == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.args.device), reduction="sum") > 0)

    def _generator(self) -> torch.Generator:
        """A generator seeded by the position of the batch, so no random state must be saved."""
        step, part = self._place
        self._place = (self.state.global_step, part + 1 if step == self.state.global_step else 0)
        place = self.state.global_step * self.args.gradient_accumulation_steps + self._place[1]
        seed = (self.args.seed * 1_000_003 + place) * 65_537 + self.args.process_index
        return torch.Generator(device=self.args.device).manual_seed(seed % 2**63)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaled = self.accelerator.scaler is not None  # the gradient scaler skips such updates and lowers its scale
        if not torch.as_tensor(norm).isfinite() and not scaled:
            raise FloatingPointError(self._not_finite("gradient", float(norm)))
        return norm

    def _not_finite(self, what: str, value: Any) -> str:
        last = get_last_checkpoint(self.args.output_dir) if os.path.isdir(self.args.output_dir) else None
        pairs = f", pairs {self._numbers} of the corpus" if self._numbers else ""
        remaining = "no checkpoint was written yet" if last is None else f"the last good checkpoint is {last}"
        return (
            f"The {what} is {value} in update {self.state.global_step + 1}{pairs}; {remaining}. "
            "Lower the learning rate, or look at these pairs."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the averages of the terms since the last log."""
        if "loss" in logs and self._sums:
            averages = torch.stack([total / self._counts[name] for name, total in self._sums.items()]).float()
            averages = self.accelerator.reduce(averages.to(self.args.device), reduction="mean")
            logs |= {name: float(value) for name, value in zip(self._sums, averages, strict=True)}
            self._sums, self._counts = {}, {}
            if self.args.device.type == "cpu":
                now = time.process_time()
                spent, self._processor_seconds = torch.tensor(now - self._processor_seconds), now
                logs["cpu_seconds"] = float(self.accelerator.reduce(spent, reduction="sum"))  # of all processes
        super().log(logs, start_time)

    # ---- Validation

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **options: Any,
    ) -> dict[str, float]:
        """Translate the validation set and score it; also every term of the loss.

        `options` are those of `generate`. Random numbers drawn here do not change training. With `ema_decay`, the
        moving average of the weights is evaluated during training.
        """
        if self.moving_average is not None and self.is_in_train and not self._average_in_place:
            self._average_in_place = True
            try:
                with self.moving_average.in_place_of_weights(self.model):
                    return self.evaluate(eval_dataset, ignore_keys, metric_key_prefix, **options)
            finally:
                self._average_in_place = False
        dataset = self.eval_dataset if eval_dataset is None else self._tokenize(eval_dataset, "eval_dataset")
        if isinstance(dataset, dict):
            figures = {}
            for name, one in dataset.items():
                figures |= self.evaluate(one, metric_key_prefix=f"{metric_key_prefix}_{name}", **options)
            return figures
        start, processor_start = time.perf_counter(), time.process_time()
        training = self.model.training
        self.model.eval()
        devices = [self.args.device] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(self.args.seed)
            figures = {**self._validation_terms(dataset), **self._translate(dataset, options)}
        self.model.train(training)
        figures["runtime"] = time.perf_counter() - start
        figures["samples_per_second"] = len(dataset) / figures["runtime"]
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self._processor_seconds += time.process_time() - processor_start
        self.log(metrics)
        if self.is_in_train and metric_key_prefix == "eval":
            self._save_if_best(metrics)
        if metric_key_prefix != AVERAGED:  # not reported to callbacks such as early stopping
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _validation_terms(self, dataset: Any) -> dict[str, float]:
        """The terms as they would be at the end of training, over the full set."""
        generator = torch.Generator(device=self.args.device).manual_seed(self.args.seed)
        totals: dict[str, Term] = {}
        figures: dict[str, float] = {}
        for number, batch in enumerate(self.get_eval_dataloader(dataset)):
            batch = self._prepare_inputs(batch)
            if number == 0:
                with gathered_weights(self.model):
                    figures = self.validation_figures(batch)
            for name, term in self.compute_terms(self.model, batch, 1.0, generator).items():
                known = totals.setdefault(name, Term(0 * term.total, 0 * term.count, term.weight))
                known.total, known.count = known.total + term.total, known.count + term.count
        for term in totals.values():
            term.total, term.count = (
                self.accelerator.reduce(value.detach().float(), reduction="sum") for value in (term.total, term.count)
            )
        return {name: float(value) for name, value in combine(totals).items()} | figures

    def _translate(self, dataset: Any, options: dict[str, Any]) -> dict[str, float]:
        """BLEU and chrF of real translations; every process translates its part."""
        part = dataset.select(range(self.args.process_index, len(dataset), self.args.world_size))
        with gathered_weights(self.model):  # processes may have different numbers of batches
            found = translate_sentences(
                self.model,
                self.processing_class,
                list(part["source"]),
                VALIDATION_BATCH_SIZE,
                show_progress=False,
                **options,
            )
        texts = [found.texts]
        if self.args.world_size > 1:
            texts = gather_object(texts)
        joined = [""] * len(dataset)
        for process, translated in enumerate(texts):
            joined[process :: self.args.world_size] = translated
        pairs = [Pair(*row) for row in zip(dataset["source"], dataset["references"], strict=True)]
        scored = score(Translations(joined, found.seconds), pairs)
        return {"bleu": scored["bleu"], "chrf": scored["chrf"], "length_ratio": scored["length_ratio"]}

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test", **options: Any
    ) -> PredictionOutput:
        """Token ids of the translations, in the order of the data set, with the figures of `evaluate`."""
        dataset = self._tokenize(test_dataset, "test_dataset")
        metrics = self.evaluate(dataset, metric_key_prefix=metric_key_prefix, **options)
        rows = [dataset[place] for place in range(len(dataset))]
        found, training = [], self.model.training
        self.model.eval()
        for first in range(0, len(rows), VALIDATION_BATCH_SIZE):
            batch = self._prepare_inputs(self.data_collator(rows[first : first + VALIDATION_BATCH_SIZE]))
            found += self.model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **options).tolist()
        self.model.train(training)
        padding = self.model.config.pad_token_id
        labels = pad([row["labels"] for row in rows], -100)
        return PredictionOutput(pad(found, padding).numpy(), labels.numpy(), metrics)

    # ---- Checkpoints

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Tied weights are saved once, so that one of their names is always missing."""
        tied = self.model._tied_weights_keys or {}
        remaining = [name for name in load_result.missing_keys if name not in tied]
        super()._issue_warnings_after_load(type(load_result)(remaining, load_result.unexpected_keys))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in transformers; weights that FSDP2 has sharded are gathered, whatever its `state_dict_type` is."""
        if not any(map(is_sharded, self.model.state_dict().values())):
            super().save_model(output_dir, _internal_call)
            return
        weights, sharded = whole_weights(self.model), type(self.model)
        if self.args.should_save:
            self.model.__class__ = sharded.__bases__[1]  # FSDPModule is the first; with it, its files would be copied
            try:
                self._save(output_dir or self.args.output_dir, state_dict=weights)
            finally:
                self.model.__class__ = sharded

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Write to a temporary folder and rename it when it is complete."""
        output, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        unfinished = output / UNFINISHED
        if self.args.should_save:
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._writing_into = unfinished
        self.state.best_global_step = None  # else it is looked for in the unfinished folder; `best` is our own
        try:
            super()._save_checkpoint(model, trial)
            if self.moving_average is not None and self.args.should_save:
                self.moving_average.save(unfinished / name)
            self.accelerator.wait_for_everyone()  # until all files are written
            if self.args.should_save:
                write_checksums(unfinished / name)
        except WRITING_ERRORS as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(self._not_written(name, error)) from error
        finally:
            self._writing_into = None
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            shutil.rmtree(output / name, ignore_errors=True)
            os.replace(unfinished / name, output / name)
            unfinished.rmdir()
            rotate_checkpoints(output_dir=str(output), save_total_limit=self.args.save_total_limit, use_mtime=False)
            # After the checkpoint: a run resumed from an older one needs the best weights of that time.
            remove_all_but(output / BEST, map(self._best_path, self._best_steps()))
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(output / name))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        average = Path(resume_from_checkpoint) / MovingAverage.FILE
        if self.moving_average is not None and average.is_file():  # a finished model has none
            self.moving_average.load(average.parent)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._writing_into is None else str(self._writing_into)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._writing_into is None:  # not before it has its name
            super()._push_from_checkpoint(checkpoint_folder)

    # ---- The best weights

    def _best_steps(self) -> list[int]:
        metric = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        return best_steps(self.state.log_history, metric, self.args.average_best, self.args.greater_is_better)

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """As in transformers; with several validation sets no best checkpoint is selected."""
        several = isinstance(self.eval_dataset, dict)
        return not several and super()._determine_best_metric(metrics, trial)

    def _best_path(self, step: int) -> Path:
        return Path(self.args.output_dir) / BEST / f"step-{step}.safetensors"

    def _save_if_best(self, metrics: dict[str, float]) -> None:
        metric = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        if metric not in metrics:
            known = ", ".join(name.removeprefix("eval_") for name in metrics)
            raise ValueError(
                f"metric_for_best_model={self.args.metric_for_best_model} is not measured; there are {known}."
            )
        if self.state.global_step not in self._best_steps():
            return
        weights = whole_weights(self.model)
        if not self.args.should_save:
            return
        path = self._best_path(self.state.global_step)
        try:
            save_weights(weights, path)
        except WRITING_ERRORS as error:
            raise OSError(self._not_written(path.name, error)) from error
        if self.args.save_strategy == "no":  # otherwise resuming may need older ones
            remove_all_but(path.parent, map(self._best_path, self._best_steps()))

    def _not_written(self, name: str, error: Exception) -> str:
        last = get_last_checkpoint(self.args.output_dir)
        remaining = "there is no earlier checkpoint" if last is None else f"{last} is intact"
        reason = (
            "probably no space left on the disk" if "iostream error" in str(error) else error
        )  # of torch's C++ code
        return f"{name} could not be written to {self.args.output_dir} ({reason}); {remaining}."

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> TrainOutput:
        """As in transformers; afterwards the model has the average of the best weights.

        A run that had already taken all of its updates is not trained further.
        """
        if resume_from_checkpoint is True:
            resume_from_checkpoint = last_intact_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"There is no checkpoint in {self.args.output_dir} to resume from.")
        elif resume_from_checkpoint and (damage := find_damage(Path(resume_from_checkpoint))):
            raise ValueError(f"{damage}; resume from another checkpoint.")
        if self.args.world_size > 1 and not resume_from_checkpoint:
            torch.manual_seed(self.args.seed + self.args.process_index * 7919)  # each process has its own dropout seed
        if resume_from_checkpoint and self._already_trained(resume_from_checkpoint):
            result = TrainOutput(self.state.global_step, 0.0, {})
        else:
            self._processor_seconds, self._rows = time.process_time(), 0
            with self._termination.listening():
                result = super().train(resume_from_checkpoint=resume_from_checkpoint or None, **options)
        self._take_best()
        return result

    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> TrainOutput:
        """Samples per second from the pairs that were trained on; transformers assumes batches of a fixed size."""
        rows = self.accelerator.reduce(torch.tensor(self._rows, device=self.args.device), reduction="sum").item()
        updates = max(1, self.state.global_step - self._initial_global_step)
        return super()._finalize_training(trial, rows * self.state.max_steps / updates, start_time)

    def _already_trained(self, checkpoint: str) -> bool:
        state = TrainerState.load_from_json(os.path.join(checkpoint, "trainer_state.json"))
        stopping = state.stateful_callbacks.get("EarlyStoppingCallback", {}).get("attributes", {})
        patience = self.args.early_stopping_patience
        stopped = bool(patience) and stopping.get("early_stopping_patience_counter", 0) >= patience
        *_, updates = self.set_initial_training_values(self.args, self.get_train_dataloader())
        if not stopped and updates > state.global_step:
            return False
        self._load_from_checkpoint(checkpoint)
        self.state = state
        return True

    def _take_best(self) -> None:
        """Average the best weights; use the single best checkpoint if it scores higher."""
        self.accelerator.wait_for_everyone()  # until the last of them is written
        paths = [path for path in map(self._best_path, self._best_steps()) if path.is_file()]
        if not paths:
            if self.moving_average is not None:
                self.moving_average.load_into(self.model)
            return
        load_weights(self.model, average_weights(paths))
        if len(paths) == 1:
            return
        averaged = self.evaluate(metric_key_prefix=AVERAGED)
        metric = self.args.metric_for_best_model.removeprefix("eval_")
        scores = {
            entry["step"]: entry[f"eval_{metric}"] for entry in self.state.log_history if f"eval_{metric}" in entry
        }
        alone, sign = scores[self._best_steps()[0]], 1 if self.args.greater_is_better else -1
        better = sign * averaged[f"{AVERAGED}_{metric}"] >= sign * alone
        if not better:
            load_weights(self.model, average_weights(paths[:1]))
        logger.warning(
            f"The average of the best {len(paths)} has a {metric} of {averaged[f'{AVERAGED}_{metric}']:.2f}, the best "
            f"alone {alone:.2f}: the {'average' if better else 'best alone'} is used."
        )


def last_intact_checkpoint(output: str | Path) -> str | None:
    """The last checkpoint in a folder; damaged ones are warned of and passed over, but not all of them.

    Returns:
        None if there is no checkpoint.
    """
    numbers = [path.name.removeprefix("checkpoint-") for path in Path(output).glob("checkpoint-*") if path.is_dir()]
    damaged = []
    for number in sorted((int(text) for text in numbers if text.isdecimal()), reverse=True):
        checkpoint = Path(output) / f"checkpoint-{number}"
        damage = find_damage(checkpoint)
        if damage is None:
            if damaged:
                logger.warning(f"{damaged[0]}; {checkpoint} is used instead.")
            return str(checkpoint)
        damaged.append(damage)
    if damaged:
        raise ValueError(f"{damaged[0]}, and there is no intact checkpoint; remove {output} to start again.")
    return None


class EvaluateLast(TrainerCallback):
    """The last updates are logged and the last weights validated, wherever `logging_steps` and `eval_steps` would have
    stopped: those weights are often the best, and the total time is logged."""

    def on_step_end(
        self, args: TranslationTrainingArguments, state: TrainerState, control: TrainerControl, **rest
    ) -> TrainerControl:
        if state.global_step >= state.max_steps:
            control.should_log = control.should_log or args.logging_strategy == "steps"
            control.should_evaluate = control.should_evaluate or args.eval_strategy == "steps"
        return control


class UpdateAverage(TrainerCallback):
    """Takes the weights into their moving average after every update."""

    def __init__(self, average: MovingAverage) -> None:
        self.average = average

    def on_step_end(
        self, args: TranslationTrainingArguments, state: TrainerState, control: TrainerControl, model: Any, **rest
    ) -> None:
        self.average.update(unwrap_model(model))


def as_dataset(dataset: Any, name: str) -> Any:
    """A `datasets.Dataset`; lists of rows become one, and several validation sets may come in a dict."""
    if dataset is None or isinstance(dataset, Dataset):
        return dataset
    if isinstance(dataset, dict):
        return {key: as_dataset(value, f"{name}['{key}']") for key, value in dataset.items()}
    if isinstance(dataset, list):
        return Dataset.from_list(dataset)
    raise TypeError(f"{name} is a {type(dataset).__name__}; give a datasets.Dataset or a list of rows.")


def tokenize_raw_texts(
    dataset: Any,
    name: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    config: PreTrainedConfig,
    args: TranslationTrainingArguments,
    source: str | None,
    target: str | None,
    for_training: bool = False,
) -> Any:
    """A data set with `input_ids`: the given one, or the result of tokenizing its texts.

    Args:
        dataset: of any type that `as_dataset` takes.
        name: of the data set, for errors.
        tokenizer, config: of the model.
        args: the longest pair that fits into `max_tokens` is the longest that is used for training.
        source, target: columns or languages, as for `pairs_of_rows`.
        for_training: whether invalid pairs are dropped and the result is cached; else long texts are truncated.
    """
    if isinstance(dataset, dict):
        shared = {"tokenizer": tokenizer, "config": config, "args": args, "source": source, "target": target}
        return {key: tokenize_raw_texts(value, f"{name}['{key}']", **shared) for key, value in dataset.items()}
    dataset = as_dataset(dataset, name)
    if dataset is None or "input_ids" in dataset.column_names:
        return dataset
    if "candidates" in dataset.column_names:
        raise ValueError(f"{name} has candidates as text; hf-deqnar train reads and tokenizes them.")
    pairs = pairs_of_rows(dataset, dataset.column_names, source=source, target=target, name=name)
    longest = longest_source(config) or args.max_tokens
    if not for_training:
        return tokenize_for_validation(pairs, tokenizer, max_length=longest)
    with args.main_process_first(local=False, desc="tokenizing"):
        tokenized = tokenize_pairs(
            pairs, tokenizer, max_length=min(longest, args.max_tokens // args.world_size), canvas=canvas_limit(config)
        )
    if tokenized.dropped:
        logger.warning(f"{name}: {tokenized.describe()}.")
    return tokenized.dataset


def canvas_limit(config: PreTrainedConfig) -> CanvasLimit | None:
    """How long a target may be for its source; None without a limit, as for models of other types."""
    if not is_deqnar(config) or config.upsampling == 1:
        return None
    lengths = LENGTH_MODELS[config.length](config)
    return CanvasLimit(config.upsampling, lengths.needed_positions, f"{lengths.rule}{config.upsampling}")

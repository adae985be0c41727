"""Warnings about schedules that cannot train a model."""

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

logger = logging.get_logger(__name__)

FEWEST_EPOCHS = 10
FEWEST_UPDATES = 10_000


def warmup_warning(warmup: int, updates: int) -> str | None:
    """What is wrong with the warm-up of a run, and what to do.

    >>> warmup_warning(10_000, 2_000).partition(";")[0]
    'The warm-up of 10,000 updates is longer than the run of 2,000, which never reaches the learning rate'
    >>> warmup_warning(200, 2_000)
    """
    remedy = "set warmup_steps to a share of the run, such as 0.1"
    if warmup >= updates > 1:
        return (
            f"The warm-up of {warmup:,} updates is longer than the run of {updates:,}, which never reaches the "
            f"learning rate; {remedy}."
        )
    if warmup > updates / 2 and updates > 1:
        return f"The warm-up of {warmup:,} updates is more than half of the run of {updates:,}; {remedy}."
    return None


def short_training_warning(updates: int, epochs: float) -> str | None:
    """Whether a new model will not reach its plateau, and what to do.

    >>> short_training_warning(2_000, 3.0).partition(":")[0]
    'This run is too short for a new model'
    >>> short_training_warning(2_000, 100.0)
    >>> short_training_warning(200_000, 3.0)
    """
    if epochs >= FEWEST_EPOCHS or updates >= FEWEST_UPDATES:
        return None
    return (
        f"This run is too short for a new model: {updates:,} updates, {epochs:.1f} epochs. Plateaus are reached after "
        "tens of epochs or of thousands of updates; leave out max_steps and num_train_epochs, or raise them to at "
        f"least {FEWEST_EPOCHS} epochs or {FEWEST_UPDATES:,} updates."
    )


class WarnOfWarmup(TrainerCallback):
    """Warns of a warm-up that is too long for the run."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: object
    ) -> None:
        text = warmup_warning(args.get_warmup_steps(state.max_steps), state.max_steps)
        if text is not None and state.is_world_process_zero:
            logger.warning(text)


class WarnOfShortTraining(TrainerCallback):
    """Warns of a run that is too short for a new model."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **rest: object
    ) -> None:
        dataloader = rest["train_dataloader"]
        updates_per_epoch = max(1, len(dataloader) // args.gradient_accumulation_steps)  # type: ignore[arg-type]
        text = short_training_warning(state.max_steps, state.max_steps / updates_per_epoch)
        if text is not None and state.is_world_process_zero:
            logger.warning(text)

"""`EnergyTrainer`: learns from an autoregressive teacher's energy instead of its outputs (ENGINE, Tu et al. 2020)."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..objectives.energy import OPERATORS, EnergyObjective, check_student, check_teacher, reader_of
from ..objectives.objective import Term
from .arguments import TranslationTrainingArguments
from .base_trainer import TranslationTrainer


@dataclass
class EnergyTrainingArguments(TranslationTrainingArguments):
    """`TranslationTrainingArguments` with what ENGINE trained with.

    Adam with a constant learning rate, batches of 1024 tokens, 30 epochs; after every epoch the energy on the
    validation set is measured, and the weights with the lowest are the result. The paper tunes the learning rate among
    5e-4, 1e-4, 5e-5, 1e-5, 5e-6 and 1e-6.

    >>> arguments = EnergyTrainingArguments("runs/example")
    >>> arguments.metric_for_best_model, arguments.greater_is_better
    ('discrete_energy', False)
    """

    decoder_input_operator: str = field(
        default="SX", metadata={"help": f"O1, what the teacher is fed of the logits: {', '.join(OPERATORS)}."}
    )
    target_operator: str = field(
        default="ST", metadata={"help": "O2, what the teacher's answer is compared with; one of the same."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Of the softmax in all operators but STL."})
    forbid_early_end: bool = field(
        default=True,
        metadata={"help": "Take </s> before the last position for the unlikeliest token; teachers do not know better."},
    )
    max_nfe: int | None = field(
        default=None, metadata={"help": "Most evaluations of a solve while training; the model's own if unset."}
    )
    max_tokens: int = field(
        default=1024, metadata={"help": "Most rows × longest side of a batch, over all processes together."}
    )
    num_train_epochs: float = field(default=30.0, metadata={"help": "Passes over the training data."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate; the paper tunes it, 5e-4 to 1e-6."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "How the learning rate changes."})
    warmup_steps: float = field(default=0, metadata={"help": "Updates with a rising learning rate; below 1: share."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Adam's memory of squared gradients."})
    label_smoothing_factor: float = field(default=0.0, metadata={"help": "An energy has no labels to smooth."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to validate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to write a checkpoint: no, steps or epoch."})
    average_best: int = field(
        default=1, metadata={"help": "The result is the average of so many best evaluations; 0 keeps the last weights."}
    )
    metric_for_best_model: str = field(default="discrete_energy", metadata={"help": "What decides which is best."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective()
        self.check_at_least(1, "max_nfe")
        if self.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor={self.label_smoothing_factor} has no effect on an energy.")

    def objective(self) -> EnergyObjective:
        """What the operators and the temperature make of a student's logits."""
        operators = (self.decoder_input_operator, self.target_operator)
        return EnergyObjective(*operators, self.temperature, self.forbid_early_end)


class EnergyTrainer(TranslationTrainer):
    """Trains a `DeqNarForConditionalGeneration` to write what a frozen teacher finds likely.

    The student should know something already: start from one that was trained with cmlm or glat. The canvas is fully
    masked and as long as the reference, of which nothing else is used.

    The teacher is an encoder-decoder model of Hugging Face with the student's vocabulary. It is moved to the student's
    device; otherwise it is left as it was.

    >>> trainer = EnergyTrainer(student, arguments, teacher=teacher, train_dataset=pairs, processing_class=tokenizer)
    ... # doctest: +SKIP
    """

    args: EnergyTrainingArguments

    def __init__(self, model: nn.Module, args: EnergyTrainingArguments, *, teacher: PreTrainedModel, **options) -> None:
        check_student(model.config)
        check_teacher(teacher, model.config.vocab_size)
        if model.config.latent != "none":
            args.ddp_find_unused_parameters = True  # the posterior of the latents has no part in an energy
        super().__init__(model, args, **options)
        self.teacher = teacher.to(args.device)
        self.objective = args.objective()

    def compute_terms(
        self, model: nn.Module, batch: dict[str, Tensor], progress: float, generator: torch.Generator
    ) -> dict[str, Term]:
        read = reader_of(self.teacher, batch["input_ids"], batch["attention_mask"])
        budget = self.args.max_nfe if self.model.training else None

        def terms(inner: DeqNarForConditionalGeneration) -> dict[str, Term]:
            return self.objective.terms(inner, read, batch, generator, max_nfe=budget)

        return model(objective=terms)

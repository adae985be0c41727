"""`EnergyTrainer`: training with the energy of an autoregressive teacher (ENGINE, Tu et al. 2020)."""

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
    """`TranslationTrainingArguments` with the defaults of ENGINE.

    Adam with a constant learning rate, batches of 1024 tokens, 30 epochs; after every epoch the energy on the
    validation set is measured, and the weights with the lowest are the result. The paper tunes the learning rate among
    5e-4, 1e-4, 5e-5, 1e-5, 5e-6 and 1e-6.

    >>> arguments = EnergyTrainingArguments("runs/example")
    >>> arguments.metric_for_best_model, arguments.greater_is_better
    ('discrete_energy', False)
    """

    decoder_input_operator: str = field(
        default="SX", metadata={"help": f"O1, operator of the decoder inputs of the teacher: {', '.join(OPERATORS)}."}
    )
    target_operator: str = field(
        default="ST", metadata={"help": "O2, operator of the target distribution; same choices."}
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the softmax in all operators but STL."})
    forbid_early_end: bool = field(
        default=True,
        metadata={"help": "Give </s> the lowest probability before the last position."},
    )
    max_nfe: int | None = field(
        default=None, metadata={"help": "Maximum number of evaluations of a solve in training. Default: the model's."}
    )
    max_tokens: int = field(
        default=1024, metadata={"help": "Maximum of rows × longest side of a batch, over all processes."}
    )
    num_train_epochs: float = field(default=30.0, metadata={"help": "Passes over the training data."})
    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate; the paper tunes it, 5e-4 to 1e-6."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Learning-rate schedule."})
    warmup_steps: float = field(
        default=0, metadata={"help": "Warm-up updates; a value below 1 is a share of all updates."}
    )
    adam_beta2: float = field(default=0.999, metadata={"help": "Adam's β₂."})
    label_smoothing_factor: float = field(default=0.0, metadata={"help": "Not supported: an energy has no labels."})
    eval_strategy: str = field(default="epoch", metadata={"help": "When to validate: no, steps or epoch."})
    save_strategy: str = field(default="epoch", metadata={"help": "When to write a checkpoint: no, steps or epoch."})
    average_best: int = field(
        default=1, metadata={"help": "Number of best checkpoints to average; 0 uses the last weights."}
    )
    metric_for_best_model: str = field(
        default="discrete_energy", metadata={"help": "Metric that selects the best checkpoint."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.objective()
        self.check_at_least(1, "max_nfe")
        if self.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor={self.label_smoothing_factor} has no effect on an energy.")

    def objective(self) -> EnergyObjective:
        """The objective with these operators and temperature."""
        operators = (self.decoder_input_operator, self.target_operator)
        return EnergyObjective(*operators, self.temperature, self.forbid_early_end)


class EnergyTrainer(TranslationTrainer):
    """Trains a `DeqNarForConditionalGeneration` to minimise the energy of a frozen teacher.

    The student must be pretrained, with cmlm or glat. The canvas is fully masked and as long as the reference; nothing
    else of the reference is used.

    The teacher is an encoder-decoder model of Hugging Face with the vocabulary of the student. It is moved to the
    device of the student and not changed otherwise.

    >>> trainer = EnergyTrainer(student, arguments, teacher=teacher, train_dataset=pairs, processing_class=tokenizer)
    ... # doctest: +SKIP
    """

    args: EnergyTrainingArguments

    def __init__(self, model: nn.Module, args: EnergyTrainingArguments, *, teacher: PreTrainedModel, **options) -> None:
        check_student(model.config)
        check_teacher(teacher, model.config.vocab_size)
        if model.config.latent != "none":
            args.ddp_find_unused_parameters = True  # an energy does not use the posterior of the latent variables
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

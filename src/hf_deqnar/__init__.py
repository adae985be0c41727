"""Deep-equilibrium non-autoregressive translation for Hugging Face Transformers.

Importing this package registers the models with transformers' Auto classes, and the translation pipeline. Its names are
imported when they are first used.
"""

import warnings
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .registration import register
from .utils.versions import check_transformers

if TYPE_CHECKING:
    from .data.parallel_text import Pair, read_parallel
    from .data.tokenized_dataset import tokenize_for_validation, tokenize_pairs
    from .data.tokenizer import train_tokenizer
    from .export.runtime import DeqNarOnnxModel
    from .models.deqnar.configuration_deqnar import DeqNarConfig
    from .models.deqnar.fixed_point import FixedPoint, solve
    from .models.deqnar.generation_deqnar import DeqNarGenerateOutput, DeqNarGenerationConfig
    from .models.deqnar.implicit_gradient import GradientOptions, equilibrium
    from .models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
    from .models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline
    from .models.ensemble.modeling_ensemble import EnsembleConfig, EnsembleForConditionalGeneration
    from .models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentConfig, RecurrentForConditionalGeneration
    from .training.arguments import DeqNarTrainingArguments
    from .training.energy_trainer import EnergyTrainer, EnergyTrainingArguments
    from .training.trainer import DeqNarTrainer

__version__ = "0.2.0"

PRETRAINED = str(Path(__file__).parent / "pretrained")  # folder of the bundled model
METRICS = str(Path(__file__).parent / "evaluation" / "translation_quality")  # folder of a metric for `evaluate.load`

# Where each public name is defined; the imports for type checkers above are the same.
MODULES = {
    "DeqNarConfig": ".models.deqnar.configuration_deqnar",
    "DeqNarForConditionalGeneration": ".models.deqnar.modeling_deqnar",
    "DeqNarGenerateOutput": ".models.deqnar.generation_deqnar",
    "DeqNarGenerationConfig": ".models.deqnar.generation_deqnar",
    "DeqNarModel": ".models.deqnar.modeling_deqnar",
    "DeqNarOnnxModel": ".export.runtime",
    "DeqNarTrainer": ".training.trainer",
    "DeqNarTrainingArguments": ".training.arguments",
    "DeqNarTranslationPipeline": ".models.deqnar.pipeline_deqnar",
    "EnergyTrainer": ".training.energy_trainer",
    "EnergyTrainingArguments": ".training.energy_trainer",
    "EnsembleConfig": ".models.ensemble.modeling_ensemble",
    "EnsembleForConditionalGeneration": ".models.ensemble.modeling_ensemble",
    "FixedPoint": ".models.deqnar.fixed_point",
    "GradientOptions": ".models.deqnar.implicit_gradient",
    "Pair": ".data.parallel_text",
    "RecurrentConfig": ".models.lstm_seq2seq.modeling_lstm_seq2seq",
    "RecurrentForConditionalGeneration": ".models.lstm_seq2seq.modeling_lstm_seq2seq",
    "equilibrium": ".models.deqnar.implicit_gradient",
    "read_parallel": ".data.parallel_text",
    "solve": ".models.deqnar.fixed_point",
    "tokenize_for_validation": ".data.tokenized_dataset",
    "tokenize_pairs": ".data.tokenized_dataset",
    "train_tokenizer": ".data.tokenizer",
}

check_transformers()
register()


def __getattr__(name: str) -> Any:
    if name == "BOX":
        warnings.warn("hf_deqnar.BOX is now hf_deqnar.PRETRAINED.", FutureWarning, stacklevel=2)
        return PRETRAINED
    if name not in MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        value = getattr(import_module(MODULES[name], __name__), name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith(__name__):
            raise
        raise ImportError(f"{name} needs more packages ({error.name}): pip install 'hf_deqnar[train]'.") from error
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})


__all__ = [
    "METRICS",
    "PRETRAINED",
    "DeqNarConfig",
    "DeqNarForConditionalGeneration",
    "DeqNarGenerateOutput",
    "DeqNarGenerationConfig",
    "DeqNarModel",
    "DeqNarOnnxModel",
    "DeqNarTrainer",
    "DeqNarTrainingArguments",
    "DeqNarTranslationPipeline",
    "EnergyTrainer",
    "EnergyTrainingArguments",
    "EnsembleConfig",
    "EnsembleForConditionalGeneration",
    "FixedPoint",
    "GradientOptions",
    "Pair",
    "RecurrentConfig",
    "RecurrentForConditionalGeneration",
    "equilibrium",
    "read_parallel",
    "solve",
    "tokenize_for_validation",
    "tokenize_pairs",
    "train_tokenizer",
]

"""Deep-equilibrium non-autoregressive translation for Hugging Face Transformers.

Importing this package registers the model with transformers' Auto classes and the translation pipeline.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_deqnar import DeqNarConfig
from .fixed_point import FixedPoint, solve
from .generation_deqnar import DeqNarGenerateOutput, DeqNarGenerationConfig
from .modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
from .modeling_recurrent import RecurrentConfig, RecurrentForConditionalGeneration
from .pipeline_deqnar import DeqNarTranslationPipeline, register_translation_pipeline

__version__ = "0.1.0"

BOX = str(Path(__file__).parent / "box")  # folder of the model that comes with the package


def register_auto_classes() -> None:
    """Make the Auto classes know the model, and let saved models carry the code they need without this package."""
    AutoConfig.register(DeqNarConfig.model_type, DeqNarConfig, exist_ok=True)
    AutoModel.register(DeqNarConfig, DeqNarModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(DeqNarConfig, DeqNarForConditionalGeneration, exist_ok=True)
    DeqNarConfig.register_for_auto_class()
    DeqNarModel.register_for_auto_class("AutoModel")
    DeqNarForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")
    AutoConfig.register(RecurrentConfig.model_type, RecurrentConfig, exist_ok=True)
    AutoModelForSeq2SeqLM.register(RecurrentConfig, RecurrentForConditionalGeneration, exist_ok=True)
    RecurrentConfig.register_for_auto_class()
    RecurrentForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


register_auto_classes()
register_translation_pipeline()

# Training needs packages of the train extra, so it is imported when it is asked for; and few need exported models.
LATER = {
    "DeqNarOnnxModel": ".export.runtime",
    "DeqNarTrainer": ".training.trainer",
    "DeqNarTrainingArguments": ".training.arguments",
    "EnergyTrainer": ".training.energy_trainer",
    "EnergyTrainingArguments": ".training.energy_trainer",
}


def __getattr__(name: str) -> Any:
    if name not in LATER:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    try:
        module = import_module(LATER[name], __name__)
    except ImportError as error:
        raise ImportError(f"{name} needs more packages ({error.name}): pip install 'hf_deqnar[train]'.") from error
    return getattr(module, name)


__all__ = [
    "BOX",
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
    "FixedPoint",
    "solve",
]

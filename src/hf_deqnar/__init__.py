"""Deep-equilibrium non-autoregressive translation for Hugging Face Transformers.

Importing this package registers the model with transformers' Auto classes and the translation pipeline.
"""

from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from .configuration_deqnar import DeqNarConfig
from .fixed_point import FixedPoint, solve
from .generation_deqnar import DeqNarGenerateOutput, DeqNarGenerationConfig
from .modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
from .pipeline_deqnar import DeqNarTranslationPipeline, register_translation_pipeline

__version__ = "0.1.0"


def register_auto_classes() -> None:
    """Make the Auto classes know the model, and let saved models carry the code they need without this package."""
    AutoConfig.register(DeqNarConfig.model_type, DeqNarConfig, exist_ok=True)
    AutoModel.register(DeqNarConfig, DeqNarModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(DeqNarConfig, DeqNarForConditionalGeneration, exist_ok=True)
    DeqNarConfig.register_for_auto_class()
    DeqNarModel.register_for_auto_class("AutoModel")
    DeqNarForConditionalGeneration.register_for_auto_class("AutoModelForSeq2SeqLM")


register_auto_classes()
register_translation_pipeline()

__all__ = [
    "DeqNarConfig",
    "DeqNarForConditionalGeneration",
    "DeqNarGenerateOutput",
    "DeqNarGenerationConfig",
    "DeqNarModel",
    "DeqNarTranslationPipeline",
    "FixedPoint",
    "solve",
]

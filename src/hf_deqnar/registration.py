"""Registration of the models and the translation pipeline with transformers.

Importing the modelling code and the pipelines of transformers takes as long as importing torch. Registration therefore
waits until the module that contains the registry is imported, by the user or by this package.
"""

import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from .utils.import_hooks import after_import, is_executing

AUTO = "transformers.models.auto"
MODEL_REGISTRY = f"{AUTO}.modeling_auto"
CONFIGURATION = "hf_deqnar.models.deqnar.configuration_deqnar"
PIPELINE = "hf_deqnar.models.deqnar.pipeline_deqnar"
LSTM = "hf_deqnar.models.lstm_seq2seq.modeling_lstm_seq2seq"
ENSEMBLE = "hf_deqnar.models.ensemble.modeling_ensemble"
MODELS = ("hf_deqnar.models.deqnar.modeling_deqnar", LSTM, ENSEMBLE)
LAZY_CONFIGS = {"deqnar_recurrent": (LSTM, "RecurrentConfig"), "deqnar_ensemble": (ENSEMBLE, "EnsembleConfig")}


def model_parts() -> list[str]:
    """Names of the modules that the models are imported from, and of the models.

    Any of them may be the first module that imports the registry; registering the models then would import it again.
    """
    folder = Path(__file__).parent / "models" / "deqnar"
    names = [f"hf_deqnar.models.deqnar.{module.name}" for module in pkgutil.iter_modules([str(folder)])]
    return sorted({*names, *MODELS} - {CONFIGURATION, PIPELINE})


def register() -> None:
    """Register everything, each part as soon as its registry or its own module is imported."""
    for module in (f"{AUTO}.configuration_auto", CONFIGURATION):
        after_import(module, register_configs)
    for module in (MODEL_REGISTRY, *model_parts()):
        after_import(module, register_models)
    for module in ("transformers.pipelines", PIPELINE):
        after_import(module, register_pipeline)


class LazyConfig:
    """Stands for a configuration in `CONFIG_MAPPING` until it is used: its module also contains the model."""

    def __init__(self, module: str, name: str) -> None:
        self._place = (module, name)

    def __getattr__(self, name: str) -> Any:
        module, config = self._place
        return getattr(getattr(import_module(module), config), name)


def register_configs() -> None:
    """Let `AutoConfig` find the configurations, and saved ones carry their code."""
    if is_executing(CONFIGURATION):
        return  # called again when it is complete
    from transformers import CONFIG_MAPPING, AutoConfig

    from .models.deqnar.configuration_deqnar import DeqNarConfig

    AutoConfig.register(DeqNarConfig.model_type, DeqNarConfig, exist_ok=True)
    DeqNarConfig.register_for_auto_class()
    for model_type, place in LAZY_CONFIGS.items():
        if model_type not in CONFIG_MAPPING:
            CONFIG_MAPPING.register(model_type, LazyConfig(*place))


def register_models() -> None:
    """Let the Auto classes find the models, and saved ones carry their code, so that they load without this package."""
    if any(map(is_executing, model_parts())):
        return  # called again when they are complete
    if not any(module in sys.modules for module in (MODEL_REGISTRY, *MODELS)):
        return  # called again when one of them is imported
    from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

    from .models.deqnar.configuration_deqnar import DeqNarConfig
    from .models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
    from .models.ensemble.modeling_ensemble import EnsembleConfig, EnsembleForConditionalGeneration
    from .models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentConfig, RecurrentForConditionalGeneration

    for config in (RecurrentConfig, EnsembleConfig):
        AutoConfig.register(config.model_type, config, exist_ok=True)
        config.register_for_auto_class()
    for auto_class, config, model in (
        (AutoModel, DeqNarConfig, DeqNarModel),
        (AutoModelForSeq2SeqLM, DeqNarConfig, DeqNarForConditionalGeneration),
        (AutoModelForSeq2SeqLM, RecurrentConfig, RecurrentForConditionalGeneration),
        (AutoModelForSeq2SeqLM, EnsembleConfig, EnsembleForConditionalGeneration),
    ):
        auto_class.register(config, model, exist_ok=True)
        model.register_for_auto_class(auto_class.__name__)


def register_pipeline() -> None:
    """Restore `pipeline("translation")`."""
    if is_executing(PIPELINE):
        return  # called again when it is complete
    from .models.deqnar.pipeline_deqnar import register_translation_pipeline

    register_translation_pipeline()

"""Loading a translation model for the command line, with errors that name the remedy."""

from pathlib import Path

import torch
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

import hf_deqnar

from ..data.tokenizer import load_tokenizer
from ..export.manifest import contains_exports, is_export
from ..export.runtime import DeqNarOnnxModel
from ..utils.files import reading_weights
from ..utils.suggestions import did_you_mean


def bundled_model() -> str:
    """The folder of the bundled model."""
    if not (Path(hf_deqnar.PRETRAINED) / "config.json").is_file():
        raise FileNotFoundError("This installation has no bundled model; name a model with --model.")
    return hf_deqnar.PRETRAINED


def check_local(name: str) -> None:
    """Raise FileNotFoundError for a name that can only be a local folder, without asking the Hub for it.

    Such names begin with . or / or ~, have more than one slash, or are in a folder that exists. A name without slash is
    one if it is similar to that of a model in the current folder.
    """
    path = Path(name)
    if path.exists():
        return
    similar = did_you_mean(path.name, [found.parent.name for found in path.parent.glob("*/config.json")])
    in_folder = "/" in name and path.parent.is_dir()
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or in_folder or ("/" not in name and similar):
        where = f"; in {path.parent}, {similar}" if similar else "."
        raise FileNotFoundError(f"{name} is neither a model directory nor a model on the Hub{where}")


def check_hub(name: str) -> None:
    """Raise OSError for a name that is neither in the cache nor on the Hub. `from_pretrained` retries for a minute."""
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except (GatedRepoError, EntryNotFoundError):
        return  # `from_pretrained` says what is missing
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(f"{name} is neither a model directory nor a model on the Hub.") from error
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise OSError(
            f"{name} is not a model directory, and it cannot be looked up on the Hub: {reason}. Check the name, or the "
            "network."
        ) from error


def check_model(name: str) -> PreTrainedTokenizerBase:
    """Check the configuration and the tokenizer of a seq2seq model, without its weights; returns the tokenizer."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    path = Path(name)
    check_local(name)
    if not path.exists():
        check_hub(name)
    if is_export(path):
        raise ValueError(f"{name} is an ONNX export, which torch cannot run; name the model itself.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{name} is a directory without a config.json; name one that save_pretrained wrote.")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        if path.is_dir():
            raise OSError(f"{path / 'config.json'} is damaged; save the model there again.") from error
        raise OSError(f"{name} is neither a model directory nor a model on the Hub.") from error
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())[:200]}") from error
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
        raise ValueError(f"{name} contains a {config.model_type} model, which cannot translate; name a seq2seq model.")
    tokenizer = load_tokenizer(name)
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens but the model only {vocabulary}; "
            "they do not belong together."
        )
    return tokenizer


def load_model(
    name: str, device: str | None = None, runtime: str | None = None, threads: int | None = None
) -> tuple[PreTrainedModel | DeqNarOnnxModel, PreTrainedTokenizerBase]:
    """A seq2seq model in evaluation mode and its tokenizer, from a directory or the hub.

    Args:
        runtime: `torch` or `onnx`; by default that of the directory, model or export. A model is exported to int8 when
            it is first used with `onnx`.
        threads: maximum number of threads.
    """
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, not {threads}.")
        torch.set_num_threads(threads)
    check_local(name)
    if runtime == "onnx" or (runtime is None and is_export(Path(name))):
        return load_export(name, device, threads)
    tokenizer = check_model(name)
    with reading_weights(name):
        model = AutoModelForSeq2SeqLM.from_pretrained(name).eval()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "meta":
        raise ValueError("Device 'meta' stores no data, so nothing can be computed on it; choose another.")
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Device '{device}' cannot be used: {str(error).splitlines()[0]}") from error


def load_export(name: str, device: str | None, threads: int | None) -> tuple[DeqNarOnnxModel, PreTrainedTokenizerBase]:
    """An exported model and its tokenizer."""
    if device is not None and device != "cpu":
        raise ValueError(f"An ONNX export runs on the CPU, not on {device}; leave out --device.")
    if not is_export(Path(name)) and not contains_exports(Path(name)):
        from ..export.cache import cached_export

        name = str(cached_export(name, check_model(name)))
    return DeqNarOnnxModel.from_pretrained(name, threads=threads), load_tokenizer(name)

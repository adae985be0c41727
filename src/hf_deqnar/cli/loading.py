"""Loading a translation model for the command line, with errors a user can act on."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from ..export.manifest import is_export
from ..export.runtime import DeqNarOnnxModel


def load_export(name: str, device: str | None, threads: int | None) -> tuple[DeqNarOnnxModel, PreTrainedTokenizerBase]:
    """An exported model and its tokenizer."""
    if device is not None and device != "cpu":
        raise ValueError(f"An ONNX export runs on the CPU, not on {device}; leave out --device.")
    model = DeqNarOnnxModel.from_pretrained(name, threads=threads)
    return model, AutoTokenizer.from_pretrained(name)


@contextmanager
def train_extra(what: str) -> Iterator[None]:
    """Imports that need the train extra: its absence is told with what it is needed for."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{what} needs more packages ({error.name}): pip install 'hf_deqnar[train]'.") from error


def load_model(
    name: str, device: str | None = None, runtime: str | None = None, threads: int | None = None
) -> tuple[PreTrainedModel | DeqNarOnnxModel, PreTrainedTokenizerBase]:
    """A seq2seq model in evaluation mode and its tokenizer, from a directory or the hub.

    Args:
        runtime: `torch` or `onnx`, to make sure of it; what the directory holds if not given.
        threads: how many a computation may use.
    """
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if threads is not None:
        if threads < 1:
            raise ValueError(f"--threads must be at least 1, not {threads}.")
        torch.set_num_threads(threads)
    path = Path(name)
    if runtime == "onnx" or (runtime is None and is_export(path)):
        return load_export(name, device, threads)
    if is_export(path):
        raise ValueError(f"{name} is an ONNX export, which torch cannot run; use --runtime onnx or name the model.")
    if path.is_dir() and not (path / "config.json").is_file():
        raise FileNotFoundError(f"{name} is a directory without a config.json; give one that save_pretrained wrote.")
    try:
        config = AutoConfig.from_pretrained(name)
    except OSError as error:
        raise OSError(f"{name} is neither a model directory nor a model that the hub offers.") from error
    except ValueError as error:
        raise ValueError(f"{name}: {' '.join(str(error).split())[:200]}") from error
    if type(config) not in AutoModelForSeq2SeqLM._model_mapping:
        raise ValueError(f"{name} holds a {config.model_type} model, which cannot translate; name a seq2seq model.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has no tokenizer that can be loaded; save it there with save_pretrained.") from error
    try:
        model = AutoModelForSeq2SeqLM.from_pretrained(name).eval()
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} are damaged: {error}") from error
    vocabulary = config.get_text_config(decoder=True).vocab_size
    if len(tokenizer) > vocabulary:
        raise ValueError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens but the model only {vocabulary}; "
            "they do not belong together."
        )
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(device), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"Device '{device}' cannot be used: {str(error).splitlines()[0]}") from error

"""int8 exports of models, made when they are first used and kept in the cache folder of Hugging Face."""

import shutil
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import AutoModelForSeq2SeqLM, PreTrainedTokenizerBase
from transformers.utils import cached_file, logging

from .. import __version__
from ..utils.files import reading_weights
from ..utils.fingerprints import fingerprint_of
from ..utils.locks import wait_for_lock
from .graphs import check_exportable, check_packages, export_model
from .manifest import FORMAT, digest, is_export, read_manifest

logger = logging.get_logger(__name__)

PRECISION = "int8"
SOURCES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")  # what an export depends on


def cached_export(name: str, tokenizer: PreTrainedTokenizerBase) -> Path:
    """The folder of the int8 export of a model; exports it if this version has not done so, or if a file is damaged.

    Args:
        name: of a model, a folder or Hub id.
        tokenizer: of the model.
    """
    folder = export_folder(name)
    exported = folder / PRECISION
    folder.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(folder.with_suffix(".lock")):
        if is_export(exported):
            try:
                read_manifest(exported)
            except (ValueError, OSError) as error:
                logger.warning(f"{error} It is exported again.")
            else:
                return exported
        check_packages()
        with reading_weights(name):
            model: Any = AutoModelForSeq2SeqLM.from_pretrained(name).float().eval()
        check_exportable(model.config)
        logger.warning(f"{name} is exported once, to {exported}. This takes up to a minute.")
        shutil.rmtree(folder, ignore_errors=True)
        export_model(model, tokenizer, folder, (PRECISION,))
    return exported


def export_folder(name: str) -> Path:
    """Where exports of this version of a model are kept; another model of the same name has another folder."""
    paths = (cached_file(name, file, _raise_exceptions_for_missing_entries=False) for file in SOURCES)
    digests = ["" if path is None else digest(Path(path)) for path in paths]
    key = fingerprint_of([__version__, str(FORMAT), *digests])
    return Path(constants.HF_HOME) / "hf_deqnar" / "exports" / key

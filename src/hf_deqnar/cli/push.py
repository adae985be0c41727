"""Publish a model on the Hugging Face Hub, with its tokenizer, its code and its model card.

    hf-deqnar push --model my-model --repo_id user/my-model --private

The repository is created if it does not exist. It contains the code of the architecture, so the model also loads on
machines without this package (`trust_remote_code=True`). A README.md in the folder of the model is its card; without
one, a short card is generated. Checkpoints, logs and other files of a training run are not uploaded. `hf auth login`
stores the access token that is needed.
"""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CARD = "README.md"
WEIGHTS = "model*.safetensors*"  # one file, or shards and their index


@dataclass
class PushArguments:
    """Model, repository, and languages of a generated card."""

    model: Path = field(metadata={"metavar": "FOLDER", "help": "Folder of a model with its tokenizer."})
    repo_id: str = field(metadata={"metavar": "USER/NAME", "help": "Name of the repository on the Hub."})
    private: bool = field(default=False, metadata={"help": "Create a private repository."})
    source: str | None = field(default=None, metadata={"help": "Source language, such as en, for a generated card."})
    target: str | None = field(default=None, metadata={"help": "Target language, such as de, for a generated card."})
    commit_message: str = field(default="Upload model", metadata={"help": "Message of the commit."})

    def __post_init__(self) -> None:
        if not self.model.is_dir():
            raise FileNotFoundError(f"There is no folder {self.model}; --model names the folder of a saved model.")
        if self.repo_id.count("/") != 1:
            raise ValueError(f"--repo_id {self.repo_id} is not of the form user/name.")


ARGUMENTS = (PushArguments,)


def run(arguments: PushArguments) -> None:
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    from .loading import load_model

    if get_token() is None:
        raise OSError("There is no access token for the Hub; run `hf auth login`, or set the variable HF_TOKEN.")
    model, tokenizer = load_model(str(arguments.model), "cpu", runtime="torch")
    http_error = HfHubHTTPError.__bases__[0]  # of the HTTP library that huggingface_hub uses
    with tempfile.TemporaryDirectory() as folder:
        assemble(model, tokenizer, arguments, Path(folder))
        try:
            repository = HfApi().create_repo(arguments.repo_id, private=arguments.private or None, exist_ok=True)
            HfApi().upload_folder(
                repo_id=repository.repo_id, folder_path=folder, commit_message=arguments.commit_message
            )
        except http_error as error:
            raise OSError(f"{arguments.repo_id} could not be uploaded: {error}") from error
    print(repository)


def assemble(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", arguments: PushArguments, folder: Path
) -> None:
    """Write everything that the repository will contain to a folder."""
    model.save_pretrained(folder)  # with the code of the architecture, and auto_map in config.json
    tokenizer.save_pretrained(folder)
    stored = sorted(arguments.model.glob(WEIGHTS))
    if stored:  # as they are, because loading may have changed their precision
        for file in folder.glob(WEIGHTS):
            file.unlink()
        for file in stored:
            shutil.copy(file, folder)
    if (arguments.model / CARD).is_file():
        shutil.copy(arguments.model / CARD, folder)
    else:
        from .card import CardContent, make_card

        content = CardContent(
            title=arguments.repo_id.split("/")[1],
            name=arguments.repo_id,
            source=arguments.source,
            target=arguments.target,
            parameters=model.num_parameters(),
        )
        make_card(model.config, content).save(folder / CARD)

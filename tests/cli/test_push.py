"""`hf-deqnar push`: everything but the network is real."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

import hf_deqnar
from hf_deqnar.cli.main import main

from ..teachers import small_teacher

CODE = {file.name for file in (Path(hf_deqnar.__file__).parent / "models" / "deqnar").glob("*.py")} - {"__init__.py"}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json"}
MODEL = {"config.json", "generation_config.json", "model.safetensors"}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The Hub as a folder: what is created and uploaded there."""
    sent = SimpleNamespace(created=[], folder=tmp_path / "hub")

    def create_repo(self, repo_id, **options):
        sent.created.append((repo_id, options))
        return huggingface_hub.RepoUrl(f"{self.endpoint}/{repo_id}")

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        assert repo_id == sent.created[-1][0]
        shutil.copytree(folder_path, sent.folder)
        sent.message = commit_message

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_token")
    return sent


def files(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_model_is_published_with_tokenizer_code_and_card(hub, saved, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(saved["ctc"], folder)
    (folder / "checkpoint-5").mkdir()
    (folder / "checkpoint-5" / "optimizer.pt").write_bytes(b"large")
    (folder / "run.json").write_text("{}")
    languages = ["--source", "en", "--target", "de"]
    assert main(["push", "--model", str(folder), "--repo_id", "user/model", "--private", *languages]) == 0
    assert hub.created == [("user/model", {"private": True, "exist_ok": True})]
    assert hub.message == "Upload model"
    assert "user/model" in capsys.readouterr().out
    assert files(hub.folder) == MODEL | TOKENIZER | CODE | {"README.md"}
    automatic = json.loads((hub.folder / "config.json").read_text())["auto_map"]
    assert automatic["AutoModelForSeq2SeqLM"] == "modeling_deqnar.DeqNarForConditionalGeneration"
    assert automatic["AutoConfig"] == "configuration_deqnar.DeqNarConfig"
    card = ModelCard.load(hub.folder / "README.md")
    assert card.data.language == ["en", "de"]
    assert card.data.library_name == "transformers"
    assert 'model="user/model"' in card.text
    tokens = AutoTokenizer.from_pretrained(hub.folder)("A man is riding a horse.", return_tensors="pt")
    models = [AutoModelForSeq2SeqLM.from_pretrained(one).eval() for one in (folder, hub.folder)]
    assert torch.equal(*(model.generate(**tokens) for model in models))


def test_weights_and_card_are_published_as_they_are(hub, saved, tmp_path):
    """The bundled model has its weights in half precision, a card, and no code beside it."""
    folder = tmp_path / "half"
    shutil.copytree(saved["ctc"], folder)
    for file in folder.glob("*.py"):
        file.unlink()
    model = AutoModelForSeq2SeqLM.from_pretrained(folder).half()
    model.save_pretrained(tmp_path / "rounded")
    shutil.copy(tmp_path / "rounded" / "model.safetensors", folder)
    (folder / "README.md").write_text("# My own card\n")
    assert main(["push", "--model", str(folder), "--repo_id", "user/half"]) == 0
    assert hub.created == [("user/half", {"private": None, "exist_ok": True})]
    for name in ("model.safetensors", "README.md"):
        assert (hub.folder / name).read_bytes() == (folder / name).read_bytes()
    assert files(hub.folder) >= CODE


def test_a_teacher_is_published_without_code(hub, tokenizer, tmp_path):
    folder = tmp_path / "teacher"
    small_teacher(vocabulary=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert main(["push", "--model", str(folder), "--repo_id", "user/teacher"]) == 0
    assert files(hub.folder) == MODEL | TOKENIZER | {"README.md"}


def test_errors_are_one_readable_line(hub, saved, tmp_path, monkeypatch, capsys):
    model = ["--model", str(saved["ctc"])]
    repository = ["--repo_id", "user/model"]

    def refuse(self, repo_id, **options):
        response = SimpleNamespace(headers={}, request=None, status_code=403)
        raise HfHubHTTPError("403 Forbidden\n\nYou have no write access.", response=response)

    def cut_off(self, repo_id, **options):
        raise HfHubHTTPError.__bases__[0]("the connection failed")

    for arguments, message, patch in [
        (["--model", str(tmp_path / "no"), *repository], "There is no folder", None),
        (["--model", str(tmp_path), *repository], "is a directory without a config.json", None),
        ([*model, "--repo_id", "model"], "--repo_id model is not of the form user/name.", None),
        ([*model, *repository], "could not be uploaded: 403 Forbidden You have no write access.", refuse),
        ([*model, *repository], "user/model could not be uploaded: the connection failed", cut_off),
        ([*model, *repository], "no access token for the Hub; run `hf auth login`", "token"),
    ]:
        if patch == "token":
            monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
        elif patch is not None:
            monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", patch)
        assert main(["push", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert error.startswith("hf-deqnar push: ")
        assert len(error.strip().splitlines()) == 1
    assert not hub.folder.exists()

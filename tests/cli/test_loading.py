"""Damaged model folders: every error is one line that names the damaged file."""

import json
import shutil

import pytest

from hf_deqnar.cli.loading import check_model, load_model

from ..distillation.conftest import make_teacher


@pytest.fixture
def damaged(tokenizer, tmp_path):
    """A model of which one file is overwritten, or has some of its entries changed."""
    full = tmp_path / "whole"
    make_teacher(tokenizer).model.save_pretrained(full)
    tokenizer.save_pretrained(full)

    def damage(file: str, text: str | None = None, **fields) -> str:
        shutil.copytree(full, tmp_path / "damaged", dirs_exist_ok=True)
        path = tmp_path / "damaged" / file
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}) if text is None else text)
        return str(path.parent)

    return damage


def test_configuration_and_tokenizer_are_checked_without_the_weights(damaged):
    for file, text, fields, message in [
        ("config.json", "", {}, "config.json is damaged; save the model there again."),
        ("config.json", '{"model', {}, "config.json is damaged"),
        ("config.json", None, {"d_model": "wide"}, "damaged: Validation error for field 'd_model'"),
        ("config.json", None, {"decoder_vocab_size": 300}, "the tokenizer has 400 tokens but the model only 300"),
        ("tokenizer.json", "{}", {}, "damaged has no tokenizer that can be loaded"),
        ("tokenizer.json", '{"version', {}, "damaged has no tokenizer that can be loaded"),
        ("tokenizer_config.json", "", {}, "damaged has no tokenizer that can be loaded"),
    ]:
        with pytest.raises((OSError, ValueError), match=message) as caught:
            check_model(damaged(file, text, **fields))
        assert "\n" not in str(caught.value)
    assert len(check_model(damaged("model.safetensors", "not read"))) == 400


def test_weights_of_another_size_are_one_readable_line(damaged):
    with pytest.raises(ValueError, match="damaged are not those that its config.json describes"):
        load_model(damaged("config.json", None, d_model=64), "cpu")


def test_a_mistyped_folder_is_reported_without_asking_the_hub(damaged, monkeypatch, tmp_path):
    """Also with a suggestion. A name that can be one of the Hub is looked up there."""
    damaged("config.json", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", pytest.fail)
    for name in ("./no", "/no/such/model", "runs/first/model", f"{tmp_path}/no", "damagd", "../no"):
        with pytest.raises(FileNotFoundError, match="is neither a model directory nor a model on the Hub"):
            load_model(name)
    with pytest.raises(FileNotFoundError, match=r"; in \., did you mean damaged\?"):
        load_model("damagd")
    for name in ("user/model", "t5-small"):
        with pytest.raises(pytest.fail.Exception):
            load_model(name)

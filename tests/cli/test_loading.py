"""Damaged model folders: every error is one line that names the damaged file."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

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
    asked = []
    monkeypatch.setattr("hf_deqnar.cli.loading.get_hf_file_metadata", asked.append)
    for name in ("./no", "/no/such/model", "runs/first/model", f"{tmp_path}/no", "damagd", "../no"):
        with pytest.raises(FileNotFoundError, match="is neither a model directory nor a model on the Hub"):
            load_model(name)
    with pytest.raises(FileNotFoundError, match=r"; in \., did you mean damaged\?"):
        load_model("damagd")
    assert asked == []
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda name: pytest.fail("found"))
    for name in ("user/model", "t5-small"):
        with pytest.raises(pytest.fail.Exception, match="found"):
            load_model(name)
    assert len(asked) == 2


class Hub(BaseHTTPRequestHandler):
    """Knows no model."""

    def do_HEAD(self) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("reachable", [True, False])
def test_a_name_that_is_not_on_the_hub_is_reported_without_retries(reachable, tmp_path):
    """Of one slash or none, so that it may be a model of the Hub; `from_pretrained` asks six times."""
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        if reachable:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        address = f"http://127.0.0.1:{server.server_port}"
        code = "import sys; from hf_deqnar.cli.main import main; sys.exit(main(sys.argv[1:]))"
        done = subprocess.run(
            [sys.executable, "-c", code, "translate", "--model", "my-modle", "Hello"],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        if reachable:
            server.shutdown()
    assert done.returncode == 2
    assert "Retrying" not in done.stderr
    message = "is neither a model directory" if reachable else "is not a model directory, and it cannot be looked up"
    assert f"hf-deqnar translate: my-modle {message}" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr

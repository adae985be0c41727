"""Running the command line in a separate process."""

import json
import subprocess
import sys

import pytest
from transformers.utils import logging

from ..conftest import SENTENCES


@pytest.fixture(autouse=True)
def _quiet():
    """The command line silences transformers for its process, which here is that of other tests too."""
    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()


@pytest.fixture
def run():
    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hf_deqnar.cli.main", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, input=stdin, check=False)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run


@pytest.fixture
def columns(tmp_path):
    """Flags that name sentence pairs."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"en": english, "de": german}) + "\n" for english, german in SENTENCES * 10))
    return ["--data", str(data), "--source", "en", "--target", "de"]

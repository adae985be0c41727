"""Running the command line as a user does: in a process of its own."""

import subprocess
import sys

import pytest
from transformers.utils import logging


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

"""Running the command line as a user does: in a process of its own."""

import subprocess
import sys

import pytest


@pytest.fixture
def run():
    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "hf_deqnar.cli.main", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, input=stdin, check=False)
        done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
        return done

    return run

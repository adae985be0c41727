"""Running the command line: in the process of the tests, or in one of its own where that matters."""

import contextlib
import io
import json
import os
import subprocess
import sys
import termios
import threading

import pytest

from hf_deqnar.cli.main import main

from ..conftest import SENTENCES


@pytest.fixture
def run(monkeypatch):
    """Run a command in this process, which spares the seconds that importing torch takes."""

    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
        arguments = [str(argument) for argument in arguments]
        output, errors = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            try:
                status = main(arguments)
            except SystemExit as stopped:
                status = stopped.code
        texts = []
        for stream in (output, errors):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())
        return subprocess.CompletedProcess(arguments, status or 0, *texts)

    return run


@pytest.fixture
def run_on_terminal(monkeypatch):
    """Run a command in this process with stdout or stderr on a pseudo-terminal; returns what the terminal shows."""

    def run(stream: str, *arguments: str) -> str:
        reading, writing = os.openpty()
        termios.tcsetwinsize(writing, (24, 120))
        shown = bytearray()

        def read() -> None:
            with contextlib.suppress(OSError):  # the other side is closed
                while data := os.read(reading, 4096):
                    shown.extend(data)

        reader = threading.Thread(target=read)
        reader.start()
        with os.fdopen(writing, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, stream, terminal)
            status = main([str(argument) for argument in arguments])
        reader.join()
        os.close(reading)
        assert status == 0, shown.decode()
        return shown.decode().replace("\r\n", "\n")

    return run


@pytest.fixture
def run_process():
    """Run a command in a process of its own, as a user does: nothing else has been imported or set."""

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

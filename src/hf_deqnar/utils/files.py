"""Atomic writing of files, and checks whose errors name the file and the remedy."""

import contextlib
import gzip
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError


def check_writable(path: Path | None) -> None:
    """Raise if an output file cannot be created at `path`; called before long computations."""
    check_parent(path)
    if path is not None and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file.")


def check_parent(path: Path | None) -> None:
    """Raise if the folder that is to contain `path` does not exist."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} to write {path.name} into.")


@contextlib.contextmanager
def reading_weights(name: str, expected: str = "its config.json describes") -> Iterator[None]:
    """Replace the errors of loading a model's weights by one line that names the model.

    Args:
        name: of the model.
        expected: end of the sentence "The weights of … are not those that …", if shapes differ.
    """
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} are damaged: {error}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"The weights of {name} are not those that {expected}.") from error


def write_atomically(path: Path, lines: Iterable[str], folder: Path | None = None) -> None:
    """Write lines of text, gzipped if the name ends in `.gz`, to a temporary file that is then renamed to `path`.

    Equal lines give equal bytes: the gzip header contains neither the time nor the file name.

    Args:
        path: of the finished file.
        lines: without line ends.
        folder: of the temporary file, on the same file system; that of `path` by default.
    """
    with renamed(path, folder) as file:
        output = gzip.GzipFile("", "wb", 6, file, mtime=0) if path.suffix == ".gz" else contextlib.nullcontext(file)
        with output as stream:
            for line in lines:
                stream.write(line.encode("utf-8") + b"\n")


def write_text(path: Path, text: str) -> None:
    """Write a text as it is, with its line ends, to a temporary file that is then renamed to `path`."""
    with renamed(path) as file:
        file.write(text.encode("utf-8", errors="replace"))


@contextlib.contextmanager
def renamed(path: Path, folder: Path | None = None) -> Iterator[BinaryIO]:
    """A temporary file in the folder, or that of `path`, which is renamed to `path` if no error occurs."""
    unfinished = (folder or path.parent) / f"{path.name}.{uuid.uuid4().hex}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, values: dict[str, Any], folder: Path | None = None) -> None:
    """Write an indented JSON object with `write_atomically`.

    Args:
        path, folder: as for `write_atomically`.
        values: the object.
    """
    write_atomically(path, [json.dumps(values, indent=2, ensure_ascii=False)], folder)


def read_json(path: Path, *names: str, remedy: str) -> dict[str, Any]:
    """Read a JSON object written by `write_json`.

    Args:
        path: of the file.
        names: keys that the object must have.
        remedy: what the user can do if the file is damaged; ends the error message.
    """
    return read_json_text(path.read_bytes(), path, *names, remedy=remedy)


def read_json_text(content: bytes, path: Path | str, *names: str, remedy: str) -> dict[str, Any]:
    """As `read_json`, from the content of the file."""
    try:
        found = json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged (not a JSON object); {remedy}.")
    if missing := sorted(set(names) - found.keys()):
        raise ValueError(f"{path} is damaged (no {', '.join(missing)}); {remedy}.")
    return found


def write_error(path: Path | str, error: OSError) -> OSError:
    """The error to raise when `path` could not be written."""
    return OSError(
        f"{path} could not be written ({error.strerror or error}); all finished files are intact. Fix the cause and "
        "run the same command again to resume."
    )


CHECKSUMS = "checksums.json"


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """List every file of a folder with its SHA-256, in `checksums.json`."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    write_json(folder / CHECKSUMS, {path.relative_to(folder).as_posix(): digest_of(path) for path in files})


def find_damage(folder: Path) -> str | None:
    """Which file of a folder differs from its `checksums.json`, and how; None if all are intact.

    A folder without that file, as earlier versions wrote it, is not checked.
    """
    if not (folder / CHECKSUMS).is_file():
        return None
    try:
        files = read_json(folder / CHECKSUMS, remedy="remove it")
    except ValueError:
        return f"{folder / CHECKSUMS} is damaged"
    for name, expected in files.items():
        if not (folder / name).is_file():
            return f"{folder / name} is missing"
        if digest_of(folder / name) != expected:
            return f"{folder / name} is damaged: it is not what was written"
    return None

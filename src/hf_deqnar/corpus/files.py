"""Files that are written whole or not at all, and say which they are when they are damaged."""

import contextlib
import gzip
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def check_writable(path: Path | None) -> None:
    """Refuse, before any work is done, a file that could not be written after it."""
    check_parent(path)
    if path is not None and path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file.")


def check_parent(path: Path | None) -> None:
    """The same for a folder that will be made, or written into."""
    if path is not None and not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} to write {path.name} into.")


@contextlib.contextmanager
def reading_weights(name: str, wanted: str = "its config.json describes") -> Iterator[None]:
    """What goes wrong when the weights of a model are read, in one line."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} are damaged: {error}") from error
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(f"The weights of {name} are not those that {wanted}.") from error


def write_whole(path: Path, lines: Iterable[str], folder: Path | None = None) -> None:
    """Write lines of text, gzipped if the name says so; the file has its name only when all of it is on the disk.

    Equal lines give equal bytes: nothing of the time or the name goes into the compressed file.

    Args:
        folder: where the unfinished file lies until then, on the same disk; beside the finished one by default.
    """
    unfinished = (folder or path.parent) / f"{path.name}.{uuid.uuid4().hex}.unfinished"
    try:
        with open(unfinished, "wb") as file:
            packed = gzip.GzipFile("", "wb", 6, file, mtime=0) if path.suffix == ".gz" else contextlib.nullcontext(file)
            with packed as stream:
                for line in lines:
                    stream.write(line.encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise not_written(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, values: dict[str, Any], folder: Path | None = None) -> None:
    """Values by name, for people to read; whole or not at all, as by `write_whole`."""
    write_whole(path, [json.dumps(values, indent=2, ensure_ascii=False)], folder)


def read_json(path: Path, *names: str, remedy: str) -> dict[str, Any]:
    """What `write_json` wrote.

    Args:
        names: of values that must be there.
        remedy: what the user may do if the file is damaged.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}.") from error
    if not isinstance(found, dict) or not found.keys() >= set(names):
        raise ValueError(f"{path} is damaged (not all is there that should be); {remedy}.")
    return found


def not_written(path: Path, error: OSError) -> OSError:
    return OSError(
        f"{path} could not be written ({error.strerror or error}); all that was finished is intact. Mend that and "
        "start again: it goes on where it was."
    )

"""Files that are written whole or not at all."""

import contextlib
import gzip
import os
import uuid
from collections.abc import Iterable
from pathlib import Path


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


def not_written(path: Path, error: OSError) -> OSError:
    return OSError(
        f"{path} could not be written ({error.strerror or error}); all that was finished is intact. Mend that and "
        "start again: it goes on where it was."
    )

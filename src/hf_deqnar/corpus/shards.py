"""Work in pieces that processes share through a folder: claimed by locks, written whole or not at all.

A folder has a `manifest.json` that says what is made in it, `00000.jsonl` and so on for finished pieces, and for a
piece at work `00000.lock`. A lock names its process and is touched while that works, so that others tell a worker from
a corpse.
"""

import contextlib
import gzip
import hashlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HEARTBEAT = 10.0  # seconds between two touches of a lock
SILENCE = 120.0  # seconds without one after which its owner is taken for dead, wherever it runs
PATIENCE = 0.2  # seconds between two looks at what others do
MANIFEST = "manifest.json"

# A process that is started again, in a container say, may have the number of the one before; this it has alone.
PROCESS = uuid.uuid4().hex


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
        raise _not_written(path, error) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _not_written(path: Path, error: OSError) -> OSError:
    return OSError(
        f"{path} could not be written ({error.strerror or error}); all that was finished is intact. Mend that and "
        "start again: it goes on where it was."
    )


@contextlib.contextmanager
def held(lock: Path) -> Iterator[bool]:
    """Try to take a lock, and say whether it is ours; it is kept alive and in the end given back."""
    owner = _take(lock)
    if owner is None:
        yield False
        return
    finished = threading.Event()
    heart = threading.Thread(target=_beat, args=(lock, finished), daemon=True)
    heart.start()
    try:
        yield True
    finally:
        finished.set()
        heart.join()
        if _read(lock) == owner:
            lock.unlink(missing_ok=True)


def _take(lock: Path) -> str | None:
    """What is written in the lock, if it could be taken."""
    _remove_if_abandoned(lock)
    owner = json.dumps({"host": platform.node(), "pid": os.getpid(), "process": PROCESS})
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return None
    except OSError as error:
        raise _not_written(lock, error) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(owner)
    except OSError as error:
        lock.unlink(missing_ok=True)
        raise _not_written(lock, error) from error
    return owner


def _beat(lock: Path, finished: threading.Event) -> None:
    while not finished.wait(HEARTBEAT):
        with contextlib.suppress(FileNotFoundError):  # taken over by one that thought us dead; both write the same
            os.utime(lock)


def _remove_if_abandoned(lock: Path) -> None:
    """Take a dead process's lock away. It is moved first, so that of several who see it dead one removes it."""
    seen = _read(lock)
    if seen is None or not _abandoned(lock, seen):
        return
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex}.abandoned")
    try:
        os.rename(lock, aside)
    except FileNotFoundError:  # another was faster
        return
    if _read(aside) != seen and not lock.exists():  # another was faster and has a lock of its own: give it back
        os.rename(aside, lock)
    aside.unlink(missing_ok=True)


def _read(lock: Path) -> str | None:
    try:
        return lock.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _abandoned(lock: Path, text: str) -> bool:
    try:
        silent = time.time() - lock.stat().st_mtime
        owner = json.loads(text)
    except FileNotFoundError:  # given back just now
        return False
    except json.JSONDecodeError:  # being written, or its writer died over it
        return silent > SILENCE
    return silent > SILENCE or (owner["host"] == platform.node() and not _runs(owner["pid"], owner["process"]))


def _runs(pid: int, process: str) -> bool:
    """Whether a process of this machine is alive."""
    if pid == os.getpid():
        return process == PROCESS
    if os.name == "nt":  # where signal 0 would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # alive, and somebody else's
        return True
    return True


def folder_of(output: Path) -> Path:
    return Path(f"{output}.shards")


def check_origin(output: Path) -> None:
    """Refuse to write over a file that was made otherwise."""
    if not output.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {output.parent} to write {output.name} into.")
    if output.exists() and not (folder_of(output) / MANIFEST).is_file():
        raise FileExistsError(f"{output} exists and nothing says how it was made; choose another output or remove it.")


def begin(output: Path, manifest: dict[str, Any]) -> tuple[Path, str]:
    """Open the folder in which `output` is made; the folder, and the fingerprint of its manifest.

    The manifest says everything that decides the result. If work was begun before, it must have been the same.
    """
    check_origin(output)
    folder = folder_of(output)
    path = folder / MANIFEST
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise _not_written(folder, error) from error
    while not path.is_file():
        with held(folder / "manifest.lock") as ours:
            if ours and not path.is_file():
                write_whole(path, [json.dumps(manifest, indent=2, ensure_ascii=False)])
        if not ours:
            time.sleep(PATIENCE)
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged; choose another output or remove {folder}.") from error
    _check_same(output, before, json.loads(json.dumps(manifest)))
    return folder, hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]


def _check_same(output: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for name in now:
        if before.get(name) != now[name]:
            raise ValueError(
                f"{output} was begun with {name}={before.get(name)}, but now it is {now[name]}; choose another output, "
                f"go on as it began, or remove {folder_of(output)}."
            )


def write_shard(path: Path, fingerprint: str, rows: list[dict[str, Any]], **figures: Any) -> None:
    """A piece of work: a checksum, a line about it, and a line for every row."""
    header = {"fingerprint": fingerprint, "rows": len(rows), **figures}
    lines = [json.dumps(entry, ensure_ascii=False) for entry in (header, *rows)]
    write_whole(path, [_checksum(lines), *lines])


def read_shard(path: Path, fingerprint: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """What `write_shard` wrote: its figures and its rows. None if it is not there, not whole, or of other work."""
    try:
        checksum, *lines = path.read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if not lines or lines.pop() != "" or checksum != _checksum(lines):
        return None
    header, *rows = map(json.loads, lines)
    return (header, rows) if header["fingerprint"] == fingerprint else None


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes have left of a file; only for who holds its lock."""
    for unfinished in path.parent.glob(f"{path.name}.*.unfinished"):
        unfinished.unlink(missing_ok=True)


def _checksum(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()

"""Locks between processes, as files: one that works keeps others out, and one that died does not.

A lock names its process and is touched while that works, so that others tell a worker from a corpse.
"""

import contextlib
import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

from .files import not_written

logger = logging.get_logger(__name__)

HEARTBEAT = 10.0  # seconds between two touches of a lock
SILENCE = 120.0  # seconds without one after which its owner is taken for dead, wherever it runs
PATIENCE = 0.2  # seconds between two looks at what others do

# A process that is started again, in a container say, may have the number of the one before; this it has alone.
PROCESS = uuid.uuid4().hex


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


@contextlib.contextmanager
def awaited(lock: Path) -> Iterator[None]:
    """Hold a lock as soon as it is free."""
    while True:
        with held(lock) as ours:
            if ours:
                yield
                return
        time.sleep(PATIENCE)


def is_held(lock: Path) -> bool:
    """Whether one who lives holds it."""
    with held(lock) as ours:
        return not ours


def _take(lock: Path) -> str | None:
    """What is written in the lock, if it could be taken."""
    _remove_if_abandoned(lock)
    owner = json.dumps({"host": platform.node(), "pid": os.getpid(), "process": PROCESS})
    try:
        descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return None
    except OSError as error:
        raise not_written(lock, error) from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(owner)
    except OSError as error:
        lock.unlink(missing_ok=True)
        raise not_written(lock, error) from error
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
        return lock.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _abandoned(lock: Path, text: str) -> bool:
    try:
        silent = time.time() - lock.stat().st_mtime
    except FileNotFoundError:  # given back just now
        return False
    if silent > SILENCE:
        return True
    try:
        owner = json.loads(text)
        host, pid, process = owner["host"], owner["pid"], owner["process"]
    except (ValueError, TypeError, KeyError):  # being written, or its writer died over it
        if silent > HEARTBEAT:
            logger.warning_once(f"{lock} is damaged; it is taken over {SILENCE:g} seconds after its last change.")
        return False
    return host == platform.node() and not _runs(pid, process)


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
    return not _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended but its parent, often a container's first process, has not asked how."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux, or gone by now
        return False
    return text.rpartition(")")[2].split()[0] == "Z"

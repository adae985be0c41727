"""Locks between processes, also of several hosts that share a file system.

A lock is a `filelock.SoftFileLease`: a file that names its owner and that the owner refreshes while it runs. filelock
takes over the lock of a process of this host that has ended. It never takes over an empty file, which an owner that was
killed while it created the lock leaves, nor any file on file systems that cannot exchange two names, such as NFS;
therefore `try_lock` also removes files that were not refreshed for `LEASE_DURATION` seconds.
"""

import contextlib
import errno
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import SoftFileLease, Timeout
from transformers.utils import logging

from .files import write_error

logger = logging.get_logger(__name__)

HEARTBEAT_INTERVAL = 10.0  # seconds between two refreshes of a lock
LEASE_DURATION = 120.0  # seconds without a refresh after which the owner is considered dead, on any host
POLL_INTERVAL = 0.2  # seconds between two attempts to acquire a lock

# Inode and time of lock files of others, and the monotonic time at which this process first saw them so.
_seen: dict[Path, tuple[tuple[int, int], float]] = {}


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Try once to acquire a lock, and release it at the end; yields whether it was acquired.

    >>> with try_lock(Path("run.lock")) as acquired, try_lock(Path("run.lock")) as acquired_again:
    ...     print(acquired, acquired_again)
    True False
    """
    _remove_expired(path)
    lease = SoftFileLease(path, lease_duration=LEASE_DURATION, heartbeat_interval=HEARTBEAT_INTERVAL)
    try:
        lease.acquire(blocking=False)
    except Timeout:
        if not os.access(path.parent, os.W_OK):  # then the lock of a dead process cannot be taken over
            raise write_error(path, OSError(errno.EROFS, "the folder is read-only")) from None
        acquired = False
    except OSError as error:
        raise write_error(path, error) from error
    else:
        acquired = True
    try:
        yield acquired
    finally:
        if acquired:
            lease.release()


@contextlib.contextmanager
def wait_for_lock(path: Path) -> Iterator[None]:
    """Acquire a lock as soon as it is free."""
    while True:
        with try_lock(path) as acquired:
            if acquired:
                yield
                return
        time.sleep(POLL_INTERVAL)


def is_locked(path: Path) -> bool:
    """Whether a live process has acquired a lock."""
    with try_lock(path) as acquired:
        return not acquired


def _remove_expired(path: Path) -> None:
    """Remove a lock file that was not refreshed in time.

    It is renamed first: of several processes that find it expired one succeeds, and a file that has been replaced since
    it was examined is restored.
    """
    examined = _identity(path)
    if examined is None:
        _seen.pop(path, None)
        return
    if not (_was_unchanged(path, examined) or _is_out_of_date(path, examined[1] / 1e9)):
        return
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.expired")
    try:
        os.rename(path, aside)
    except (FileNotFoundError, PermissionError):  # removed by another process, or open in one (Windows)
        return
    if _identity(aside) != examined and not path.exists():
        os.rename(aside, path)
        return
    aside.unlink(missing_ok=True)
    logger.warning(f"{path} was not refreshed for {LEASE_DURATION:g} seconds; its owner is considered dead.")


def _was_unchanged(path: Path, identity: tuple[int, int]) -> bool:
    """Whether this process has seen the same file for `LEASE_DURATION` seconds, on a monotonic clock."""
    known, since = _seen.get(path, (None, 0.0))
    if known != identity:
        _seen[path] = identity, time.monotonic()
        return False
    return time.monotonic() - since > LEASE_DURATION


def _is_out_of_date(path: Path, refreshed: float) -> bool:
    """Whether the time of a lock file is long ago, or in the future because a clock was set back.

    Not if its owner is a live process of this host: then it was the clock that jumped. Hosts with other clocks than
    that of a shared file system do not matter, because a new file shows the time of the latter.
    """
    if abs(time.time() - refreshed) <= LEASE_DURATION or _owner_lives_here(path):
        return False
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", suffix=".clock") as file:
            now = os.fstat(file.fileno()).st_mtime
    except OSError as error:
        raise write_error(path, error) from error
    return abs(now - refreshed) > LEASE_DURATION


def _owner_lives_here(path: Path) -> bool:
    owner = SoftFileLease(path, lease_duration=LEASE_DURATION, heartbeat_interval=HEARTBEAT_INTERVAL).owner
    if owner is None or owner.hostname != socket.gethostname() or os.name != "posix":
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Inode and time of the last refresh in nanoseconds; None if there is no file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns

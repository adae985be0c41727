import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from hf_deqnar.utils import locks
from hf_deqnar.utils.locks import is_locked, try_lock, wait_for_lock

# Acquires the lock, prints a message, and waits until it is killed or its input is closed.
OWNER = """
import sys
from pathlib import Path
from hf_deqnar.utils.locks import try_lock
with try_lock(Path(sys.argv[1])) as acquired:
    print(acquired, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "00000.lock"


@pytest.fixture
def owner(lock):
    """Another process that has acquired the lock."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"True\n"
    yield process
    process.stdin.close()
    process.wait()


def set_age(path, seconds):
    os.utime(path, (time.time() - seconds,) * 2)


def test_only_one_acquires_a_lock_and_releases_it(lock):
    with try_lock(lock) as first, try_lock(lock) as second:
        assert first
        assert not second
        assert is_locked(lock)
        assert f"pid={os.getpid()}" in lock.read_text()
    assert not lock.exists()
    assert not is_locked(lock)
    with try_lock(lock) as again:
        assert again


def test_a_lock_is_released_after_an_error(lock):
    with pytest.raises(KeyboardInterrupt), try_lock(lock):
        raise KeyboardInterrupt
    assert not lock.exists()


def test_the_lock_of_a_live_process_is_respected_and_that_of_a_killed_one_is_taken_over(lock, owner):
    with try_lock(lock) as acquired:
        assert not acquired
    owner.kill()
    owner.wait()
    with try_lock(lock) as acquired:
        assert acquired
    assert not list(lock.parent.iterdir())


def test_a_lock_of_another_host_expires_without_refreshes(lock, owner, caplog):
    owner.kill()
    owner.wait()
    lock.write_text(lock.read_text().replace(f"host={socket.gethostname()}", "host=another"))
    set_age(lock, locks.LEASE_DURATION - 10)
    with try_lock(lock) as acquired:
        assert not acquired
    set_age(lock, locks.LEASE_DURATION + 1)
    with try_lock(lock) as acquired:
        assert acquired
    assert f"{lock} was not refreshed for 120 seconds; its owner is considered dead." in caplog.text
    assert not list(lock.parent.iterdir())


@pytest.mark.parametrize("content", [b"", b"filelock/2\npid=", b'{"host": "', b"\xff"])
def test_an_incomplete_lock_expires(lock, content):
    """The file of a process that was killed while it created the lock."""
    lock.write_bytes(content)
    with try_lock(lock) as acquired:
        assert not acquired
    assert lock.read_bytes() == content
    set_age(lock, locks.LEASE_DURATION + 1)
    with try_lock(lock) as acquired:
        assert acquired
    assert not list(lock.parent.iterdir())


def test_an_expired_lock_that_another_process_has_just_replaced_is_restored(lock, monkeypatch):
    lock.write_text("expired")
    set_age(lock, locks.LEASE_DURATION + 1)
    rename = os.rename

    def replaced_before(source, destination):
        if source == lock:
            monkeypatch.setattr(os, "rename", rename)
            new = lock.with_name("new")
            new.write_text("of another process")
            os.replace(new, lock)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", replaced_before)
    with try_lock(lock) as acquired:
        assert not acquired
    assert lock.read_text() == "of another process"
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


def test_a_lock_is_refreshed_while_it_is_acquired(lock, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT_INTERVAL", 0.01)
    with try_lock(lock):
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 10
        while lock.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_waiting_process_acquires_the_lock_when_it_is_released(lock):
    order = []

    def wait():
        with wait_for_lock(lock):
            order.append("acquired")

    thread = threading.Thread(target=wait)
    with try_lock(lock):
        thread.start()
        time.sleep(2 * locks.POLL_INTERVAL)
        order.append("released")
    thread.join(10)
    assert order == ["released", "acquired"]


def test_threads_never_acquire_a_lock_at_the_same_time(lock):
    inside, most, acquisitions = [], [], []

    def work():
        for _ in range(30):
            with try_lock(lock) as acquired:
                if acquired:
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.001)
                    inside.pop()
                    acquisitions.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(acquisitions) > 3


def test_a_lock_that_cannot_be_created_is_a_one_line_error(lock):
    lock.mkdir()
    with pytest.raises(OSError, match=r"00000.lock could not be written \(Is a directory\)"), try_lock(lock):
        pass


def test_an_incomplete_lock_from_the_future_does_not_block_for_ever(lock, caplog):
    """The clock was set back after the process that created it was killed."""
    lock.write_bytes(b"")
    set_age(lock, -86400)
    with try_lock(lock) as acquired:
        assert acquired
    assert "its owner is considered dead" in caplog.text
    assert not list(lock.parent.iterdir())


@pytest.mark.parametrize("age", [86400, -86400])
def test_a_jump_of_the_clock_does_not_take_the_lock_of_a_live_process(lock, owner, age):
    """A day forward or back, before the owner's next refresh."""
    set_age(lock, age)
    with try_lock(lock) as acquired:
        assert not acquired
    assert f"pid={owner.pid}" in lock.read_text()
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


def test_a_host_whose_clock_is_wrong_does_not_take_the_lock_of_another_host(lock, owner, monkeypatch):
    """The times of both are those of the file system."""
    content = lock.read_text().replace(f"host={socket.gethostname()}", "host=another")
    owner.kill()
    owner.wait()
    lock.write_text(content)
    now = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now + 3600)
        with try_lock(lock) as acquired:
            assert not acquired
    assert lock.read_text() == content


def test_a_lock_that_is_seen_unchanged_for_long_enough_expires_whatever_the_clocks_say(lock, monkeypatch):
    lock.write_bytes(b"")
    with try_lock(lock) as acquired:
        assert not acquired
    later = time.monotonic() + locks.LEASE_DURATION + 1
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: later)
        with try_lock(lock) as acquired:
            assert acquired


def test_the_lock_of_a_dead_process_in_a_read_only_folder_is_an_error(lock, owner, monkeypatch):
    """The lock could not be taken over; the command said before that another run was writing there."""
    owner.kill()
    owner.wait()
    monkeypatch.setattr(os, "access", lambda path, mode: path != lock.parent)
    monkeypatch.setattr(locks.SoftFileLease, "_try_break_stale_lock", lambda self: None)  # what such a folder causes
    with pytest.raises(OSError, match="00000.lock could not be written .the folder is read-only."), try_lock(lock):
        pass

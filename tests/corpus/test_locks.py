import json
import os
import platform
import subprocess
import sys
import threading
import time

import pytest

from hf_deqnar.corpus import locks
from hf_deqnar.corpus.locks import held


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "00000.lock"


def write_lock(lock, **fields):
    owner = {"host": platform.node(), "pid": os.getpid(), "process": locks.PROCESS, **fields}
    lock.write_text(json.dumps(owner))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only Linux tells")
def test_a_process_that_has_ended_but_was_not_waited_for_is_dead(lock):
    process = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    process.stdout.read()  # until it closes its output
    deadline = time.monotonic() + 10
    while not locks._is_zombie(process.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    write_lock(lock, pid=process.pid, process="another")
    with held(lock) as ours:
        assert ours
    process.wait()


def test_only_one_holds_a_lock_and_gives_it_back(lock):
    with held(lock) as first, held(lock) as second:
        assert first
        assert not second
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert not lock.exists()
    with held(lock) as again:
        assert again


def test_a_lock_is_given_back_after_an_error(lock):
    with pytest.raises(KeyboardInterrupt), held(lock):
        raise KeyboardInterrupt
    assert not lock.exists()


def test_locks_of_dead_processes_are_taken_over_and_those_of_live_ones_are_not(lock, caplog):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for fields, free in [
            ({"pid": dead_process()}, True),
            ({"process": "of a container before this one"}, True),
            ({"pid": living.pid, "process": "other"}, False),
            ({"pid": dead_process(), "host": "another machine"}, False),
        ]:
            write_lock(lock, **fields)
            with held(lock) as ours:
                assert ours == free, fields
            lock.unlink(missing_ok=True)
    finally:
        living.communicate(b"\n")
    write_lock(lock, host="another machine")
    long_ago = time.time() - locks.SILENCE - 1
    os.utime(lock, (long_ago, long_ago))
    with held(lock) as ours:
        assert ours
    for content in (b"", b'{"host": "', b"null", b"{}", b"\xff"):  # taken, and not yet written in; or damaged
        lock.write_bytes(content)
        with held(lock) as ours:
            assert not ours
        os.utime(lock, (time.time() - locks.SILENCE / 2,) * 2)
        with held(lock) as ours:
            assert not ours
        assert f"{lock} is damaged; it is taken over 120 seconds after its last change." in caplog.text
        assert lock.read_bytes() == content
        os.utime(lock, (long_ago, long_ago))
        with held(lock) as ours:
            assert ours
    assert not list(lock.parent.iterdir())


def test_a_lock_that_another_has_taken_over_in_between_is_given_back(lock, monkeypatch):
    """Both saw a dead owner; the other has been faster, and works now under this lock."""
    write_lock(lock, pid=dead_process())
    rename = os.rename

    def faster(source, destination):
        if source == lock:
            monkeypatch.setattr(os, "rename", rename)
            write_lock(lock, process=locks.PROCESS)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", faster)
    with held(lock) as ours:
        assert not ours
    assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_lock_is_touched_while_it_is_held(lock, monkeypatch):
    monkeypatch.setattr(locks, "HEARTBEAT", 0.01)
    with held(lock):
        os.utime(lock, (0, 0))
        deadline = time.monotonic() + 10
        while lock.stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_many_threads_never_hold_a_lock_together(lock):
    inside, most, taken = [], [], []

    def work():
        for _ in range(30):
            with held(lock) as ours:
                if ours:
                    inside.append(1)
                    most.append(len(inside))
                    time.sleep(0.001)
                    inside.pop()
                    taken.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(taken) > 3

import errno
import json
import os
import platform
import subprocess
import sys
import threading
import time

import pytest

from hf_deqnar.corpus import shards
from hf_deqnar.corpus.shards import begin, held, read_shard, write_shard, write_whole

ROWS = [{"text": "Ein Pferd."}, {"text": "zwei\nZeilen\u2028"}]


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "00000.lock"


def write_lock(lock, **fields):
    owner = {"host": platform.node(), "pid": os.getpid(), "process": shards.PROCESS, **fields}
    lock.write_text(json.dumps(owner))


def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


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


def test_locks_of_dead_processes_are_taken_over_and_those_of_live_ones_are_not(lock, monkeypatch):
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
    long_ago = time.time() - shards.SILENCE - 1
    os.utime(lock, (long_ago, long_ago))
    with held(lock) as ours:
        assert ours
    lock.write_text("")  # taken, and not yet written in
    with held(lock) as ours:
        assert not ours
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
            write_lock(lock, process=shards.PROCESS)
        rename(source, destination)

    monkeypatch.setattr(os, "rename", faster)
    with held(lock) as ours:
        assert not ours
    assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_lock_is_touched_while_it_is_held(lock, monkeypatch):
    monkeypatch.setattr(shards, "HEARTBEAT", 0.01)
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


def test_a_shard_is_read_back_and_any_damage_is_seen(tmp_path):
    path = tmp_path / "00000.jsonl"
    assert read_shard(path, "work") is None
    write_shard(path, "work", ROWS, seconds=1.5)
    header, rows = read_shard(path, "work")
    assert rows == ROWS
    assert header["seconds"] == 1.5
    assert read_shard(path, "other work") is None
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert read_shard(path, "work") is None, cut
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_shard(path, "work") is None, place


def test_equal_lines_are_equal_bytes_whenever_and_under_whatever_name(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_whole(tmp_path / name, ["ä", "b"])
        time.sleep(1.1 if name == "a.gz" else 0)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "b.gz"]


def test_a_full_disk_is_one_line_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, ["before"])

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="file could not be written .No space left on device.; all that was finished"):
        write_whole(path, ["after"])
    assert path.read_text() == "before\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_what_was_begun_goes_on_only_as_it_began(tmp_path):
    output = tmp_path / "out.jsonl"
    folder, fingerprint = begin(output, {"corpus": "abc", "num_beams": 5})
    assert begin(output, {"corpus": "abc", "num_beams": 5}) == (folder, fingerprint)
    for changed, message in [
        ({"corpus": "abd", "num_beams": 5}, "begun with corpus=abc, but now it is abd; choose another output"),
        ({"corpus": "abc", "num_beams": 4}, "begun with num_beams=5, but now it is 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            begin(output, changed)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="manifest.json is damaged"):
        begin(output, {"corpus": "abc", "num_beams": 5})


def test_a_file_of_unknown_origin_is_not_overwritten(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="exists and nothing says how it was made"):
        begin(output, {})
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        begin(tmp_path / "absent" / "out.jsonl", {})
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]

"""Invariant 9 for distillation: killed anywhere and resumed, or run by several processes, it writes the same bytes."""

import builtins
import itertools
import multiprocessing
import os
import random
import signal
import time

import pytest

from hf_deqnar.distillation import distill as distillation
from hf_deqnar.distillation.distill import distill
from hf_deqnar.utils import locks

from ..distillation.conftest import COLUMNS, OPTIONS, corpus, make_teacher
from ..distillation.test_distill import Stopped

# Children share the loaded teacher of this process; starting a new Python takes seconds.
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def teacher(tokenizer):
    return make_teacher(tokenizer)


@pytest.fixture(scope="module")
def uninterrupted(teacher, tmp_path_factory):
    output = tmp_path_factory.mktemp("uninterrupted") / "out.jsonl.gz"
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    return output.read_bytes()


def work(teacher, output, log, pause, process=0, processes=1) -> None:
    """Distil with a pause before each shard is written, and log every finished shard."""
    write = distillation.write_shard

    def logged(path, *rest, **options):
        time.sleep(pause)
        write(path, *rest, **options)
        with open(log, "a") as file:
            file.write(f"{path.name}\n")

    distillation.write_shard = logged
    distill(corpus(), teacher, output, options=OPTIONS, process=process, processes=processes, **COLUMNS)


def start(*arguments, **options):
    process = FORK.Process(target=work, args=arguments, kwargs=options)
    process.start()
    return process


def test_a_run_killed_repeatedly_ends_with_the_same_bytes(teacher, uninterrupted, tmp_path):
    output, log, generator = tmp_path / "out.jsonl.gz", tmp_path / "log", random.Random(0)
    kills = 0
    for _ in range(60):
        process = start(teacher, output, log, 0.1)
        process.join(generator.uniform(0.02, 0.25))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join()
        if output.exists():
            break
    assert kills >= 3
    assert output.read_bytes() == uninterrupted
    finished = log.read_text().split()
    assert len(finished) == len(set(finished)) >= 5  # a kill between writing and logging may omit one


@pytest.mark.parametrize("function", ["replace", "fsync", "open"])
def test_a_run_stopped_at_any_file_operation_ends_with_the_same_bytes(
    teacher, uninterrupted, tmp_path, monkeypatch, function
):
    """Stopped at the n-th call, for every n."""
    module = builtins if function == "open" else os
    original = getattr(module, function)
    for stop in range(1, 200):
        output, calls = tmp_path / str(stop) / "out.jsonl.gz", []
        output.parent.mkdir()

        def counted(*arguments, stop=stop, calls=calls, **options):
            if function != "open" or str(arguments[0]).endswith(".unfinished"):
                calls.append(1)
                if len(calls) == stop:
                    raise Stopped
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(module, function, counted)
            try:
                distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
            except Stopped:
                pass
            else:
                break
        distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
        assert output.read_bytes() == uninterrupted
    assert stop > 8  # a manifest, six shards, statistics and the output


def test_several_processes_write_every_shard_once_and_the_bytes_of_one_process(teacher, uninterrupted, tmp_path):
    output, logs = tmp_path / "out.jsonl.gz", [tmp_path / f"log{number}" for number in range(3)]
    running = [start(teacher, output, log, 0.05, process=number, processes=3) for number, log in enumerate(logs)]
    for process in running:
        process.join(60)
        assert process.exitcode == 0
    assert output.read_bytes() == uninterrupted
    finished = [log.read_text().split() if log.exists() else [] for log in logs]
    assert all(finished)
    assert sorted(itertools.chain(*finished)) == [f"{number:05}.jsonl" for number in range(6)]
    assert not [path for path in (tmp_path / "out.jsonl.gz.shards").iterdir() if not path.suffix.startswith(".json")]


def test_a_running_process_takes_over_the_shard_of_a_killed_one(teacher, uninterrupted, tmp_path):
    output = tmp_path / "out.jsonl.gz"
    stuck = start(teacher, output, tmp_path / "log0", 60, process=0, processes=2)
    lock = tmp_path / "out.jsonl.gz.shards" / "00000.lock"
    wait_for(lambda: lock.exists())
    other = start(teacher, output, tmp_path / "log1", 0, process=1, processes=2)
    wait_for(lambda: (tmp_path / "log1").exists() and len((tmp_path / "log1").read_text().split()) == 5)
    time.sleep(2 * locks.POLL_INTERVAL)
    assert other.is_alive()  # waits for the unfinished shard
    assert not output.exists()
    os.kill(stuck.pid, signal.SIGKILL)
    stuck.join()
    other.join(30)
    assert other.exitcode == 0
    assert output.read_bytes() == uninterrupted
    assert (tmp_path / "log1").read_text().split()[-1] == "00000.jsonl"


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

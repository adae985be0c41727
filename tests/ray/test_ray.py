"""`hf-deqnar distill --ray` on a cluster of this machine. Run by `make test-ray`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_deqnar.cli.main import main
from hf_deqnar.distillation.ray_actors import translate_by_actors
from hf_deqnar.distillation.sharded import Task

from ..conftest import SENTENCES
from ..distillation.conftest import make_teacher

ray = pytest.importorskip("ray", reason="ray is an extra")
MARK = "HF_DEQNAR_TEST_OF_RAY"


@pytest.fixture
def command(tokenizer, tmp_path):
    teacher = make_teacher(tokenizer)
    teacher.model.save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    rows = [{"en": f"{english} {number}", "de": german} for number in range(20) for english, german in SENTENCES]
    (tmp_path / "data.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = ["--data", str(tmp_path / "data.jsonl"), "--source", "en", "--target", "de", "--shard_sentences", "5"]
    return ["distill", "--teacher", str(tmp_path / "teacher"), *data, "--num_beams", "2", "--max_length", "20"]


def actors_of(mark: str) -> list[int]:
    """Actors of the cluster that was started with a mark in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            title, environment = ((process / file).read_bytes() for file in ("cmdline", "environ"))
        except OSError:  # it has ended
            continue
        if b"ray::TranslationActor" in title and f"{MARK}={mark}".encode() in environment:
            found.append(int(process.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="actors are found in /proc")
def test_the_shard_of_a_killed_actor_is_done_by_another(command, tmp_path):
    """Two actors, one of which is killed; the result has the bytes of one machine."""
    assert main([*command, "--output", str(tmp_path / "alone.jsonl.gz")]) == 0
    output = tmp_path / "out.jsonl.gz"
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_deqnar.cli.main", *command, "--ray", "local", "--output", str(output)],
        env={**os.environ, MARK: str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 240
    while not (actors := actors_of(str(tmp_path))):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(actors[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert "hf-deqnar: an actor ended; another one does shard" in errors
    assert output.read_bytes() == (tmp_path / "alone.jsonl.gz").read_bytes()


class Refusing:
    """An actor that raises, or ends on certain shards."""

    def translate(self, sentences, references):
        if sentences == ["wrong"]:
            raise ValueError("not today")
        if sentences == ["deadly"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return [{"text": sentences[0].upper()}], 0.0


@pytest.mark.slow
def test_errors_of_actors_are_raised_and_a_deadly_shard_is_given_up():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        make = ray.remote(Refusing).remote

        def run(*texts):
            tasks = [Task(number, [text], [[]]) for number, text in enumerate(texts)]
            return sorted((number, rows[0]["text"]) for number, rows, _ in translate_by_actors(ray, make, tasks, 2))

        assert run("a", "b", "c") == [(0, "A"), (1, "B"), (2, "C")]
        with pytest.raises(ValueError, match="not today"):
            run("a", "wrong")
        with pytest.raises(OSError, match="3 actors ended on shard 1: "):
            run("a", "deadly", "c")
    finally:
        ray.shutdown()

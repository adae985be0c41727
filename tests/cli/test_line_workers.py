"""Translation in several processes: order, killed processes, errors, interrupted output."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_deqnar.cli import line_translation
from hf_deqnar.cli.line_workers import map_in_processes
from hf_deqnar.utils.locks import try_lock

from ..conftest import SENTENCES

ENGLISH = [english for english, _ in SENTENCES]


class Squares:
    """Squares numbers; a negative one ends the process, unless the file exists that it creates first."""

    def __init__(self, marker):
        self.marker = marker

    def __call__(self, number):
        if number < 0 and not os.path.exists(self.marker):
            open(self.marker, "x").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 1000:
            raise ValueError("1000 is too large.")
        if number == 2000:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.001 * (number % 7))
        return number * number


def refuse(reason):
    raise ValueError(reason)


@pytest.mark.parametrize("count", [1, 3])
def test_results_are_in_order(count, tmp_path):
    found = map_in_processes(Squares, tmp_path / "marker", range(50), count)
    assert list(found) == [number * number for number in range(50)]


def test_no_chunks_give_no_results(tmp_path):
    assert list(map_in_processes(Squares, tmp_path / "marker", [], 2)) == []


def test_few_chunks_are_read_ahead(tmp_path):
    read = []

    def numbers():
        for number in range(200):
            read.append(number)
            yield number

    results = map_in_processes(Squares, tmp_path / "marker", numbers(), 2)
    for number in range(3):
        assert next(results) == number * number
    assert len(read) <= 3 + 8
    results.close()


def test_the_chunk_of_a_killed_process_is_done_once(tmp_path, capfd):
    numbers = [1, 2, -3, 4, 5]
    assert list(map_in_processes(Squares, tmp_path / "marker", numbers, 2)) == [1, 4, 9, 16, 25]
    assert (tmp_path / "marker").exists()
    assert "was killed (SIGKILL)" in capfd.readouterr().err


def test_a_chunk_that_kills_every_process_is_an_error(tmp_path):
    with pytest.raises(OSError, match="on the same lines 3 times"):
        list(map_in_processes(Squares, tmp_path / "marker", [1, 2000, 3], 2))


def test_errors_are_raised_here(tmp_path):
    with pytest.raises(ValueError, match="1000 is too large"):
        list(map_in_processes(Squares, tmp_path / "marker", [1, 1000], 2))
    with pytest.raises(ValueError, match="not today"):
        list(map_in_processes(refuse, "not today", [1], 2))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    lines = [ENGLISH[number % len(ENGLISH)].encode() for number in range(70)]
    lines[40] = b"caf\xe9"
    file = tmp_path_factory.mktemp("corpus") / "corpus.en"
    file.write_bytes(b"\n".join(lines))  # the last line has no line end
    return file


@pytest.mark.slow
def test_processes_print_what_one_process_prints(run, run_process, saved, corpus, tmp_path):
    options = ["--model", saved["ctc"], "--input", corpus, "--batch-size", "1"]
    one = run("translate", *options, "--processes", "1")
    two = run_process("translate", *options, "--processes", "2")
    assert two.stdout == one.stdout
    assert len(two.stdout.splitlines()) == 70
    assert one.returncode == two.returncode == 1
    assert [line for line in two.stderr.splitlines() if "line 41" in line] == one.stderr.strip().splitlines()


@pytest.mark.slow
def test_a_killed_process_loses_no_line(run, saved, corpus, tmp_path):
    options = ["--model", saved["ctc"], "--input", corpus, "--batch-size", "1"]
    expected = run("translate", *options, "--processes", "1").stdout
    command = [sys.executable, "-m", "hf_deqnar.cli.main", "translate", *map(str, options), "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as parent:
        deadline = time.monotonic() + 60
        while not (children := children_of(parent.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(children[0], signal.SIGKILL)
        output, errors = parent.communicate()
    assert output.decode() == expected
    assert "was killed (SIGKILL)" in errors.decode()


def children_of(process: int) -> list[int]:
    """The spawned processes of a process, without multiprocessing's own resource tracker."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]


def test_output_is_a_file(run, saved, corpus, tmp_path):
    options = ["--model", saved["ctc"], "--input", corpus]
    expected = run("translate", *options)
    done = run("translate", *options, "--output", tmp_path / "corpus.de")
    assert (tmp_path / "corpus.de").read_text() == expected.stdout
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.de"]
    assert done.stdout == ""
    assert done.returncode == 1
    assert "corpus.de: 70 lines in " in done.stderr


def test_an_interrupted_output_is_resumed(run, saved, corpus, tmp_path, monkeypatch):
    """The disk is full after some lines: the same command translates only the rest, another one starts again."""
    monkeypatch.setattr(line_translation, "BATCHES_OF_A_CHUNK", 1)
    options = ["--model", saved["ctc"], "--input", corpus, "--batch-size", "16"]
    expected = run("translate", *options).stdout
    write_json, records = line_translation.write_json, []

    def fails(path, values):
        if len(records) == 3:
            raise OSError(28, "No space left on device")
        records.append(values["lines"])
        write_json(path, values)

    monkeypatch.setattr(line_translation, "write_json", fails)
    output = tmp_path / "corpus.de"
    stopped = run("translate", *options, "--output", output)
    assert stopped.returncode == 2
    assert "corpus.de could not be written (No space left on device)" in stopped.stderr
    assert records == [16, 32, 48]
    assert not output.exists()
    monkeypatch.setattr(line_translation, "write_json", write_json)

    resumed = run("translate", *options, "--output", output)
    assert "48 lines are done" in resumed.stderr
    assert "22 lines in" in resumed.stderr
    assert output.read_text() == expected
    assert resumed.returncode == 1  # line 41 failed before the interruption


def interrupted(run, options, output, monkeypatch) -> None:
    """Stop a run after its first record."""
    write_json = line_translation.write_json

    def fails(path, values):
        write_json(path, values)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(line_translation, "write_json", fails)
        assert run("translate", *options, "--output", output).returncode == 2


def test_damaged_lines_of_an_interrupted_output_are_translated_again(run, saved, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(line_translation, "BATCHES_OF_A_CHUNK", 1)
    options = ["--model", saved["ctc"], "--input", corpus, "--batch-size", "16"]
    output = tmp_path / "corpus.de"
    interrupted(run, options, output, monkeypatch)
    unfinished = tmp_path / "corpus.de.unfinished"
    content = bytearray(unfinished.read_bytes())
    content[5] ^= 1
    unfinished.write_bytes(content)
    resumed = run("translate", *options, "--output", output)
    assert f"{unfinished} is damaged; its lines are translated again." in resumed.stderr
    assert "are done" not in resumed.stderr
    assert output.read_text() == run("translate", *options).stdout
    assert [file.name for file in tmp_path.iterdir()] == ["corpus.de"]


def test_two_runs_do_not_write_the_same_output(run, saved, corpus, tmp_path):
    output = tmp_path / "corpus.de"
    with try_lock(tmp_path / "corpus.de.unfinished.lock"):
        refused = run("translate", "--model", saved["ctc"], "--input", corpus, "--output", output)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith(f"Another run is writing {output}; wait for it, or choose another --output.")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [MemoryError("of the test"), RuntimeError("CUDA out of memory. Tried to allocate")])
def test_batches_that_exhaust_the_memory_are_halved(run, saved, corpus, tmp_path, monkeypatch, error):
    options = ["--model", saved["ctc"], "--input", corpus, "--batch-size", "16"]
    expected = run("translate", *options)
    call, sizes = line_translation.DeqNarTranslationPipeline.__call__, []

    def limited(self, texts, **settings):
        if isinstance(texts, list):
            sizes.append(len(texts))
            if len(texts) > 10 or ENGLISH[2] in texts:
                raise error
        return call(self, texts, **settings)

    monkeypatch.setattr(line_translation.DeqNarTranslationPipeline, "__call__", limited)
    done = run("translate", *options)
    failed = [number for number, line in enumerate(corpus.read_bytes().split(b"\n"), 1) if line == ENGLISH[2].encode()]
    lines = expected.stdout.split("\n")
    assert done.stdout.split("\n") == ["" if n in failed else line for n, line in enumerate(lines, 1)]
    assert f"line {failed[0]}: not enough memory ({error})" in done.stderr
    assert max(sizes) == 69
    assert done.returncode == 1


def test_exhausted_memory_is_one_line_and_other_errors_of_torch_are_not(run, saved, monkeypatch):
    def fails(error):
        def call(self, *rest, **settings):
            raise error

        monkeypatch.setattr(line_translation.DeqNarTranslationPipeline, "__call__", call)
        return run("translate", "--model", saved["ctc"], "Hello.")

    done = fails(RuntimeError("[enforce fail at alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory"))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Memory is exhausted ([enforce fail" in done.stderr
    assert "use smaller batches (--batch_size" in done.stderr
    with pytest.raises(RuntimeError, match="shapes"):
        fails(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_another_command_does_not_resume(run, saved, corpus, tmp_path, monkeypatch):
    def fails(path, values):
        write_json(path, values)
        if values["lines"]:
            raise OSError(28, "No space left on device")

    write_json = line_translation.write_json
    monkeypatch.setattr(line_translation, "write_json", fails)
    options = ["--model", saved["ctc"], "--input", corpus]
    run("translate", *options, "--output", tmp_path / "corpus.de")
    monkeypatch.setattr(line_translation, "write_json", write_json)
    done = run("translate", *options, "--jsonl", "--output", tmp_path / "corpus.de")
    assert "are done" not in done.stderr
    assert (tmp_path / "corpus.de").read_text() == run("translate", *options, "--jsonl").stdout


@pytest.mark.parametrize("option", ["--output", "--processes"])
def test_options_of_files_are_refused_for_arguments(run, option):
    done = run("translate", option, "2", "Hello.")
    assert done.returncode == 2
    assert f"{option} is for --input" in done.stderr

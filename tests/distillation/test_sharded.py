"""Shards that are divided among processes beforehand, with output at any address."""

import dataclasses
import itertools
import json

import fsspec
import pytest

from hf_deqnar.data.parallel_text import Pair, read_parallel
from hf_deqnar.distillation import sharded
from hf_deqnar.distillation.distill import distill
from hf_deqnar.distillation.selection import TargetOptions
from hf_deqnar.distillation.sharded import Output, Unfinished, distill_shards

from .conftest import COLUMNS, OPTIONS, corpus

NUMBERS = itertools.count()


@pytest.fixture
def memory():
    """A new address in memory, and the file system."""
    return f"memory://test-{next(NUMBERS)}", fsspec.filesystem("memory")


@pytest.fixture
def expected(teacher, tmp_path):
    """What `distill` writes on one machine."""
    output = tmp_path / "alone.jsonl.gz"
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    return output.read_bytes()


def work(teacher, output, **settings):
    return distill_shards(corpus(), teacher, output, options=OPTIONS, **COLUMNS, **settings)


def translated(monkeypatch) -> list[int]:
    """A list to which the number of sentences of every translated shard is added."""
    found, original = [], sharded.translate_texts

    def recorded(teacher, translate, sentences, *rest):
        found.append(len(sentences))
        return original(teacher, translate, sentences, *rest)

    monkeypatch.setattr(sharded, "translate_texts", recorded)
    return found


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_any_number_of_processes_writes_the_bytes_of_one_machine(teacher, expected, memory, processes):
    address, system = memory
    output = Output(f"{address}/out.jsonl.gz")
    for process in range(processes - 1):
        with pytest.raises(Unfinished, match=r"of 6 shards of .*out.jsonl.gz are not finished"):
            work(teacher, output, process=process, processes=processes)
        assert not system.exists(output.address)
    figures = work(teacher, output, process=processes - 1, processes=processes)
    assert system.cat_file(output.address) == expected
    assert figures["sentences"] == 42
    assert json.loads(system.cat_file(f"{output.address}.statistics.json"))["mean_chrf"] == figures["mean_chrf"]


def test_shards_of_a_dead_process_are_translated_by_the_next_in_any_layout(teacher, expected, memory, monkeypatch):
    address, system = memory
    output = Output(f"{address}/out.jsonl.gz")
    with pytest.raises(Unfinished, match=r"3 of 6 shards .* \(1, 3, 5\)"):
        work(teacher, output, process=0, processes=2)
    damaged = f"{output.address}.shards/00002.jsonl"
    system.pipe_file(damaged, system.cat_file(damaged)[:-9] + b"otherwise")
    with pytest.raises(Unfinished, match=r"4 of 6 shards .* \(1, 2, 3, 5\)"):
        work(teacher, output, join_only=True)
    found = translated(monkeypatch)
    work(teacher, output, process=0, processes=1)
    assert len(found) == 4
    assert system.cat_file(output.address) == expected
    del found[:]
    work(teacher, output, process=0, processes=3)  # finished
    assert not found


def test_a_damaged_result_is_written_again_from_the_shards(teacher, expected, memory, monkeypatch):
    address, system = memory
    output = Output(f"{address}/out.jsonl.gz")
    work(teacher, output)
    found = translated(monkeypatch)
    for content in (expected[:-5], b"", bytes([expected[0] ^ 1]) + expected[1:]):
        system.pipe_file(output.address, content)
        work(teacher, output, join_only=True)
        assert system.cat_file(output.address) == expected
    assert not found


@pytest.mark.parametrize("part_format", ["jsonl.gz", "jsonl", "parquet"])
def test_parts_contain_the_corpus_in_order(teacher, expected, memory, tmp_path, part_format):
    address, system = memory
    work(teacher, Output(f"{address}/out/", part_format, part_sentences=7))
    output = Output(f"{address}/out/", part_format, part_sentences=15)
    work(teacher, output)
    names = [path.rpartition("/")[2] for path in system.ls(f"{address}/out", detail=False)]
    assert sorted(names) == [f"part-0000{number}-of-00003.{part_format}" for number in range(3)]
    (tmp_path / "expected.jsonl.gz").write_bytes(expected)
    assert read_parallel(f"{address}/out/*.{part_format}", "en", "de") == read_parallel(
        tmp_path / "expected.jsonl.gz", "en", "de"
    )
    before = [system.cat_file(f"{address}/out/{name}") for name in sorted(names)]
    system.rm(f"{address}/out", recursive=True)
    work(teacher, output)
    assert [system.cat_file(f"{address}/out/{name}") for name in sorted(names)] == before


def test_local_folders_and_addresses_of_files_are_the_same(teacher, expected, tmp_path):
    for address in (f"{tmp_path}/new/a.jsonl.gz", f"file://{tmp_path}/new/b.jsonl.gz"):
        work(teacher, Output(address))
    assert (tmp_path / "new" / "a.jsonl.gz").read_bytes() == (tmp_path / "new" / "b.jsonl.gz").read_bytes() == expected
    assert not list(tmp_path.rglob("*.unfinished"))
    found = distill(corpus(), teacher, tmp_path / "new" / "a.jsonl.gz", options=OPTIONS, **COLUMNS)
    assert found["sentences"] == 42
    assert (tmp_path / "new" / "a.jsonl.gz").read_bytes() == expected


def test_other_settings_are_refused_and_other_targets_need_no_translation(teacher, memory, monkeypatch):
    address, system = memory
    output = Output(f"{address}/out.jsonl")
    work(teacher, output)
    before = system.cat_file(output.address)
    for difference in ({"options": dataclasses.replace(OPTIONS, num_beams=3)}, {"pairs": corpus()[::-1]}):
        settings = {"pairs": corpus(), "options": OPTIONS, **difference}
        with pytest.raises(ValueError, match="was started with .*, but now it is"):
            distill_shards(settings.pop("pairs"), teacher, output, **settings, **COLUMNS)
    assert system.cat_file(output.address) == before
    found = translated(monkeypatch)
    figures = work(teacher, output, targets=TargetOptions(reference_share=0.5))
    assert figures["mixed_in_references"] > 5
    assert system.cat_file(output.address) != before
    assert not found


def test_a_run_with_other_settings_that_starts_in_the_same_place_is_noticed(teacher, memory, monkeypatch):
    address, system = memory
    output, write = Output(f"{address}/out.jsonl"), sharded.shard_lines

    def replaced(*rest, **figures):
        manifest = f"{output.address}.shards/manifest.json"
        system.pipe_file(manifest, json.dumps({**json.loads(system.cat_file(manifest)), "num_beams": 9}).encode())
        return write(*rest, **figures)

    monkeypatch.setattr(sharded, "shard_lines", replaced)
    with pytest.raises(ValueError, match="Another run with other settings has started in memory://"):
        work(teacher, output)


def test_invalid_arguments_are_one_line(teacher, memory):
    for make, message in [
        (lambda: Output("s3://bucket/out.txt"), "should end in .jsonl.gz, .jsonl, .parquet, or in / for a folder"),
        (lambda: Output("memory://out/", "csv"), "part_format 'csv' is unknown"),
        (lambda: Output("memory://out/", part_sentences=0), "part_sentences must be at least 1"),
        (lambda: work(teacher, Output(f"{memory[0]}/o.jsonl"), process=2, processes=2), "shard 2/2 does not exist"),
        (lambda: read_parallel("nowhere://bucket/x.jsonl", "en", "de"), "nowhere://bucket/x.jsonl cannot be used"),
    ]:
        with pytest.raises(ValueError, match=message):
            make()
    for missing in (f"{memory[0]}/none.jsonl", f"{memory[0]}/*.jsonl"):
        with pytest.raises(FileNotFoundError, match="There is no"):
            read_parallel(missing, "en", "de")


def test_a_corpus_at_an_address_is_read_in_every_format(memory):
    address, system = memory
    system.pipe_file(f"{address}/a.jsonl", b'{"en": "A.", "de": "B."}\n')
    system.pipe_file(f"{address}/b.tsv", b"de\ten\nD.\tC.\n")
    assert read_parallel(f"{address}/a.jsonl", "en", "de") == [Pair("A.", ["B."])]
    assert read_parallel(f"{address}/*", "en", "de") == [Pair("A.", ["B."]), Pair("C.", ["D."])]

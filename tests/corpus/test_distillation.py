"""What distillation writes; that a kill or company does not change it is in tests/laws/test_distillation_law.py."""

import dataclasses
import errno
import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from hf_deqnar.corpus import distillation
from hf_deqnar.corpus.distillation import cut_into_shards, distill, distill_candidates
from hf_deqnar.corpus.reading import Pair, read_parallel
from hf_deqnar.corpus.teachers import make_translate, translate_texts

from .conftest import COLUMNS, OPTIONS, corpus, make_teacher


def lines_of(path) -> list[dict]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_the_corpus_comes_back_with_the_teachers_translations(teacher, tmp_path, name):
    pairs = corpus()
    figures = distill(pairs, teacher, tmp_path / name, options=OPTIONS, **COLUMNS)
    written = lines_of(tmp_path / name)
    assert [list(line) for line in written] == [["en", "de"]] * len(pairs)
    assert [line["en"] for line in written] == [pair.source for pair in pairs]
    expected = {}
    for shard in cut_into_shards([pair.source for pair in pairs], OPTIONS.shard_sentences):
        sentences = [pairs[number].source for number in shard]
        rows = translate_texts(teacher, make_translate(teacher, OPTIONS, tmp_path), sentences, OPTIONS)
        expected |= dict(zip(shard, rows, strict=True))
    assert [line["de"] for line in written] == [expected[number]["text"] for number in range(len(pairs))]
    assert written[-2] == {"en": " ", "de": ""}
    assert read_parallel(tmp_path / name, "en", "de")[3].source == pairs[3].source
    assert figures["sentences"] == 42
    assert figures["cut_sources"] == sum(row["cut"] for row in expected.values())
    assert 1 <= figures["cut_sources"] < 42
    assert figures["empty_sources"] == 1
    assert figures["empty_translations"] == sum(not row["text"] for row in expected.values()) - 1
    assert figures["mean_source_tokens"] == sum(row["source_tokens"] for row in expected.values()) / 42
    assert list(figures["length_ratio"].values()) == sorted(figures["length_ratio"].values())
    assert figures["options"] == dataclasses.asdict(OPTIONS)
    assert figures["teacher"] == "runs/teacher"
    assert json.loads((tmp_path / f"{name}.statistics.json").read_text()) == figures


def test_what_lies_nearest_to_the_corpus_is_written_and_another_corpus_is_another_work(teacher, tmp_path):
    options = dataclasses.replace(OPTIONS, num_beams=3, nearest=True)
    translate = make_translate(teacher, options, tmp_path)
    last = translate(teacher.tokenizer([corpus()[0].source])["input_ids"])[-1]
    wanted = teacher.tokenizer.decode(last, skip_special_tokens=True).strip()
    pairs = [Pair(corpus()[0].source, [wanted])]
    output = tmp_path / "out.jsonl"
    distill(pairs, teacher, output, options=options, **COLUMNS)
    assert lines_of(output) == [{"en": pairs[0].source, "de": wanted}]
    distill(pairs, teacher, tmp_path / "first.jsonl", options=dataclasses.replace(options, nearest=False), **COLUMNS)
    assert lines_of(tmp_path / "first.jsonl")[0]["de"] != wanted
    with pytest.raises(ValueError, match="begun with references="):
        distill([Pair(pairs[0].source, ["Another."])], teacher, output, options=options, **COLUMNS)


def test_shards_are_chunks_from_the_longest_to_the_shortest():
    assert cut_into_shards(["aa", "b", "cccc", "dd", ""], 2) == [[2, 0], [3, 1], [4]]


def test_a_finished_output_is_left_as_it_is(teacher, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    first = distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    before = output.stat().st_mtime_ns
    monkeypatch.setattr(distillation, "translate_texts", None)
    assert distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS) == first
    assert output.stat().st_mtime_ns == before
    statistics = tmp_path / "out.jsonl.statistics.json"
    for content in ("", "{", "{}"):
        statistics.write_text(content)
        with pytest.raises(ValueError, match="out.jsonl.statistics.json is damaged .*; remove it and start again"):
            distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
        assert statistics.read_text() == content
    statistics.unlink()
    assert distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS) == first


def test_another_corpus_teacher_or_option_is_refused_and_nothing_is_touched(teacher, tokenizer, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    stop_after(3, monkeypatch)
    with pytest.raises(Stopped):
        distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(before) == 4
    changed = make_teacher(tokenizer)
    with torch.no_grad():
        changed.model.final_logits_bias[0, 5] += 0.1
    same = {"pairs": corpus(), "teacher": teacher, "options": OPTIONS}
    for difference, message in [
        ({"pairs": [Pair("Other.", ["x"]), *corpus()[1:]]}, "begun with corpus=.*, but now it is"),
        ({"pairs": corpus()[::-1]}, "begun with corpus="),
        ({"teacher": changed}, "begun with teacher="),
        ({"options": dataclasses.replace(OPTIONS, num_beams=3)}, "begun with num_beams=2, but now it is 3"),
        ({"options": dataclasses.replace(OPTIONS, source_prefix="to German: ")}, "begun with source_prefix="),
        ({"options": dataclasses.replace(OPTIONS, forced_bos_token="<s>")}, "begun with forced_bos_token=None"),
        ({"options": dataclasses.replace(OPTIONS, backend="ctranslate2")}, "begun with backend=transformers"),
    ]:
        arguments = {**same, **difference}
        with pytest.raises(ValueError, match=message):
            distill(arguments.pop("pairs"), arguments.pop("teacher"), output, **arguments, **COLUMNS)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_start_that_failed_does_not_hold_the_output_to_its_settings(teacher, tokenizer, tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    fast = dataclasses.replace(OPTIONS, backend="ctranslate2")
    wrong, unknown = make_teacher(tokenizer, "wrong", 1.0), dataclasses.replace(fast, compute_type="int7")
    with pytest.raises(ValueError, match="cannot use compute_type=int7"):
        distill(corpus(), wrong, tmp_path / "out.jsonl", options=unknown, **COLUMNS)
    for name in ("out.jsonl", "afresh.jsonl"):
        distill(corpus(), teacher, tmp_path / name, options=fast, **COLUMNS)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "afresh.jsonl").read_bytes()


def test_only_missing_and_damaged_shards_are_made_again(teacher, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl.gz"
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    whole = output.read_bytes()
    output.unlink()
    folder = tmp_path / "out.jsonl.gz.shards"
    damaged = folder / "00002.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    (folder / "00002.jsonl.abc.unfinished").write_bytes(b"half")
    (folder / "00004.jsonl").unlink()
    made = watch_shards(monkeypatch)
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert made == [2, 4]
    assert output.read_bytes() == whole
    assert not list(folder.glob("*.unfinished"))
    assert not list(folder.glob("*.lock"))


def test_a_full_disk_is_one_line_and_finished_shards_stay(teacher, tmp_path, monkeypatch):
    output, synced = tmp_path / "out.jsonl", []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="00003.jsonl could not be written .No space left on device.; all that") as caught:
        distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "out.jsonl.shards").iterdir())
    assert left == ["00000.jsonl", "00001.jsonl", "00002.jsonl", "manifest.json"]
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert len(lines_of(output)) == 42


def test_processes_begin_at_different_places(teacher, tmp_path, monkeypatch):
    for process, order in ((0, [0, 2, 4, 1, 3, 5]), (1, [1, 3, 5, 0, 2, 4])):
        output = tmp_path / f"{process}.jsonl"
        with monkeypatch.context() as patch:
            made = watch_shards(patch)
            distill(corpus(), teacher, output, options=OPTIONS, process=process, processes=2, **COLUMNS)
        assert made == order
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_several_teachers_stand_side_by_side_with_the_raw_target_last(teacher, tokenizer, tmp_path):
    output = tmp_path / "candidates.jsonl.gz"
    teachers = [teacher, make_teacher(tokenizer, "big", 1.0), make_teacher(tokenizer, "other/teacher", 2.0)]
    figures = distill_candidates(corpus(), iter(teachers), output, options=OPTIONS, **COLUMNS)
    assert list(figures) == ["runs/teacher", "big", "other/teacher"]
    assert json.loads(Path(f"{output}.statistics.json").read_text(encoding="utf-8")) == figures
    files = [tmp_path / f"candidates.{name}.jsonl.gz" for name in ("teacher", "big", "teacher-2")]
    alone = [lines_of(file) for file in files]
    for number, line in enumerate(lines_of(output)):
        raw = corpus()[number].references[0]
        expected = {"en": corpus()[number].source, "de": raw}
        assert line == {**expected, "candidates": [*(written[number]["de"] for written in alone), raw]}
    assert len({line["candidates"][0] == line["candidates"][1] for line in lines_of(output)}) == 2
    before = output.read_bytes()
    output.unlink()
    distill_candidates(corpus(), teachers, output, options=OPTIONS, **COLUMNS)
    assert output.read_bytes() == before
    with pytest.raises(ValueError, match="begun with candidates="):
        distill_candidates(corpus(), teachers[:2], output, options=OPTIONS, **COLUMNS)


def test_bad_requests_are_refused_before_any_work(teacher, tmp_path):
    for arguments, message in [
        ({"output": tmp_path / "out.txt"}, "should end in .jsonl.gz or .jsonl"),
        ({"process": 2, "processes": 2}, "process 2 is not one of 2"),
        ({"pairs": [Pair("A.", ["x"]), Pair("\ud800", ["x"])]}, "Sentence 2 of the corpus: .*not valid Unicode"),
    ]:
        arguments = {"pairs": corpus(), "output": tmp_path / "out.jsonl", **arguments}
        with pytest.raises(ValueError, match=message):
            distill(arguments.pop("pairs"), teacher, arguments.pop("output"), options=OPTIONS, **arguments, **COLUMNS)
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.jsonl").write_text("mine")
    with pytest.raises(FileExistsError, match="nothing says how it was made"):
        distill_candidates(corpus(), [teacher], tmp_path / "mine.jsonl", options=OPTIONS, **COLUMNS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


class Stopped(BaseException):
    """What no handler of errors takes for an error, as a kill."""


def stop_after(count: int, monkeypatch, name: str = "make_shard") -> None:
    """Let a function of the module be called so often, and then no more."""
    original, calls = getattr(distillation, name), []

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) > count:
            raise Stopped
        return original(*arguments, **options)

    monkeypatch.setattr(distillation, name, counted)


def watch_shards(monkeypatch) -> list[int]:
    """A list to which the numbers of shards are added as they are made."""
    made, original = [], distillation.make_shard
    watched = lambda work, number, translate: made.append(number) or original(work, number, translate)  # noqa: E731
    monkeypatch.setattr(distillation, "make_shard", watched)
    return made

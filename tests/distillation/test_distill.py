"""Output of distillation; interrupted and parallel runs are tested in tests/invariants/test_distillation.py."""

import dataclasses
import errno
import gzip
import json
import os
from pathlib import Path

import pytest
import torch

from hf_deqnar.data.parallel_text import Pair, read_parallel
from hf_deqnar.distillation import distill as distillation
from hf_deqnar.distillation.distill import distill, distill_candidates, split_into_shards
from hf_deqnar.distillation.selection import TargetOptions, chrf_of
from hf_deqnar.distillation.teachers import make_translate, nearest_text, translate_texts

from .conftest import COLUMNS, OPTIONS, corpus, make_teacher


def lines_of(path) -> list[dict]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_output_is_the_corpus_with_the_teachers_translations(teacher, tmp_path, name):
    pairs = corpus()
    figures = distill(pairs, teacher, tmp_path / name, options=OPTIONS, **COLUMNS)
    written = lines_of(tmp_path / name)
    assert [list(line) for line in written] == [["en", "de"]] * len(pairs)
    assert [line["en"] for line in written] == [pair.source for pair in pairs]
    expected = {}
    for shard in split_into_shards([pair.source for pair in pairs], OPTIONS.shard_sentences):
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


def test_nearest_writes_the_beam_closest_to_the_corpus_and_resumes_only_with_that_corpus(teacher, tmp_path):
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
    with pytest.raises(ValueError, match="started with references="):
        distill([Pair(pairs[0].source, ["Another."])], teacher, output, options=options, **COLUMNS)


def test_translations_far_from_the_references_are_counted_and_replaced_without_translating_again(
    teacher, tmp_path, monkeypatch
):
    pairs, output = corpus(), tmp_path / "out.jsonl"
    plain = distill(pairs, teacher, output, options=OPTIONS, **COLUMNS)
    texts = [line["de"] for line in lines_of(output)]
    scores = [chrf_of(text, pair.references) for pair, text in zip(pairs, texts, strict=True) if pair.source.strip()]
    assert plain["share_below_30_chrf"] == sum(score < 30 for score in scores) / len(scores) > 0.5
    assert plain["targets_below_30_chrf"] == plain["share_below_30_chrf"]
    assert plain["replaced_by_reference"] == plain["mixed_in_references"] == 0
    monkeypatch.setattr(distillation, "translate_texts", None)
    limit = sorted(scores)[len(scores) // 2]
    replaced = distill(pairs, teacher, output, options=OPTIONS, targets=TargetOptions(min_chrf=limit), **COLUMNS)
    expected = [
        pair.references[0] if pair.source.strip() and chrf_of(text, pair.references) < limit else text
        for pair, text in zip(pairs, texts, strict=True)
    ]
    assert [line["de"] for line in lines_of(output)] == expected != texts
    assert replaced["replaced_by_reference"] == sum(score < limit for score in scores)
    assert replaced["share_below_30_chrf"] == plain["share_below_30_chrf"] > replaced["targets_below_30_chrf"]
    mixed = distill(pairs, teacher, output, options=OPTIONS, targets=TargetOptions(reference_share=0.5), **COLUMNS)
    same = sum(line["de"] == pair.references[0] for line, pair in zip(lines_of(output), pairs, strict=True))
    assert 10 < same == mixed["mixed_in_references"] < 32
    assert distill(pairs, teacher, output, options=OPTIONS, **COLUMNS) == plain
    assert [line["de"] for line in lines_of(output)] == texts
    others = [Pair(pair.source, [f"{pair.references[0]}!"]) for pair in pairs]
    distill(others, teacher, output, options=OPTIONS, targets=TargetOptions(reference_share=1.0), **COLUMNS)
    assert [line["de"] for line in lines_of(output)][:3] == ["Satz 0!", "Satz 1!", "Satz 2!"]


def test_an_output_of_an_earlier_version_is_not_changed(teacher, tmp_path, monkeypatch):
    """Its statistics and its manifest do not mention the selection of targets."""
    output = tmp_path / "out.jsonl"
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    statistics = tmp_path / "out.jsonl.statistics.json"
    old = json.loads(statistics.read_text())
    del old["targets"]
    statistics.write_text(json.dumps(old))
    assert "nearest_by" not in json.loads((tmp_path / "out.jsonl.shards" / "manifest.json").read_text())
    monkeypatch.setattr(distillation, "translate_texts", None)
    monkeypatch.setattr(distillation, "select_targets", None)
    assert distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS) == old


def test_nearest_can_compare_by_chrf():
    """Another form of a word has most of its characters, but is another word for BLEU."""
    texts, reference = ["die Katze", "Bahnhofsuhren"], ["die Bahnhofsuhr"]
    assert nearest_text(texts, reference, "bleu") == 0
    assert nearest_text(texts, reference, "chrf") == 1
    with pytest.raises(ValueError, match="nearest_by=chrf has no effect without nearest"):
        dataclasses.replace(OPTIONS, nearest_by="chrf")
    with pytest.raises(ValueError, match="nearest_by 'ter' is unknown; choose bleu or chrf"):
        dataclasses.replace(OPTIONS, nearest=True, nearest_by="ter")


def test_shards_are_ordered_from_the_longest_to_the_shortest_sentences():
    assert split_into_shards(["aa", "b", "cccc", "dd", ""], 2) == [[2, 0], [3, 1], [4]]


def test_a_finished_output_is_not_changed(teacher, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl"
    first = distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    before = output.stat().st_mtime_ns
    monkeypatch.setattr(distillation, "translate_texts", None)
    assert distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS) == first
    assert output.stat().st_mtime_ns == before
    statistics = tmp_path / "out.jsonl.statistics.json"
    for content in ("", "{", "{}"):
        statistics.write_text(content)
        with pytest.raises(
            ValueError, match="out.jsonl.statistics.json is damaged .*; remove it and run the same command again"
        ):
            distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
        assert statistics.read_text() == content
    statistics.unlink()
    assert distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS) == first


@pytest.mark.parametrize("name", ["out.jsonl", "out.jsonl.gz"])
def test_a_damaged_output_is_named_and_not_taken_for_finished(teacher, tmp_path, name, monkeypatch):
    output = tmp_path / name
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    intact = output.read_bytes()
    flipped = bytearray(intact)
    flipped[len(intact) // 2] ^= 1
    monkeypatch.setattr(distillation, "translate_texts", None)
    for content in (flipped, intact[:-30], intact[: len(intact) // 2], b""):
        output.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is damaged or was changed .* rename or remove it"):
            distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
        assert output.read_bytes() == content
    output.unlink()
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert output.read_bytes() == intact


def test_another_corpus_teacher_or_option_is_refused_and_no_file_changes(teacher, tokenizer, tmp_path, monkeypatch):
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
        ({"pairs": [Pair("Other.", ["x"]), *corpus()[1:]]}, "started with corpus=.*, but now it is"),
        ({"pairs": corpus()[::-1]}, "started with corpus="),
        ({"teacher": changed}, "started with teacher="),
        ({"options": dataclasses.replace(OPTIONS, num_beams=3)}, "started with num_beams=2, but now it is 3"),
        ({"options": dataclasses.replace(OPTIONS, source_prefix="to German: ")}, "started with source_prefix="),
        ({"options": dataclasses.replace(OPTIONS, forced_bos_token="<s>")}, "started with forced_bos_token=None"),
        ({"options": dataclasses.replace(OPTIONS, backend="ctranslate2")}, "started with backend=transformers"),
    ]:
        arguments = {**same, **difference}
        with pytest.raises(ValueError, match=message):
            distill(arguments.pop("pairs"), arguments.pop("teacher"), output, **arguments, **COLUMNS)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_failed_start_may_be_repeated_with_other_settings(teacher, tokenizer, tmp_path):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    fast = dataclasses.replace(OPTIONS, backend="ctranslate2")
    wrong, unknown = make_teacher(tokenizer, "wrong", 1.0), dataclasses.replace(fast, compute_type="int7")
    with pytest.raises(ValueError, match="cannot use compute_type=int7"):
        distill(corpus(), wrong, tmp_path / "out.jsonl", options=unknown, **COLUMNS)
    for name in ("out.jsonl", "new.jsonl"):
        distill(corpus(), teacher, tmp_path / name, options=fast, **COLUMNS)
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "new.jsonl").read_bytes()


def test_only_missing_and_damaged_shards_are_translated_again(teacher, tmp_path, monkeypatch):
    output = tmp_path / "out.jsonl.gz"
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    complete = output.read_bytes()
    output.unlink()
    folder = tmp_path / "out.jsonl.gz.shards"
    damaged = folder / "00002.jsonl"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    (folder / "00002.jsonl.abc.unfinished").write_bytes(b"half")
    (folder / "00004.jsonl").unlink()
    translated = record_shards(monkeypatch)
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert translated == [2, 4]
    assert output.read_bytes() == complete
    assert not list(folder.glob("*.unfinished"))
    assert not list(folder.glob("*.lock"))


def test_a_full_disk_is_a_one_line_error_and_finished_shards_remain(teacher, tmp_path, monkeypatch):
    output, synced = tmp_path / "out.jsonl", []

    def full(descriptor):
        synced.append(descriptor)
        if len(synced) > 4:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        OSError, match="00003.jsonl could not be written .No space left on device.; all finished"
    ) as caught:
        distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    left = sorted(path.name for path in (tmp_path / "out.jsonl.shards").iterdir())
    assert left == ["00000.jsonl", "00001.jsonl", "00002.jsonl", "manifest.json"]
    distill(corpus(), teacher, output, options=OPTIONS, **COLUMNS)
    assert len(lines_of(output)) == 42


def test_processes_start_with_different_shards(teacher, tmp_path, monkeypatch):
    for process, order in ((0, [0, 2, 4, 1, 3, 5]), (1, [1, 3, 5, 0, 2, 4])):
        output = tmp_path / f"{process}.jsonl"
        with monkeypatch.context() as patch:
            translated = record_shards(patch)
            distill(corpus(), teacher, output, options=OPTIONS, process=process, processes=2, **COLUMNS)
        assert translated == order
    assert (tmp_path / "0.jsonl").read_bytes() == (tmp_path / "1.jsonl").read_bytes()


def test_candidates_are_the_translations_of_all_teachers_then_the_raw_target(teacher, tokenizer, tmp_path):
    output = tmp_path / "candidates.jsonl.gz"
    teachers = [teacher, make_teacher(tokenizer, "big", 1.0), make_teacher(tokenizer, "other/teacher", 2.0)]
    figures = distill_candidates(corpus(), iter(teachers), output, options=OPTIONS, **COLUMNS)
    assert list(figures) == ["runs/teacher", "big", "other/teacher"]
    assert json.loads(Path(f"{output}.statistics.json").read_text(encoding="utf-8")) == figures
    files = [tmp_path / f"candidates.{name}.jsonl.gz" for name in ("teacher", "big", "teacher-2")]
    single = [lines_of(file) for file in files]
    for number, line in enumerate(lines_of(output)):
        raw = corpus()[number].references[0]
        expected = {"en": corpus()[number].source, "de": raw}
        assert line == {**expected, "candidates": [*(written[number]["de"] for written in single), raw]}
    assert len({line["candidates"][0] == line["candidates"][1] for line in lines_of(output)}) == 2
    before = output.read_bytes()
    output.unlink()
    distill_candidates(corpus(), teachers, output, options=OPTIONS, **COLUMNS)
    assert output.read_bytes() == before
    with pytest.raises(ValueError, match="started with candidates="):
        distill_candidates(corpus(), teachers[:2], output, options=OPTIONS, **COLUMNS)


def test_invalid_arguments_are_refused_before_any_file_is_written(teacher, tmp_path):
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
    with pytest.raises(FileExistsError, match="was not written by this command"):
        distill_candidates(corpus(), [teacher], tmp_path / "mine.jsonl", options=OPTIONS, **COLUMNS)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


class Stopped(BaseException):
    """Raised in place of a kill; handlers of `Exception` do not catch it."""


def stop_after(count: int, monkeypatch, name: str = "translate_shard") -> None:
    """Make a function of the module raise `Stopped` after a number of calls."""
    original, calls = getattr(distillation, name), []

    def counted(*arguments, **options):
        calls.append(1)
        if len(calls) > count:
            raise Stopped
        return original(*arguments, **options)

    monkeypatch.setattr(distillation, name, counted)


def record_shards(monkeypatch) -> list[int]:
    """A list to which the numbers of shards are added as they are translated."""
    translated, original = [], distillation.translate_shard
    recorded = lambda job, number, translate: translated.append(number) or original(job, number, translate)  # noqa: E731
    monkeypatch.setattr(distillation, "translate_shard", recorded)
    return translated

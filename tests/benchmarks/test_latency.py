"""Structure, BLEU and input of `bench latency`. No timings."""

import json

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.benchmarks.latency import joined_texts, nearest, solver_overhead, time_one_by_one, timed_parts
from hf_deqnar.benchmarks.systems import System, model_translate
from hf_deqnar.cli.main import main

from ..conftest import small_model
from .conftest import untrained_deqnar

MODEL_RUNTIMES = ("torch fp32", "ONNX fp32", "ONNX int8")
BEAM = "max_nfe=2,ctc_beam_size=3"
TEACHER_RUNTIMES = ("transformers", "CTranslate2 fp32", "CTranslate2 int8")


def test_all_systems_are_timed_scored_and_compared(models, arguments, exported, tmp_path, capsys):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    file = tmp_path / "figures.json"
    few = ["--sentences", "2", "--repeats", "2", "--budgets", "1", "--ways", BEAM]
    few += ["--lengths", "6", "15", "--sentences-per-length", "1"]
    more = ["--baseline", str(models / "baseline"), "--export", str(exported), "--json", str(file)]
    assert main(["bench", "latency", *arguments, *more, *few]) == 0, capsys.readouterr().err
    printed, figures = capsys.readouterr().out, json.loads(file.read_text())

    results = figures["results"]
    tolerance = {"torch fp32": "tol 0.001", "ONNX fp32": "tol 0.001", "ONNX int8": "tol 0.02"}
    expected = [
        ("model", runtime, stop) for runtime in MODEL_RUNTIMES for stop in (tolerance[runtime], "max_nfe 1", BEAM)
    ]
    searches = ("greedy", "beam 5")
    expected += [("teacher", runtime, search) for runtime in TEACHER_RUNTIMES for search in searches]
    expected += [("baseline", runtime, search) for runtime in TEACHER_RUNTIMES[1:] for search in searches]
    assert [(one["system"], one["runtime"], one["search"]) for one in results.values()] == expected

    for one in results.values():
        assert 0 < one["milliseconds"]["median"] <= one["milliseconds"]["p95"]
        assert [len(repeat) for repeat in one["every_millisecond"]] == [2, 2]
        assert 0 <= one["bleu"] < 100.01
        assert ("nfe" in one) == (one["system"] == "model")
        assert len(one["speed_to"]) == 4
    assert results["teacher, transformers, greedy"]["speed_to"]["transformers greedy"] == 1
    assert results["model, torch fp32, max_nfe 1"]["nfe"] == 1 < results["model, torch fp32, tol 0.001"]["nfe"]

    # The references are outputs of the model at its own tolerance, in torch and in ONNX.
    for runtime in MODEL_RUNTIMES[:2]:
        assert results[f"model, {runtime}, tol 0.001"]["bleu"] == pytest.approx(100)
    assert results["teacher, transformers, greedy"]["bleu"] < 50
    assert figures["settings"]["bleu_sentences"] == 6

    assert list(figures["lengths"]) == ["6", "15"]
    left_out = [name for name in results if ("max_nfe" in name and "int8" not in name) or "CTranslate2 fp32" in name]
    assert set(figures["lengths"]["15"]["growth"]) == set(results) - set(left_out)
    evaluations = figures["lengths"]["15"]["nfe"]
    assert evaluations["model, ONNX int8, max_nfe 1"] == 1 < evaluations["model, torch fp32, tol 0.001"]
    assert {name.split(",")[0] for name in evaluations} == {"model"}
    ratio = figures["lengths"]["15"]["tokens"] / figures["lengths"]["6"]["tokens"]
    assert figures["lengths"]["15"]["token_growth"] == pytest.approx(ratio)
    overhead = figures["solver_overhead"]
    assert 0 < overhead["share_of_decoding"] < overhead["share_of_solving"] < 1

    for text in (
        "p95",
        "BLEU",
        "NFE",
        "speed to CTranslate2 int8 beam 5",
        "growth",
        "Solver overhead of the model in torch",
    ):
        assert text in printed
    assert figures["machine"]["onnxruntime"]
    assert figures["machine"]["ctranslate2"]


def test_runtimes_can_be_left_out(arguments, tmp_path, capsys):
    file = tmp_path / "figures.json"
    few = ["--sentences", "1", "--repeats", "1", "--bleu-sentences", "1", "--budgets", "--lengths"]
    more = ["--without", "onnx", "ctranslate2", "--json", str(file)]
    assert main(["bench", "latency", *arguments, *more, *few]) == 0, capsys.readouterr().err
    figures = json.loads(file.read_text())
    assert list(figures["results"]) == [
        "model, torch fp32, tol 0.001",
        "teacher, transformers, greedy",
        "teacher, transformers, beam 5",
    ]
    assert figures["lengths"] == {}
    assert figures["settings"]["bleu_sentences"] == 1
    assert "onnxruntime" not in figures["machine"]
    assert "growth" not in capsys.readouterr().out


def test_sentences_are_translated_one_by_one():
    batches = {"one": [], "other": []}

    def system(name):
        return System("model", name, "", lambda batch: batches[name].append(batch) or batch)

    sources = [[7, 2], [8, 9, 2], [6, 2], [5, 2]]
    timings = time_one_by_one({name: system(name) for name in batches}, sources, repeats=2)
    single = [[source] for source in sources]
    for name in batches:
        assert batches[name][-8:] == single + single
        assert timings.outputs[name] == single


def words(text: str) -> list[str]:
    return [*text.split(), "</s>"]


def test_single_sentences_are_preferred_to_joined_ones():
    texts = ["a b c", "d", "e f g h", "i j", "k l m n o"]
    sources = list(map(words, texts))
    found = nearest(5, texts, sources, words, count=2)
    assert found == {"sources": [words("a b c"), words("e f g h")], "joined": 0}
    found = nearest(9, texts, sources, words, count=2)
    assert found == {"sources": [words("a b c d e f g h"), words("i j k l m n o")], "joined": 2}
    found = nearest(6, texts, sources, words, count=4)
    assert found["sources"][:2] == [words("e f g h"), words("k l m n o")]
    assert found["joined"] == 2
    assert joined_texts(9, texts, sources)[1:3] == ["d e f g h i j", "e f g h i j"]
    assert joined_texts(2, texts, sources) == []
    assert [len(source) for source in nearest(30, texts, sources, words, count=3)["sources"]] == [16, 16, 16]
    assert [len(source) for source in nearest(1, texts, sources, words, count=3)["sources"]] == [2, 3, 4]


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_transition_is_timed_within_the_solve(refinement, tokenizer):
    model = untrained_deqnar(tokenizer, refinement=refinement)
    source, calls = tokenizer("She is reading.")["input_ids"], []
    model.model.transition.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with timed_parts(model.model) as seconds:
        output = model_translate(model, {})([source])
        timed_calls = len(calls)
    assert 0 < seconds["transition"] < seconds["solving"]
    before = dict(seconds)
    assert model_translate(model, {})([source]) == output
    assert seconds == before  # the model is restored
    assert timed_calls == len(calls) - timed_calls
    assert solver_overhead(model, [source])["transition_seconds"] > 0


def test_stacked_model_has_no_solver_overhead(tokenizer):
    assert solver_overhead(small_model(refinement="stacked"), [[7, 2]]) is None

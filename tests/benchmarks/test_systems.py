"""Systems of the comparison receive the same tokens; models that cannot be compared are refused."""

from importlib.util import find_spec

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.benchmarks import systems
from hf_deqnar.benchmarks.options import RUNTIMES, LatencyOptions
from hf_deqnar.cli.loading import load_model
from hf_deqnar.cli.main import main
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.export import graphs
from hf_deqnar.utils.arguments import parse_arguments

from ..conftest import SENTENCES
from ..teachers import small_teacher
from .conftest import TEACHER_READS, untrained_deqnar


def options_of(*arguments: str) -> LatencyOptions:
    (options,) = parse_arguments([LatencyOptions], list(arguments))
    options.load = load_model
    return options


def test_runtimes_agree(models, arguments, exported, tokenizer):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    chosen = options_of(
        *arguments, "--sentences", "6", "--export", str(exported), "--baseline", str(models / "baseline")
    )
    with systems.compared(chosen) as comparison:
        assert comparison.sources == [tokenizer(english)["input_ids"] for english, _ in SENTENCES]
        special = set(tokenizer.all_special_ids)
        outputs = {}
        for name, system in comparison.systems.items():
            found = systems.translate_in_batches(system.translate, comparison.sources, size=4)
            outputs[name] = [[token for token in row if token not in special] for row in found]
            assert len(found) == len(SENTENCES)
            assert all(isinstance(token, int) for row in found for token in row)
    assert len(outputs) == 3 * 4 + 2 + 4 + 4
    assert outputs["model, torch fp32, tol 0.001"] == outputs["model, ONNX fp32, tol 0.001"]
    for search in ("greedy", "beam 5"):
        teacher = outputs[f"teacher, transformers, {search}"]
        fast = outputs[f"teacher, CTranslate2 fp32, {search}"]
        assert sum(one == other for one, other in zip(teacher, fast, strict=True)) >= 5
        assert outputs[f"baseline, CTranslate2 fp32, {search}"] != teacher


def test_long_sources_are_truncated_for_all_systems_and_counted(arguments, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(
        '{"en": "horse", "de": "Pferd"}\n{"en": " ", "de": ""}\n{"en": "' + "horse " * 60 + '", "de": "x"}\n'
    )
    chosen = options_of(*changed(arguments, "--data", data), "--sentences", "2", "--without", *RUNTIMES)
    with systems.compared(chosen) as comparison:
        assert [len(source) for source in comparison.sources][1:] == [TEACHER_READS]
        assert comparison.cut == 1
        assert comparison.describe(chosen)["cut_sources"] == 1


def test_teacher_uses_the_key_value_cache(models, tokenizer):
    def load(name, device, runtime):
        teacher = small_teacher(vocabulary=len(tokenizer))
        teacher.generation_config.use_cache = False
        return teacher, tokenizer

    teacher = systems.load_teacher("teacher", load, tokenizer, [])
    assert teacher.model.generation_config.use_cache is True


@pytest.fixture(scope="session")
def incompatible(models, tokenizer, tmp_path_factory):
    """Models that cannot be compared with the others."""
    folder = tmp_path_factory.mktemp("incompatible")
    another = train_tokenizer(["Der Hund schläft nie.", "Nobody knows."] * 20, vocab_size=300)
    for name, model, its_tokenizer in (
        ("foreign", small_teacher(vocabulary=len(tokenizer)), another),
        ("other", untrained_deqnar(tokenizer, seed=1), tokenizer),
        ("stacked", untrained_deqnar(tokenizer, refinement="stacked"), tokenizer),
    ):
        model.save_pretrained(folder / name)
        its_tokenizer.save_pretrained(folder / name)
    return folder


def changed(arguments: list[str], flag: str, value: object) -> list[str]:
    place = arguments.index(flag) + 1
    return [*arguments[:place], str(value), *arguments[place + 1 :]]


def one_line(capsys) -> str:
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1
    return error


@pytest.mark.parametrize(
    ("benchmark", "more", "message"),
    [
        ("latency", ["--sentences", "0"], "--sentences must be at least 1, not 0"),
        ("latency", ["--sentences", "7"], "has 6 sentences, which is less than --sentences 7"),
        ("latency", ["--repeats", "0"], "--repeats must be at least 1"),
        ("latency", ["--threads", "0"], "--threads must be at least 1"),
        ("latency", ["--budgets", "4", "0"], "--budgets 0: a solve needs"),
        ("latency", ["--budgets", "4", "4"], "--budgets contains a duplicate"),
        ("latency", ["--ways", "tol=0.1", "tol=0.1"], "--ways contains a duplicate"),
        ("latency", ["--bleu-sentences", "0"], "--bleu_sentences must be at least 1"),
        ("latency", ["--lengths", "15", "5"], "--lengths 15 5 must be increasing"),
        ("latency", ["--sentences-per-length", "0"], "--sentences_per_length must be at least 1"),
        ("latency", ["--without", "onnx", "--export", "somewhere"], "--export has no effect with --without onnx"),
        ("latency", ["--without", "ctranslate2", "--baseline", "b"], "--baseline runs in CTranslate2"),
        ("latency", ["--export", "nowhere", "--sentences", "1"], "is not an ONNX export"),
        ("latency", ["--without", *RUNTIMES, "--sentences", "1"], "--lengths 60 is more than the 24 tokens"),
        (
            "latency",
            ["--without", *RUNTIMES, "--sentences", "1", "--bleu-sentences", "7"],
            "less than --bleu_sentences 7",
        ),
        ("throughput", ["--sentences", "6", "--batches", "4"], "--sentences 6 cannot be divided into batches of 4"),
        ("throughput", ["--batches", "0"], "--batches 0"),
        ("throughput", ["--batches", "8", "8"], "--batches contains a duplicate"),
    ],
)
def test_errors_are_one_readable_line(arguments, capsys, benchmark, more, message):
    assert main(["bench", benchmark, *arguments, *more]) == 2
    assert message in one_line(capsys)


def test_incompatible_models_are_refused(models, arguments, incompatible, exported, capsys):
    few = ["--sentences", "1", "--without", "ctranslate2"]
    without = [*few, "onnx"]
    for given, message in [
        ([*changed(arguments, "--model", models / "teacher"), *without], "is of type marian, not deqnar"),
        ([*changed(arguments, "--teacher", models / "model"), *without], "must be autoregressive"),
        (
            [*changed(arguments, "--teacher", incompatible / "foreign"), *without],
            "both must be trained with one tokenizer",
        ),
        (
            [*changed(arguments, "--model", incompatible / "stacked"), *without, "--budgets", "2"],
            "has no effect on a stacked",
        ),
        (
            [*changed(arguments, "--model", incompatible / "other"), *few, "--export", exported],
            "of its tokens in common",
        ),
        ([*changed(arguments, "--model", "no/such/model"), *without], "neither a model directory nor"),
    ]:
        assert main(["bench", "latency", *map(str, given)]) == 2, given
        assert message in one_line(capsys)


def test_missing_package_is_reported_with_its_extra(arguments, exported, capsys, monkeypatch):
    def without(module, package):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))

    without(systems, "ctranslate2")
    assert main(["bench", "latency", *arguments, "--sentences", "1"]) == 2
    assert "pip install 'hf_deqnar[ctranslate2]', or leave it out with --without ctranslate2" in one_line(capsys)
    without(graphs, "onnxscript")
    assert main(["bench", "throughput", *arguments, "--sentences", "256"]) == 2
    assert "needs the package onnxscript: pip install 'hf_deqnar[onnx]'" in one_line(capsys)

"""What is compared: real models on the same tokens, and clear words if they cannot be."""

from importlib.util import find_spec

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.benchmarks import contenders
from hf_deqnar.benchmarks.options import RUNTIMES, LatencyOptions
from hf_deqnar.cli.loading import load_model
from hf_deqnar.cli.main import main
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.export import graphs
from hf_deqnar.utils.arguments import parse_arguments

from ..conftest import SENTENCES
from ..teachers import small_teacher
from .conftest import TEACHER_READS, our_model


def options_of(*arguments: str) -> LatencyOptions:
    (options,) = parse_arguments([LatencyOptions], list(arguments))
    options.load = load_model
    return options


def test_runtimes_of_one_model_say_the_same(models, arguments, exported, tokenizer):
    pytest.importorskip("ctranslate2", reason="ctranslate2 is an extra")
    chosen = options_of(*arguments, "--sentences", "6", "--export", str(exported), "--rival", str(models / "rival"))
    with contenders.compared(chosen) as comparison:
        assert comparison.sources == [tokenizer(english)["input_ids"] for english, _ in SENTENCES]
        special = set(tokenizer.all_special_ids)
        said = {}
        for name, contender in comparison.contenders.items():
            found = contenders.translate_in_batches(contender.translate, comparison.sources, size=4)
            said[name] = [[token for token in row if token not in special] for row in found]
            assert len(found) == len(SENTENCES)
            assert all(isinstance(token, int) for row in found for token in row)
    assert len(said) == 3 * 4 + 2 + 4 + 4
    assert said["ours, torch fp32, tol 0.001"] == said["ours, ONNX fp32, tol 0.001"]
    for search in ("greedy", "beam 5"):
        teacher = said[f"teacher, transformers, {search}"]
        fast = said[f"teacher, CTranslate2 fp32, {search}"]
        assert sum(one == other for one, other in zip(teacher, fast, strict=True)) >= 5
        assert said[f"rival, CTranslate2 fp32, {search}"] != teacher


def test_long_sources_are_cut_for_all_alike_and_counted(arguments, tmp_path):
    data = tmp_path / "long.jsonl"
    data.write_text(
        '{"en": "horse", "de": "Pferd"}\n{"en": " ", "de": ""}\n{"en": "' + "horse " * 60 + '", "de": "x"}\n'
    )
    chosen = options_of(*changed(arguments, "--data", data), "--sentences", "2", "--without", *RUNTIMES)
    with contenders.compared(chosen) as comparison:
        assert [len(source) for source in comparison.sources][1:] == [TEACHER_READS]
        assert comparison.cut == 1
        assert comparison.describe(chosen)["cut_sources"] == 1


def test_a_teacher_always_keeps_keys_and_values(models, tokenizer):
    def load(name, device, runtime):
        teacher = small_teacher(vocabulary=len(tokenizer))
        teacher.generation_config.use_cache = False
        return teacher, tokenizer

    teacher = contenders.load_teacher("teacher", load, tokenizer, [])
    assert teacher.model.generation_config.use_cache is True


@pytest.fixture(scope="session")
def strangers(models, tokenizer, tmp_path_factory):
    """Models that do not belong to the others."""
    folder = tmp_path_factory.mktemp("strangers")
    another = train_tokenizer(["Der Hund schläft nie.", "Nobody knows."] * 20, vocab_size=300)
    for name, model, its_own in (
        ("foreign", small_teacher(vocabulary=len(tokenizer)), another),
        ("other", our_model(tokenizer, seed=1), tokenizer),
        ("stacked", our_model(tokenizer, refinement="stacked"), tokenizer),
    ):
        model.save_pretrained(folder / name)
        its_own.save_pretrained(folder / name)
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
        ("latency", ["--budgets", "4", "4"], "stands twice in --budgets"),
        ("latency", ["--ways", "tol=0.1", "tol=0.1"], "stands twice in --ways"),
        ("latency", ["--bleu-sentences", "0"], "--bleu_sentences must be at least 1"),
        ("latency", ["--lengths", "15", "5"], "--lengths 15 5 must rise"),
        ("latency", ["--sentences-per-length", "0"], "--sentences_per_length must be at least 1"),
        ("latency", ["--without", "onnx", "--export", "somewhere"], "--export is of no use with --without onnx"),
        ("latency", ["--without", "ctranslate2", "--rival", "r"], "--rival runs in CTranslate2"),
        ("latency", ["--export", "nowhere", "--sentences", "1"], "is not an ONNX export"),
        ("latency", ["--without", *RUNTIMES, "--sentences", "1"], "--lengths 60 is more than the 24 tokens"),
        (
            "latency",
            ["--without", *RUNTIMES, "--sentences", "1", "--bleu-sentences", "7"],
            "less than --bleu_sentences 7",
        ),
        ("throughput", ["--sentences", "6", "--batches", "4"], "--sentences 6 cannot be divided into batches of 4"),
        ("throughput", ["--batches", "0"], "--batches 0"),
        ("throughput", ["--batches", "8", "8"], "stands twice in --batches"),
    ],
)
def test_errors_are_one_readable_line(arguments, capsys, benchmark, more, message):
    assert main(["bench", benchmark, *arguments, *more]) == 2
    assert message in one_line(capsys)


def test_models_that_cannot_be_compared_are_refused(models, arguments, strangers, exported, capsys):
    few = ["--sentences", "1", "--without", "ctranslate2"]
    without = [*few, "onnx"]
    for given, message in [
        ([*changed(arguments, "--model", models / "teacher"), *without], "is of type marian, not deqnar"),
        ([*changed(arguments, "--teacher", models / "ours"), *without], "should be autoregressive"),
        (
            [*changed(arguments, "--teacher", strangers / "foreign"), *without],
            "both must be trained with one tokenizer",
        ),
        (
            [*changed(arguments, "--model", strangers / "stacked"), *without, "--budgets", "2"],
            "has no effect on a stacked",
        ),
        ([*changed(arguments, "--model", strangers / "other"), *few, "--export", exported], "of its tokens in common"),
        ([*changed(arguments, "--model", "no/such/model"), *without], "neither a model directory nor"),
    ]:
        assert main(["bench", "latency", *map(str, given)]) == 2, given
        assert message in one_line(capsys)


def test_what_is_not_installed_is_named_with_its_extra(arguments, exported, capsys, monkeypatch):
    def without(module, package):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else find_spec(name))

    without(contenders, "ctranslate2")
    assert main(["bench", "latency", *arguments, "--sentences", "1"]) == 2
    assert "pip install 'hf_deqnar[ctranslate2]', or leave it out with --without ctranslate2" in one_line(capsys)
    without(graphs, "onnxscript")
    assert main(["bench", "throughput", *arguments, "--sentences", "256"]) == 2
    assert "needs the package onnxscript: pip install 'hf_deqnar[onnx]'" in one_line(capsys)

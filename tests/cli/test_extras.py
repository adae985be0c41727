"""A missing optional package is reported in one line that names the command which installs it."""

import json
import subprocess
import sys

import pytest

from hf_deqnar.cli.main import main

from ..conftest import SENTENCES


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"en": english, "de": german}) + "\n" for english, german in SENTENCES))
    return ["--source", "en", "--target", "de", "--data", str(file)]


def check_message(message: str, verb: str, package: str, extra: str) -> None:
    lines = message.strip().splitlines()
    assert len(lines) == 1, message
    assert lines[0].startswith(f"hf-deqnar {verb}: ")
    assert package in lines[0]
    assert f"pip install 'hf_deqnar[{extra}]'" in lines[0]


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("sacrebleu.metrics", "train", ["evaluate", "{model}", "{data}"]),
        ("matplotlib.figure", "plot", ["report", "{model},objective=ctc", "{data}", "--plot", "plot.png"]),
        ("onnxscript", "onnx", ["export", "--model", "{model}", "--output_dir", "exported"]),
        ("ctranslate2", "ctranslate2", ["bench", "latency", "{data}", "--model", "{model}", "--teacher", "{model}"]),
        ("torchdeq", "test", ["bench", "solver", "--rows", "1", "--repeats", "1"]),
    ],
)
def test_a_missing_extra_is_named(package, extra, arguments, saved, data, tmp_path, monkeypatch, capsys):
    if extra != "train":
        pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")
    if package == "ctranslate2":
        pytest.importorskip("onnxscript", reason="onnxscript is part of the onnx extra, and is looked for first")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # importing it then fails
    filled = [one.replace("{model}", str(saved["ctc"])) for one in arguments]
    if "{data}" in filled:
        position = filled.index("{data}")
        filled[position : position + 1] = data
    assert main(filled) == 2
    check_message(capsys.readouterr().err, arguments[0], package.partition(".")[0], extra)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "extra", "flags"),
    [("accelerate", "train", []), ("datasets", "train", []), ("trackio", "track", ["--report_to", "trackio"])],
)
def test_training_names_its_missing_extra(package, extra, flags, data, tmp_path):
    """In a separate process: transformers remembers which packages are installed."""
    if package != "accelerate":
        pytest.importorskip("accelerate", reason="accelerate is part of the train extra")
    script = f"import sys; sys.modules['{package}'] = None; from hf_deqnar.cli.main import main; sys.exit(main())"
    names = [*data[:4], "--train_data", data[5], "--output_dir", str(tmp_path / "out"), "--max_steps", "1"]
    command = [sys.executable, "-c", script, "train", *names, *(flags or ["--report_to", "none"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    message = done.stderr.strip().splitlines()[-1]
    check_message(message, "train", package, extra)

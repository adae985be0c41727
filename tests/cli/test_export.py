import json

import pytest

from ..conftest import SENTENCES, small_model

pytest.importorskip("onnxscript", reason="onnxscript is part of the onnx extra")
pytest.importorskip("onnxruntime", reason="onnxruntime is part of the onnx extra")
pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from transformers import pipeline

from hf_deqnar.cli.main import main

ENGLISH = [english for english, _ in SENTENCES]


@pytest.mark.slow
def test_export_translate_and_evaluate(run, saved, tmp_path, capsys):
    """One export in a subprocess; the other verbs use its output."""
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps({"en": english, "de": german}) + "\n" for english, german in SENTENCES))
    columns = ["--data", str(data), "--source", "en", "--target", "de"]
    calibration = ["--calibration_data", str(data)]
    done = run("export", saved["ctc"], tmp_path / "out", *columns, *calibration, "--limit", "4")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")]
        for line in done.stdout.splitlines()
        if "|" in line
    }
    assert rows["fp32"][2:5] == ["100.0%", "100.0%", "100.0%"]
    assert float(rows["int8"][3].rstrip("%")) > 70
    assert float(rows["int8"][4].rstrip("%")) > 70
    assert all(float(rows[name][6]) >= 0 for name in ("torch", "fp32", "int8"))
    assert "4 sentences" in done.stdout

    fp32, int8 = (str(tmp_path / "out" / precision) for precision in ("fp32", "int8"))
    expected = [record["translation_text"] for record in pipeline("translation", model=str(saved["ctc"]))(ENGLISH)]
    done = run("translate", "--runtime", "onnx", "--threads", "1", "--model", fp32, *ENGLISH)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [" ".join(text.splitlines()) for text in expected]

    assert main(["evaluate", str(saved["ctc"]), fp32, int8, *columns, "--samples", "20"]) == 0
    assert fp32 in capsys.readouterr().out

    model = ["--model", str(saved["ctc"])]
    for arguments, message in [
        (["--model", fp32, "--runtime", "torch", "hello"], "is an ONNX export, which torch cannot run"),
        (["--model", str(tmp_path / "out"), "--runtime", "onnx", "hello"], "name "),
        (["--model", fp32, "--device", "cuda:0", "hello"], "runs on the CPU, not on cuda:0"),
        ([*model, "--threads", "0", "hello"], "--threads must be at least 1"),
    ]:
        assert main(["translate", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1


def test_errors_are_one_readable_line(saved, tokenizer, tmp_path, capsys):
    recurrent = tmp_path / "recurrent"
    small_model(architecture="bilstm", refinement="stacked", vocab_size=len(tokenizer)).save_pretrained(recurrent)
    tokenizer.save_pretrained(recurrent)
    model, output = str(saved["ctc"]), str(tmp_path / "out")
    capsys.readouterr()
    for arguments, message in [
        ([str(recurrent), output], "architecture='bilstm' cannot be exported"),
        ([str(tmp_path / "nothing"), output], "neither a model directory nor a model on the Hub"),
        ([model, output, "--limit", "0"], "--limit must be at least 1"),
        ([model, output, "--batch-size", "0"], "--batch_size must be at least 1"),
        ([model, output, "--data", "test.jsonl"], "--data needs --source and --target"),
        ([model, output, "--source", "en", "--target", "de"], "--source needs --data or --calibration_data"),
        ([model, output, "--calibration_data", "test.jsonl"], "--calibration_data needs --source and --target"),
        (
            [model, output, "--fp32", "--calibration_data", "x", "--source", "en", "--target", "de"],
            "--calibration_data is about int8 activations",
        ),
        ([model, output, "--fp32", "--eight-bits"], "--eight_bits is about int8 weights"),
    ]:
        assert main(["export", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()

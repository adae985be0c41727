import json

import pytest


def test_bench_solver_prints_a_table_and_writes_its_figures(run, tmp_path):
    pytest.importorskip("torchdeq", reason="torchdeq is part of the test extra")
    file = tmp_path / "figures.json"
    done = run("bench", "solver", "--rows", "4", "--longest", "12", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    results = json.loads(file.read_text())["results"]
    for solver in ("picard", "anderson", "broyden"):
        assert f"hf_deqnar {solver}" in done.stdout
        assert f"torchdeq {solver}" in done.stdout
        assert 0 < results[f"hf_deqnar {solver}"]["evaluations"] <= results[f"torchdeq {solver}"]["evaluations"]
        assert results[f"hf_deqnar {solver}"]["residual"] < 2e-3


@pytest.mark.slow
def test_bench_memory_prints_a_table_and_writes_its_figures(run_process, tmp_path):
    file = tmp_path / "figures.json"
    small = ["--preset", "tiny", "--rows", "16", "--length", "24", "--layers", "2", "--vocabulary", "100"]
    done = run_process("bench", "memory", *small, "--budgets", "6", "30", "--json", str(file))
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())["bytes"]
    assert figures["unrolled"]["30"] > 1.5 * figures["unrolled"]["6"]
    assert figures["one_step"]["30"] < 1.05 * figures["one_step"]["6"]
    assert "stacked, 2 layers" in done.stdout


@pytest.mark.slow
def test_bench_training_prints_a_table_and_both_implementations_agree(run_process, tmp_path):
    file = tmp_path / "figures.json"
    small = ["--vocabulary", "100", "--max-tokens", "64", "--layers", "1", "--steps", "1", "--threads", "1"]
    only = ["implicit one_step; ", "2 supervised states of 1 layers, sampled_words 512; hf_deqnar"]
    done = run_process("bench", "training", *small, "--only", *only, "--json", str(file))
    assert done.returncode == 0, done.stderr
    for column in ("ms", "tokens/s", "speed to reference", "nfe", "loss", "MB"):
        assert f" {column} " in done.stdout
    figures = json.loads(file.read_text())
    names = [f"implicit one_step; {name}" for name in ("reference", "hf_deqnar")]
    assert list(figures["results"]) == [*names, only[1]]
    assert figures["largest_difference"] < 1e-5
    for result in figures["results"].values():
        assert result["tokens_per_second"] > 0
        assert result["peak_bytes"] > 0
        assert 1 <= result["nfe"] <= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "solver", "--json", "/no/such/folder/file.json"], "There is no folder /no/such/folder"),
        (["bench", "solver", "--shortest", "9", "--longest", "3"], "--shortest 9 must be between 1 and --longest 3"),
        (["bench", "solver", "--json", "/tmp"], "/tmp is a folder; name a file."),
        (["bench", "solver", "--threads", "0"], "--threads must be at least 1, not 0."),
        (["bench", "solver", "--rows", "0"], "--rows must be at least 1, not 0."),
        (["bench", "solver", "--max-nfe", "0"], "--max_nfe must be at least 1, not 0."),
        (["bench", "solver", "--tol", "0"], "tol must be above 0"),
        (["bench", "memory", "--budgets", "0"], "--budgets 0"),
        (["bench", "training", "--steps", "0"], "--steps 0"),
        (["bench", "training", "--only", "unknown"], "--only 'unknown'"),
        (["bench", "training", "--objective", "axe"], "--objective axe"),
        (["bench", "training", "--max-tokens", "9", "--only", "mixed ift"], "max_tokens=9"),
    ],
)
def test_errors_are_one_readable_line(run, arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

import itertools

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar.cli import tables
from hf_deqnar.cli.main import main

from ..teachers import small_teacher


@pytest.mark.parametrize(
    ("verb", "steps"),
    [
        ("ngrams", ["tokenizing targets", "counting n-grams", "measuring perplexity"]),
        (
            "shortlist",
            ["tokenizing sources", "tokenizing targets", "linking tokens", "estimating p(t | s)", "measuring coverage"],
        ),
    ],
)
def test_every_long_step_has_a_progress_bar_on_a_terminal(
    run, run_on_terminal, saved, columns, tmp_path, monkeypatch, verb, steps
):
    monkeypatch.setattr(tables, "PART", 7)
    monkeypatch.setattr("tqdm.std.time", itertools.count(0.0, 10.0).__next__)  # every step takes more than two seconds
    sizes = ["--size", "30", "--common", "40"] if verb == "shortlist" else []
    command = [verb, "--model", saved["ctc"], *columns, *sizes, "--output_dir"]
    shown = run_on_terminal("stderr", *command, tmp_path / "one")
    assert [step for step in steps if f"{step}: 100%" not in shown] == []
    done = run(*command, tmp_path / "other")
    assert done.returncode == 0
    assert not [step for step in steps if step in done.stderr]


@pytest.mark.parametrize(
    ("verb", "what", "options", "refusal"),
    [
        ("ngrams", "n-grams", ["--order", "1"], "order=1 and least=2 must be at least 2 and 1"),
        ("ngrams", "n-grams", ["--weight", "0"], "weight=0.0 must be above 0"),
        ("shortlist", "shortlists", ["--size", "0"], "size=0 and common=300 must be between 1 and"),
    ],
)
def test_errors_are_one_readable_line(saved, columns, tokenizer, tmp_path, capsys, verb, what, options, refusal):
    teacher, few = tmp_path / "teacher", tmp_path / "few.jsonl"
    small_teacher(vocabulary=len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    few.write_text('{"en": "Hello.", "de": "Hallo."}\n')
    model, output = ["--model", str(saved["ctc"])], ["--output_dir", str(tmp_path / "out")]
    capsys.readouterr()
    for arguments, message in [
        (["--model", str(teacher), *output, *columns], f"is of type marian; only deqnar models have {what}"),
        ([*model, "--output_dir", str(teacher), *columns], "exists and is not an empty folder; name another"),
        ([*model, *output, "--data", str(few), *columns[2:]], f"1 pairs are too few to count {what}"),
        ([*model, *output, *columns, *options], refusal),
    ]:
        assert main([verb, *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1

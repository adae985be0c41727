import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.main import main

from ..teachers import small_teacher


def test_a_model_with_a_shortlist_translates_as_any_other(saved, columns, tmp_path, capsys):
    quick = str(tmp_path / "quick")
    paths = ["--model", str(saved["ctc"]), "--output_dir", quick]
    assert main(["shortlist", *paths, *columns, "--size", "30", "--common", "40"]) == 0
    told = capsys.readouterr().out
    assert "tokens are looked at on average; 100.00% of the tokens of 3 other targets are among them" in told
    model = DeqNarForConditionalGeneration.from_pretrained(quick)
    assert (model.config.shortlist_size, model.config.shortlist_common) == (30, 40)
    assert main(["evaluate", quick, f"{quick},shortlist=False", *columns, "--samples", "20", "--limit", "6"]) == 0
    assert f"{quick},shortlist=False" in capsys.readouterr().out


def test_errors_are_one_readable_line(saved, columns, tokenizer, tmp_path, capsys):
    teacher, few = tmp_path / "teacher", tmp_path / "few.jsonl"
    small_teacher(vocabulary=len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    few.write_text('{"en": "Hello.", "de": "Hallo."}\n')
    model, output = ["--model", str(saved["ctc"])], ["--output_dir", str(tmp_path / "out")]
    capsys.readouterr()
    for arguments, message in [
        (["--model", str(teacher), *output, *columns], "is of type marian; only deqnar models have shortlists"),
        ([*model, "--output_dir", str(teacher), *columns], "exists and is not an empty folder; name another"),
        ([*model, *output, "--data", str(few), *columns[2:]], "1 pairs are too few to learn shortlists from"),
        ([*model, *output, *columns, "--size", "0"], "size=0 and common=300 must be between 1 and"),
    ]:
        assert main(["shortlist", *arguments]) == 1, arguments
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1

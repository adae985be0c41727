import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.main import main

from ..teachers import small_teacher


def test_a_model_with_ngrams_translates_as_any_other(saved, columns, tmp_path, capsys):
    fluent = str(tmp_path / "fluent")
    assert main(["ngrams", "--model", str(saved["ctc"]), "--output_dir", fluent, *columns, "--weight", "0.3"]) == 0
    assert " n-grams of 2 to 3 tokens; perplexity 1." in capsys.readouterr().out, "all texts were seen before"
    model = DeqNarForConditionalGeneration.from_pretrained(fluent)
    assert model.config.ngram_order == 3
    assert (model.generation_config.ngram_weight, model.generation_config.ctc_beam_size) == (0.3, 5)
    systems = [fluent, f"{fluent},ngram_weight=0"]
    assert main(["evaluate", *systems, *columns, "--samples", "20", "--limit", "6"]) == 0
    assert systems[1] in capsys.readouterr().out


def test_errors_are_one_readable_line(saved, columns, tokenizer, tmp_path, capsys):
    teacher, few = tmp_path / "teacher", tmp_path / "few.jsonl"
    small_teacher(vocabulary=len(tokenizer)).save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    few.write_text('{"en": "Hello.", "de": "Hallo."}\n')
    model, output = ["--model", str(saved["ctc"])], ["--output_dir", str(tmp_path / "out")]
    capsys.readouterr()
    for arguments, message in [
        (["--model", str(teacher), *output, *columns], "is of type marian; only deqnar models have n-grams"),
        ([*model, "--output_dir", str(teacher), *columns], "exists and is not an empty folder; name another"),
        ([*model, *output, "--data", str(few), *columns[2:]], "1 pairs are too few to learn n-grams from"),
        ([*model, *output, *columns, "--order", "1"], "order=1 and least=2 must be at least 2 and 1"),
        ([*model, *output, *columns, "--weight", "0"], "weight=0.0 must be above 0"),
    ]:
        assert main(["ngrams", *arguments]) == 1, arguments
        error = capsys.readouterr().err
        assert message in error
        assert len(error.strip().splitlines()) == 1

import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.main import main


def test_a_model_with_a_shortlist_is_saved_and_evaluated(saved, columns, tmp_path, capsys):
    quick = str(tmp_path / "quick")
    paths = ["--model", str(saved["ctc"]), "--output_dir", quick]
    assert main(["shortlist", *paths, *columns, "--size", "30", "--common", "40"]) == 0
    printed = capsys.readouterr().out
    assert "tokens on average, and contain 100.00% of the tokens of 3 held-out targets." in printed
    model = DeqNarForConditionalGeneration.from_pretrained(quick)
    assert (model.config.shortlist_size, model.config.shortlist_common) == (30, 40)
    assert main(["evaluate", quick, f"{quick},shortlist=False", *columns, "--samples", "20", "--limit", "6"]) == 0
    assert f"{quick},shortlist=False" in capsys.readouterr().out

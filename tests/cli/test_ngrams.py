import pytest

pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.cli.main import main


def test_a_model_with_ngrams_is_saved_and_evaluated(saved, columns, tmp_path, capsys):
    fluent = str(tmp_path / "fluent")
    assert main(["ngrams", "--model", str(saved["ctc"]), "--output_dir", fluent, *columns, "--weight", "0.3"]) == 0
    assert " n-grams of 2 to 3 tokens; perplexity 1." in capsys.readouterr().out, "all texts were counted"
    model = DeqNarForConditionalGeneration.from_pretrained(fluent)
    assert model.config.ngram_order == 3
    assert (model.generation_config.ngram_weight, model.generation_config.ctc_beam_size) == (0.3, 5)
    systems = [fluent, f"{fluent},ngram_weight=0"]
    assert main(["evaluate", *systems, *columns, "--samples", "20", "--limit", "6"]) == 0
    assert systems[1] in capsys.readouterr().out

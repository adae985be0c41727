"""An ensemble compared with its members: probabilities, cache, beams, saving."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_deqnar import EnsembleForConditionalGeneration
from hf_deqnar.cli.main import main

from ...conftest import padded, random_sentences, small_model
from ...teachers import small_teacher

KINDS = ("marian", "bart", "t5")


def members(kind: str = "marian") -> list:
    """Two models with different weights, peaked enough to disagree."""
    found = []
    for seed in range(2):
        model = small_teacher(kind)
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            weight.data.add_(0.5 * torch.randn(weight.shape, generator=generator) * weight.data.std().nan_to_num(1.0))
        found.append(model.eval())
    return found


def batch():
    tokens = padded(random_sentences(4, shortest=3, longest=9))
    return {"input_ids": tokens, "attention_mask": (tokens != 1).long()}


@pytest.mark.parametrize("kind", KINDS)
def test_probabilities_are_the_mean_of_the_members(kind):
    models, inputs = members(kind), batch()
    labels = padded(random_sentences(4, shortest=2, longest=6, seed=1), padding=-100)
    ensemble = EnsembleForConditionalGeneration.of(models)
    start = torch.full_like(labels[:, :1], models[0].config.decoder_start_token_id)
    written = torch.cat([start, labels[:, :-1].clamp_min(0)], dim=1)
    expected = sum(model(**inputs, decoder_input_ids=written).logits.softmax(dim=-1) for model in models) / 2
    found = ensemble(**inputs, labels=labels)
    torch.testing.assert_close(found.logits.exp(), expected)
    chosen = expected.log().gather(2, labels.clamp_min(0)[:, :, None])[:, :, 0]
    torch.testing.assert_close(found.loss, -chosen[labels >= 0].mean())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_beams", [1, 3])
def test_the_shared_cache_changes_nothing(kind, num_beams):
    models, inputs = members(kind), batch()
    ensemble = EnsembleForConditionalGeneration.of(models)
    options = {"num_beams": num_beams, "max_new_tokens": 8, "do_sample": False}
    found = ensemble.generate(**inputs, **options)
    assert torch.equal(found, ensemble.generate(**inputs, **options, use_cache=False))
    alone = [model.generate(**inputs, **options) for model in models]
    assert not any(torch.equal(found, one) for one in alone), "the members disagree"
    twins = EnsembleForConditionalGeneration.of([models[0], models[0]])
    assert torch.equal(twins.generate(**inputs, **options), alone[0])


def test_members_may_have_different_sizes_and_are_saved_with_their_tied_weights(tmp_path):
    models, inputs = [small_teacher(), small_teacher(decoder_layers=1, encoder_layers=3)], batch()
    ensemble = EnsembleForConditionalGeneration.of(models)
    ensemble.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert isinstance(loaded, EnsembleForConditionalGeneration)
    assert loaded.num_parameters() == ensemble.num_parameters() == sum(model.num_parameters() for model in models)
    options = {"num_beams": 2, "max_new_tokens": 8}
    assert torch.equal(loaded.generate(**inputs, **options), ensemble.generate(**inputs, **options))


def test_models_that_do_not_belong_together_are_refused():
    with pytest.raises(ValueError, match="at least two models, not 1"):
        EnsembleForConditionalGeneration.of([small_teacher()])
    with pytest.raises(ValueError, match=r"must have the same vocab_size, but they have \[50, 60\]"):
        EnsembleForConditionalGeneration.of([small_teacher(), small_teacher(vocabulary=60)])


def test_command_line_saves_an_ensemble_that_distils(tokenizer, tmp_path, capsys):
    for name, layers in (("a", 1), ("b", 2)):
        small_teacher(vocabulary=len(tokenizer), decoder_layers=layers).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    names = [str(tmp_path / name) for name in ("a", "b")]
    command = ["ensemble", "--models", *names, "--output_dir", str(tmp_path / "ensemble")]
    assert main(command) == 0, capsys.readouterr().err
    assert "averages 2 models" in capsys.readouterr().out
    assert main(command) == 2
    assert "exists; choose another output_dir" in capsys.readouterr().err
    (tmp_path / "corpus.jsonl").write_text('{"en": "A horse.", "de": "Ein Pferd."}\n', encoding="utf-8")
    columns = ["--source", "en", "--target", "de", "--max_length", "6"]
    distill = ["distill", "--teacher", str(tmp_path / "ensemble"), "--data", str(tmp_path / "corpus.jsonl"), *columns]
    assert main([*distill, "--output", str(tmp_path / "distilled.jsonl")]) == 0, capsys.readouterr().err
    assert (tmp_path / "distilled.jsonl").read_text(encoding="utf-8").startswith('{"en": "A horse."')


def test_parallel_models_cannot_be_members(tokenizer, tmp_path, capsys):
    small_model(torch.float32, vocab_size=len(tokenizer)).save_pretrained(tmp_path / "parallel")
    tokenizer.save_pretrained(tmp_path / "parallel")
    name = str(tmp_path / "parallel")
    assert main(["ensemble", "--models", name, name, "--output_dir", str(tmp_path / "out")]) == 2
    assert "is not autoregressive; an ensemble averages" in capsys.readouterr().err

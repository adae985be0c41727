import json

import pytest

from hf_deqnar import DeqNarConfig

from ...conftest import small_config


@pytest.mark.parametrize(
    ("name", "width", "heads"), [("tiny", 128, 4), ("small", 256, 4), ("base", 512, 8), ("big", 1024, 16)]
)
def test_presets_have_the_documented_sizes(name, width, heads):
    config = DeqNarConfig.preset(name)
    assert (config.d_model, config.encoder_attention_heads, config.decoder_attention_heads) == (width, heads, heads)
    assert config.encoder_ffn_dim == config.decoder_ffn_dim == 4 * width


def test_a_preset_can_be_overridden():
    config = DeqNarConfig.preset("tiny", d_model=64, refinement="mixed")
    assert (config.d_model, config.refinement) == (64, "mixed")


def test_attribute_names_of_transformers_are_supported():
    config = DeqNarConfig.preset("tiny")
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (128, 4, 4)


@pytest.mark.parametrize(("length", "copied"), [("ctc", True), ("predict", False)])
def test_source_is_copied_if_canvas_positions_would_be_equal(length, copied):
    assert small_config(length=length).copies_source is copied


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"refinement": "implict"}, ["refinement='implict'", "implicit"]),
        ({"solver": "newton"}, ["solver='newton'", "anderson"]),
        ({"gradient": "exact"}, ["gradient='exact'", "ift"]),
        ({"length": "ctc", "source_copy": "none"}, ["length='ctc'", "source_copy='none'", "uniform"]),
        ({"refinement": "mixed", "tie_word_embeddings": False}, ["refinement='mixed'", "tie_word_embeddings=False"]),
        ({"refinement": "explicit", "tie_word_embeddings": False}, ["refinement='explicit'", "tie_word_embeddings"]),
        ({"weight_norm_clip": 2.0}, ["weight_norm_clip=2.0", "weight_norm='none'"]),
        ({"weight_norm": "weight", "weight_norm_clip": -1.0}, ["weight_norm_clip", "-1.0"]),
        ({"refinement": "stacked", "gradient": "ift"}, ["refinement='stacked'", "gradient='ift'"]),
        ({"feedback": "fixed"}, ["feedback='fixed'", "learned"]),
        ({"refinement": "stacked", "feedback": "learned"}, ["refinement='stacked'", "feedback='learned'"]),
        ({"weight_norm": "spectral", "feedback": "learned"}, ["feedback='learned'", "weight_norm='spectral'"]),
        ({"d_model": 30}, ["d_model=30", "encoder_attention_heads=4"]),
        ({"tol": 0.0}, ["tol", "0.0"]),
        ({"tol": -1e-3}, ["tol"]),
        ({"max_nfe": 0}, ["max_nfe", "0"]),
        ({"damping": 1.5}, ["damping", "1.5"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"mask_token_id": 5}, ["mask_token_id=5", "blank_token_id=5"]),
        ({"blank_token_id": 50}, ["blank_token_id=50", "vocab_size=50"]),
        ({"pad_token_id": None}, ["pad_token_id=None"]),
        ({"length": "ctc", "max_position_embeddings": 3}, ["ctc_upsampling=2", "max_position_embeddings=3"]),
    ],
)
def test_invalid_configuration_is_refused_with_the_field_name(fields, named):
    with pytest.raises(ValueError, match=r".") as caught:
        small_config(**fields)
    for words in named:
        assert words in str(caught.value)


def test_unknown_preset_is_reported_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'huge'.*tiny, small, base, big"):
        DeqNarConfig.preset("huge")


def test_configuration_changed_to_an_invalid_one_cannot_be_saved(tmp_path):
    config = small_config()
    config.solver = "newton"
    with pytest.raises(Exception, match="solver='newton'"):
        config.save_pretrained(tmp_path)


def test_feedback_is_learned_by_default_but_not_in_checkpoints_of_version_0_1(tmp_path):
    assert DeqNarConfig().feedback == "learned"
    assert DeqNarConfig(refinement="stacked").feedback == DeqNarConfig(weight_norm="weight").feedback == "sum"
    for feedback in ("learned", "sum"):
        DeqNarConfig(feedback=feedback).save_pretrained(tmp_path)
        assert DeqNarConfig.from_pretrained(tmp_path).feedback == feedback
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["feedback"]  # as version 0.1 saved it
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert DeqNarConfig.from_pretrained(tmp_path).feedback == "sum"

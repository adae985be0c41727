"""Runs that start from a teacher, a backbone or another model."""

import json

import pytest
import torch
from transformers import AutoTokenizer, MarianConfig, MarianMTModel

from hf_deqnar import DeqNarConfig, DeqNarForConditionalGeneration
from hf_deqnar.data.ngram_counts import add_ngrams
from hf_deqnar.data.tokenizer import train_tokenizer
from hf_deqnar.training.arguments import CorpusArguments, DataArguments, DeqNarTrainingArguments, ModelArguments
from hf_deqnar.training.run import (
    beyond_defaults,
    check_belongs,
    check_same_run,
    find_model,
    main,
    read_pairs,
    read_training_data,
    validation_set,
)
from hf_deqnar.training.teacher_trainer import load_teacher

from ..conftest import SENTENCES, small_model


@pytest.fixture
def teacher(tmp_path, tokenizer):
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    tokens = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = MarianConfig(
        vocab_size=len(tokenizer), encoder_attention_heads=4, decoder_attention_heads=4, **sizes, **tokens
    )
    MarianMTModel(config).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    return tmp_path / "teacher"


def test_training_can_start_from_a_teacher(teacher, tmp_path, tokenizer):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"en": source, "de": target}) for source, target in SENTENCES))
    flags = ["--train_data", file, "--source", "en", "--target", "de", "--teacher", teacher, "--config", "length=ctc"]
    flags += ["--objective", "ctc", "--max_tokens", 100, "--max_steps", 2, "--use_cpu", "--report_to", "none"]
    main([str(part) for part in [*flags, "--cache_dir", tmp_path / "cache", "--output_dir", tmp_path / "run"]])
    student = DeqNarForConditionalGeneration.from_pretrained(tmp_path / "run")
    assert (student.config.length, student.config.transition_layers) == ("ctc", 1)
    start = find_model(ModelArguments(teacher=str(teacher), config=["length=ctc"]), tokenizer)
    expected = MarianMTModel.from_pretrained(teacher).model.shared.weight
    assert torch.equal(start.model.shared.weight, expected)
    truncated = AutoTokenizer.from_pretrained(tmp_path / "run")("a " * 2000, truncation=True)["input_ids"]
    assert len(truncated) == student.config.max_source_length


def test_vary_names_replaces_names_in_training_data(tmp_path):
    file = tmp_path / "train.jsonl"
    pairs = [(f"He is in {city}.", f"Er ist in {city}.") for city in ("Boston", "Berlin")]
    file.write_text(
        "\n".join(json.dumps({"en": source, "de": target, "candidates": [target]}) for source, target in pairs)
    )
    data = {"train_data": str(file), "source": "en", "target": "de"}
    varied = read_pairs(DataArguments(**data, vary_names=1.0), seed=1)
    assert [(pair.source, *pair.references) for pair in varied] == pairs[::-1]
    assert [pair.source for pair in read_pairs(DataArguments(**data), seed=1)] == [source for source, _ in pairs]
    with pytest.raises(ValueError, match="vary_names must be a share from 0 to 1, not 2"):
        DataArguments(**data, vary_names=2)
    kd = DeqNarTrainingArguments(str(tmp_path / "run"), objective="dynamic_kd", use_cpu=True)
    with pytest.raises(ValueError, match="vary_names=0.5 has no candidates for dynamic_kd"):
        read_training_data(DataArguments(**data, vary_names=0.5), kd)


def test_vary_words_replaces_words_in_training_data(tmp_path):
    file = tmp_path / "train.jsonl"
    numbers = {"two": "zwei", "three": "drei"}
    pairs = [(f"He has {number} dogs.", f"Er hat {zahl} Hunde.") for number, zahl in numbers.items()]
    rest = [(f"a{index}", f"b{index}") for index in range(400)]
    lines = [json.dumps({"en": source, "de": target}) for source, target in [*pairs * 5, *rest]]
    file.write_text("\n".join(lines))
    data = {"train_data": str(file), "source": "en", "target": "de"}
    varied = read_pairs(DataArguments(**data, vary_words=1.0), seed=1)
    assert [(pair.source, *pair.references) for pair in varied] == [*pairs[::-1] * 5, *rest]
    with pytest.raises(ValueError, match="vary_words must be a share from 0 to 1, not -1"):
        DataArguments(**data, vary_words=-1)
    kd = DeqNarTrainingArguments(str(tmp_path / "run"), objective="dynamic_kd", use_cpu=True)
    with pytest.raises(ValueError, match="vary_words=0.5 has no candidates for dynamic_kd"):
        read_training_data(DataArguments(**data, vary_words=0.5), kd)


def test_several_files_and_all_augmentations_can_be_combined(tmp_path):
    files = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    files[0].write_text(json.dumps({"en": "It costs 300 dollars.", "de": "Es kostet 300 Dollar."}))
    files[1].write_text(json.dumps({"en": "Good.", "de": "Gut."}))
    data = {"train_data": [str(file) for file in files], "source": "en", "target": "de"}
    assert [pair.source for pair in read_pairs(DataArguments(**data), seed=1)] == ["It costs 300 dollars.", "Good."]
    varied = read_pairs(DataArguments(**data, vary_numbers=4), seed=1)
    assert len({pair.source for pair in varied}) > 4
    joined = read_pairs(DataArguments(**data, join_pairs=1.0), seed=1)
    assert all(pair.source.count(".") > 1 for pair in joined)
    surface = read_pairs(DataArguments(**data, vary_surface=1.0), seed=3)
    assert [pair.source for pair in surface] != ["It costs 300 dollars.", "Good."]
    with pytest.raises(ValueError, match="vary_numbers must be at least 0, not -1"):
        DataArguments(**data, vary_numbers=-1)
    kd = DeqNarTrainingArguments(str(tmp_path / "run"), objective="dynamic_kd", use_cpu=True)
    with pytest.raises(ValueError, match="dynamic_kd takes one file of candidates, not 2"):
        read_training_data(DataArguments(**data), kd)


def test_adding_learned_feedback_does_not_change_the_outputs(tmp_path, tokenizer):
    old = small_model(torch.float32, vocab_size=len(tokenizer))
    old.save_pretrained(tmp_path / "old")
    model = find_model(ModelArguments(model=str(tmp_path / "old"), config=["feedback=learned"]), tokenizer).eval()
    tokens = torch.tensor([[7, 8, 9, 2]])
    torch.testing.assert_close(model(input_ids=tokens).logits, old(input_ids=tokens).logits)


def test_resume_compares_fingerprints_of_starting_weights(teacher, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("\n".join(json.dumps({"en": source, "de": target}) for source, target in SENTENCES))
    flags = ["--train_data", file, "--source", "en", "--target", "de", "--config", "length=ctc", "--objective", "ctc"]
    flags += ["--max_tokens", 100, "--max_steps", 1, "--report_to", "none", "--cache_dir", tmp_path / "cache"]

    def run(start):
        main([str(part) for part in [*flags, "--teacher", start, "--output_dir", tmp_path / "run"]])

    run(teacher)
    moved = teacher.rename(tmp_path / "moved")
    run(moved)  # which is finished
    other = MarianMTModel.from_pretrained(moved)
    other.model.shared.weight.data += 1
    other.save_pretrained(moved)
    with pytest.raises(ValueError, match="holds a run with starting_weights="):
        run(moved)


def test_training_can_start_from_a_backbone(tmp_path, tokenizer):
    backbone = small_model(torch.float32, refinement="stacked", vocab_size=len(tokenizer))
    backbone.save_pretrained(tmp_path)
    model = find_model(ModelArguments(backbone=str(tmp_path), config=["refinement=mixed", "tol=1e-4"]), tokenizer)
    assert (model.config.refinement, model.config.transition_layers, model.config.tol) == ("mixed", 2, 1e-4)
    actual, expected = (one.state_dict()["model.transition.layers.1.norms.0.weight"] for one in (model, backbone))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("start", ["model", "backbone"])
def test_ngrams_of_the_starting_model_are_not_used(tmp_path, tokenizer, start):
    old = small_model(torch.float32, vocab_size=len(tokenizer), length="ctc", refinement="stacked")
    untouched = old.state_dict().keys()
    add_ngrams(old, [[5, 6, 7]] * 4, order=3, least=2, weight=0.2, bonus=1.5)
    assert old.generation_config.ctc_beam_size == 5
    old.save_pretrained(tmp_path / "old")
    model = find_model(ModelArguments(**{start: str(tmp_path / "old")}), tokenizer)
    if start == "model":
        assert model.state_dict().keys() == untouched
    settings = model.generation_config
    assert (settings.ctc_beam_size, settings.ngram_weight, settings.token_bonus) == (1, 0.0, 0.0)
    model.save_pretrained(tmp_path / "new")
    again = DeqNarForConditionalGeneration.from_pretrained(tmp_path / "new")
    assert again.model.ngrams is None
    assert again.generate(torch.tensor([[5, 6, 2]])).shape[0] == 1


def test_starting_model_with_more_layers_or_another_vocabulary_is_refused(teacher, tmp_path, tokenizer):
    stacked = small_model(torch.float32, refinement="stacked", vocab_size=len(tokenizer))
    stacked.save_pretrained(tmp_path / "stacked")
    with pytest.raises(
        ValueError, match="the new configuration has no parameters for model.transition.layers.1.*--backbone"
    ):
        find_model(ModelArguments(model=str(tmp_path / "stacked"), config=["refinement=implicit"]), tokenizer)
    assert find_model(ModelArguments(model=str(tmp_path / "stacked")), tokenizer).config.refinement == "stacked"
    data = {"train_data": "x", "source": "en", "target": "de"}
    with pytest.raises(ValueError, match="vocab_size=400 has no effect: .*teacher has its vocabulary"):
        check_belongs(tokenizer, str(teacher), DataArguments(**data, vocab_size=400))
    other = train_tokenizer([text for pair in SENTENCES for text in pair], len(tokenizer) - 20)
    with pytest.raises(ValueError, match="The vocabulary of other"):
        check_belongs(other, str(teacher), DataArguments(**data, tokenizer="other"))


def test_unusable_weights_are_reported_in_one_line(teacher, tmp_path, tokenizer):
    model = small_model(torch.float32, vocab_size=len(tokenizer), d_model=32)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="model are not those that decoder_ffn_dim=48 would need"):
        find_model(ModelArguments(model=str(tmp_path / "model"), config=["decoder_ffn_dim=48"]), tokenizer)
    for folder in (tmp_path / "model", teacher):
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
    for start in ({"model": "model"}, {"teacher": "teacher"}, {"backbone": "model"}):
        named = {key: str(tmp_path / name) for key, name in start.items()}
        with pytest.raises(ValueError, match="The weights of .* are damaged"):
            find_model(ModelArguments(**named), tokenizer)
    for name in ("model", "teacher"):
        with pytest.raises(ValueError, match="The weights of .* are damaged"):
            load_teacher(str(tmp_path / name))


def test_starting_points_are_mutually_exclusive():
    with pytest.raises(ValueError, match="model=a and teacher=b are mutually exclusive starting points; give one"):
        ModelArguments(model="a", teacher="b")


def test_resume_ignores_new_configuration_fields_with_default_values(tmp_path):
    """Default values of fields are not recorded, so that new fields have no effect."""
    small_model(refinement="mixed").save_pretrained(tmp_path / "model")
    config = DeqNarForConditionalGeneration.from_pretrained(tmp_path / "model").config  # includes _name_or_path
    output = beyond_defaults(config)
    assert output["refinement"] == "mixed"
    assert not {"tol", "transformers_version", "_name_or_path"} & output.keys()
    assert DeqNarConfig.from_dict(output).to_diff_dict() == config.to_diff_dict()
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"config": output}, "processes": 1, "finished": False}))
    check_same_run(tmp_path, {"config": output})
    with pytest.raises(ValueError, match=r"holds a run with tol=the default, but now it is 0\.5"):
        check_same_run(tmp_path, {"config": {**output, "tol": 0.5}})
    with pytest.raises(ValueError, match="holds a run with refinement=mixed, but now it is the default"):
        check_same_run(tmp_path, {"config": {name: value for name, value in output.items() if name != "refinement"}})


def test_validation_pairs_are_evenly_spaced_in_the_file(tmp_path, tokenizer):
    """Files are often sorted by length, and the first sentences are not representative."""
    file = tmp_path / "validation.jsonl"
    file.write_text("\n".join(json.dumps({"en": f"A man {number}.", "de": "Ein Mann."}) for number in range(9)))
    data = CorpusArguments(str(file), "en", "de", validation_data=str(file), validation_limit=3)
    assert list(validation_set(data, tokenizer)["source"]) == ["A man 0.", "A man 3.", "A man 6."]

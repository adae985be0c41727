"""Students that start from a teacher, and equilibrium models that start from a backbone."""

from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, MarianConfig, MarianMTModel, T5Config
from transformers import T5ForConditionalGeneration as T5

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.models.deqnar.conversion_deqnar import weights_for_teacher

from ...conftest import PAD, padded, random_sentences, small_model

SIZES = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
SIZES |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "max_position_embeddings": 64}
SIZES |= {"scale_embedding": True, "pad_token_id": PAD, "eos_token_id": 2, "decoder_start_token_id": PAD}

NEARLY = {"rtol": 1e-5, "atol": 1e-6}  # Marian's sines are rounded to float32


def teacher_of(kind: str, tokenizer) -> torch.nn.Module:
    torch.manual_seed(0)
    classes = {"marian": (MarianConfig, MarianMTModel), "bart": (BartConfig, BartForConditionalGeneration)}
    config_class, model_class = classes[kind]
    model = model_class(config_class(vocab_size=len(tokenizer), activation_function="relu", **SIZES)).double().eval()
    with (
        torch.no_grad()
    ):  # biases and norms are initialised to constants, so a test would not detect that they are exchanged
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture(params=["marian", "bart"])
def teacher(request, tokenizer):
    return teacher_of(request.param, tokenizer)


def test_student_encoder_equals_teacher_encoder(teacher, tokenizer):
    student = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, length="ctc")
    tokens = padded(random_sentences(4))
    mask = tokens != PAD
    with torch.no_grad():
        actual = student.get_encoder()(tokens).last_hidden_state
        expected = teacher.get_encoder()(tokens, attention_mask=mask.long()).last_hidden_state
    torch.testing.assert_close(actual[mask], expected[mask], **NEARLY)


def test_student_decoder_equals_teacher_without_causal_mask(teacher, tokenizer):
    """With one position there is nothing to mask, so both must have the same logits."""
    student = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, refinement="stacked")
    tokens = padded(random_sentences(4))
    canvas = torch.full((4, 1), student.config.mask_token_id)
    with torch.no_grad():
        actual = student(input_ids=tokens, decoder_input_ids=canvas).logits
        mask = (tokens != PAD).long()
        expected = teacher(input_ids=tokens, attention_mask=mask, decoder_input_ids=canvas).logits
    torch.testing.assert_close(actual, expected - teacher.final_logits_bias, **NEARLY)


def test_widened_feed_forward_computes_the_same_and_is_trainable(teacher, tokenizer):
    students = [
        DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, decoder_ffn_dim=width, encoder_ffn_dim=64)
        for width in (48, 200)
    ]
    tokens = padded(random_sentences(4))
    canvas = torch.full((4, 5), students[0].config.mask_token_id)
    plain, wide = (student(input_ids=tokens, decoder_input_ids=canvas, max_nfe=3) for student in students)
    torch.testing.assert_close(wide.logits, plain.logits, **NEARLY)
    wide.logits.square().mean().backward()
    new = students[1].model.transition.layers[0].feed_forward.contract.weight.grad[:, 48:]
    assert (new != 0).any(dim=0).float().mean() > 0.5


@pytest.mark.parametrize("refinement", ["implicit", "mixed", "explicit"])
def test_students_of_every_kind_generate_and_can_be_saved(teacher, tokenizer, refinement, tmp_path):
    student = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, refinement=refinement)
    expected = 3 if refinement == "explicit" else 1
    assert len(student.model.transition.layers) == expected
    tokens = padded(random_sentences(3))
    out = student.float().generate(tokens)
    student.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(tokens), out)


def test_unsupported_teacher_is_refused(tokenizer):
    t5 = T5(T5Config(vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="converts marian and bart models, .* a t5 .*hf-deqnar distill"):
        DeqNarForConditionalGeneration.from_teacher(t5, tokenizer)
    with pytest.raises(ValueError, match="from_backbone starts from a deqnar model"):
        DeqNarForConditionalGeneration.from_teacher(small_model(), tokenizer)
    with pytest.raises(TypeError, match="The teacher is a int; give a transformers model, a directory or a hub id"):
        DeqNarForConditionalGeneration.from_teacher(3, tokenizer)
    with pytest.raises(ValueError, match="The teacher is a MarianMTModel object; give its tokenizer as well"):
        DeqNarForConditionalGeneration.from_teacher(teacher_of("marian", tokenizer))
    small = MarianMTModel(MarianConfig(vocab_size=5, **SIZES))
    with pytest.raises(ValueError, match="vocabulary of 5 has no <blank>; add it to the tokenizer and call"):
        DeqNarForConditionalGeneration.from_teacher(small, tokenizer)
    untied = MarianMTModel(MarianConfig(vocab_size=len(tokenizer), tie_word_embeddings=False, **SIZES))
    with pytest.raises(ValueError, match="several embedding matrices"):
        DeqNarForConditionalGeneration.from_teacher(untied, tokenizer)
    with pytest.raises(ValueError, match=r"is \(400, 32\) in the old model but \(400, 64\) in the new one"):
        DeqNarForConditionalGeneration.from_teacher(teacher_of("marian", tokenizer), tokenizer, d_model=64)
    with pytest.raises(ValueError, match="decoder has 5 layers but the teacher's only 3"):
        DeqNarForConditionalGeneration.from_teacher(teacher_of("marian", tokenizer), tokenizer, transition_layers=5)


@pytest.mark.parametrize("as_type", [str, Path])
def test_teacher_can_be_a_directory(tokenizer, tmp_path, as_type):
    teacher = teacher_of("marian", tokenizer).float()
    teacher.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    expected = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, refinement="stacked").state_dict()
    for given in (None, tokenizer):
        student = DeqNarForConditionalGeneration.from_teacher(as_type(tmp_path), given, refinement="stacked")
        copied = {name: value for name, value in student.state_dict().items() if "length_head" not in name}
        assert all(torch.equal(value, expected[name]) for name, value in copied.items())
        assert student.config.mask_token_id == tokenizer.mask_token_id


def test_t5_directory_is_refused_before_its_weights_are_read(tokenizer, tmp_path):
    T5Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)  # there are no weights
    with pytest.raises(ValueError, match="from_teacher converts marian and bart models"):
        DeqNarForConditionalGeneration.from_teacher(tmp_path)


def test_teacher_to_student_to_teacher_round_trip(tokenizer):
    teacher = teacher_of("marian", tokenizer)
    student = DeqNarForConditionalGeneration.from_teacher(teacher, tokenizer, refinement="stacked")
    found, expected = weights_for_teacher(student, teacher.config), teacher.state_dict()
    shared = {"lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"}
    fixed = {"final_logits_bias", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"}
    assert set(found) == set(expected) - shared - fixed
    assert all(torch.equal(weight, expected[name]) for name, weight in found.items())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "bilstm"),
        ("layer_norm", "pre"),
        ("positions", "learned"),
        ("layernorm_embedding", True),
        ("weight_norm", "spectral"),
        ("tie_word_embeddings", False),
    ],
)
def test_student_with_layers_other_than_marians_is_refused(field, value):
    with pytest.raises(
        ValueError, match=f"A teacher can start from a student with {field}=.*, but this one has {value}"
    ):
        weights_for_teacher(small_model(refinement="stacked", **{field: value}), MarianConfig())


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
@pytest.mark.parametrize("options", [{"length": "predict"}, {"length": "ctc", "latent": "vae", "layer_norm": "pre"}])
def test_one_evaluation_of_a_model_from_a_backbone_equals_the_backbone(refinement, options):
    backbone = small_model(refinement="stacked", **options)
    model = DeqNarForConditionalGeneration.from_backbone(backbone, refinement=refinement, feedback="sum")
    assert model.config.refinement == refinement
    tokens = padded(random_sentences(4))
    with torch.no_grad():
        actual, expected = model(input_ids=tokens, max_nfe=1), backbone(input_ids=tokens)
        assert torch.equal(actual.logits[actual.canvas_mask], expected.logits[expected.canvas_mask])
        solved = model(input_ids=tokens)
    assert solved.nfe.min() > 1
    assert not torch.equal(solved.logits, expected.logits)


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_model_with_new_learned_feedback_converges_to_the_output_of_the_backbone(refinement):
    backbone = small_model(refinement="stacked", length="ctc")
    model = DeqNarForConditionalGeneration.from_backbone(backbone, refinement=refinement)
    assert model.config.feedback == "learned", "the default"
    tokens, labels = padded(random_sentences(4)), torch.randint(6, 40, (4, 3))
    solved, expected = model(input_ids=tokens, labels=labels), backbone(input_ids=tokens)
    torch.testing.assert_close(solved.logits[solved.canvas_mask], expected.logits[expected.canvas_mask])
    assert solved.converged.all()
    assert (solved.nfe <= 3).all()
    solved.loss.backward()
    assert model.model.transition.feedback.weight.grad.abs().max() > 0  # a matrix of zeros that has a gradient


def test_backbone_may_be_a_folder_or_weight_normed_and_must_be_stacked(tmp_path):
    backbone = small_model(torch.float32, refinement="stacked", weight_norm="weight")
    model = DeqNarForConditionalGeneration.from_backbone(backbone)
    model.save_pretrained(tmp_path)
    tokens = padded(random_sentences(2))
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    actual, expected = loaded(input_ids=tokens, max_nfe=1), backbone(input_ids=tokens)
    assert torch.equal(actual.logits[actual.canvas_mask], expected.logits[expected.canvas_mask])
    with pytest.raises(ValueError, match="A backbone has refinement='stacked', but this model 'implicit'"):
        DeqNarForConditionalGeneration.from_backbone(model)
    with pytest.raises(ValueError, match="weight_norm='none', but the backbone has 'weight'"):
        DeqNarForConditionalGeneration.from_backbone(backbone, weight_norm="none")
    with pytest.raises(ValueError, match="has no model.transition.layers.1.*width and depth of the old one"):
        DeqNarForConditionalGeneration.from_backbone(backbone, transition_layers=1)
    with pytest.raises(ValueError, match="The old model has no model.transition.layers.2.*width and depth"):
        DeqNarForConditionalGeneration.from_backbone(backbone, transition_layers=5)

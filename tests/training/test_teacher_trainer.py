"""Training of Marian and LSTM teachers."""

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSeq2SeqLM, MarianMTModel

from hf_deqnar.data.tokenized_dataset import tokenize_for_validation, tokenize_pairs
from hf_deqnar.models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentForConditionalGeneration
from hf_deqnar.training.arguments import TranslationTrainingArguments
from hf_deqnar.training.teacher_trainer import (
    SIZES,
    TeacherArguments,
    TeacherTrainer,
    load_teacher,
    lstm_config,
    make_teacher,
    marian_config,
    teacher_from_student,
)

from ..conftest import PAD, REFINEMENTS, padded, random_sentences, small_model
from .conftest import PAIRS


def make(tokenizer, folder, architecture="marian", **options):
    torch.manual_seed(0)
    if architecture == "marian":
        config = marian_config("tiny", tokenizer, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0.0)
    else:
        config = lstm_config("tiny", tokenizer, d_model=32, encoder_units=32, decoder_units=48, dropout=0.0)
    settings = {"max_steps": 6, "max_tokens": 400, "learning_rate": 5e-3, "warmup_steps": 5, "use_cpu": True}
    settings |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "label_smoothing_factor": 0.1}
    return TeacherTrainer(
        make_teacher(config, tokenizer),
        TranslationTrainingArguments(str(folder), **{**settings, **options}),
        train_dataset=tokenize_pairs(PAIRS, tokenizer, max_length=60, cache=folder / "cache").dataset,
        eval_dataset=tokenize_for_validation(PAIRS[:6], tokenizer, max_length=60),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("size", SIZES)
def test_sizes_are_those_of_the_mple_paper(size, tokenizer):
    config = marian_config(size, tokenizer)
    expected = {"tiny": (128, 512, 3, 4), "small": (256, 1024, 3, 4), "base": (512, 2048, 6, 8)}
    expected["big"] = (1024, 4096, 6, 8)
    found = (config.d_model, config.decoder_ffn_dim, config.decoder_layers, config.decoder_attention_heads)
    assert found == expected[size]
    assert config.dropout == (0.1 if size in ("tiny", "small") else 0.3)
    assert marian_config(size, tokenizer, d_model=64).init_std == 64**-0.5


def test_residual_branches_start_with_a_tenth_of_the_usual_weights(tokenizer):
    torch.manual_seed(0)
    config = marian_config("tiny", tokenizer)
    model = make_teacher(config, tokenizer)
    plain = MarianMTModel(config)
    for name, weight in model.named_parameters():
        usual = plain.get_parameter(name)
        if weight.dim() == 2 and "embed_positions" not in name:
            ends_branch = name.endswith(("out_proj.weight", "fc2.weight"))
            assert float(weight.detach().std() / usual.detach().std()) == pytest.approx(
                0.1 if ends_branch else 1.0, rel=0.05
            ), name


@pytest.mark.parametrize("architecture", ["marian", "lstm"])
def test_loss_is_cross_entropy_with_label_smoothing(tokenizer, tmp_path, architecture):
    trainer = make(tokenizer, tmp_path, architecture)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    term = trainer.compute_terms(trainer.model, batch, 0.0, torch.Generator())["likelihood"]
    out = trainer.model(**{name: batch[name] for name in ("input_ids", "attention_mask", "labels")})
    expected = functional.cross_entropy(out.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(term.total / term.count, expected)
    trainer.model.eval()
    term = trainer.compute_terms(trainer.model, batch, 0.0, torch.Generator())["likelihood"]
    torch.testing.assert_close(term.total / term.count, out.loss)


@pytest.mark.parametrize("architecture", ["marian", "lstm"])
def test_trained_teacher_loads_with_auto_classes_and_translates(tokenizer, tmp_path, architecture):
    settings = {"max_steps": 150, "eval_strategy": "steps", "eval_steps": 50, "warmup_steps": 20}
    if architecture == "lstm":  # trains more slowly
        settings |= {"max_steps": 500, "learning_rate": 1e-2, "max_tokens": 1000, "lr_scheduler_type": "cosine"}
    trainer = make(tokenizer, tmp_path, architecture, **settings)
    trainer.train()
    scores = [entry["eval_bleu"] for entry in trainer.state.log_history if "eval_bleu" in entry]
    assert scores[-1] > 90
    trainer.save_model()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is (MarianMTModel if architecture == "marian" else RecurrentForConditionalGeneration)
    batch = tokenizer([PAIRS[0].source], return_tensors="pt")
    for beams in (1, 5):
        tokens = loaded.generate(**batch, num_beams=beams)
        assert tokenizer.decode(tokens[0], skip_special_tokens=True) == PAIRS[0].references[0]


def test_every_trainable_parameter_of_a_loaded_teacher_gets_a_gradient(tokenizer, tmp_path):
    """DistributedDataParallel waits for the gradient of every parameter with requires_grad."""
    make(tokenizer, tmp_path).save_model()
    model = load_teacher(str(tmp_path)).train()
    batch = tokenizer([PAIRS[0].source], return_tensors="pt")
    model(**batch, labels=batch["input_ids"]).loss.backward()
    assert not [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_teacher_from_student_has_the_encoder_of_the_student(tokenizer, refinement):
    student = small_model(torch.float32, refinement=refinement, vocab_size=len(tokenizer), length="ctc")
    depth = len(student.model.transition.layers)
    teacher = teacher_from_student(student, tokenizer, {"decoder_layers": depth + 1, "dropout": 0.2}).eval()
    assert (teacher.config.decoder_layers, teacher.config.dropout) == (depth + 1, 0.2)
    tokens = padded(random_sentences(4))
    mask = tokens != PAD
    with torch.no_grad():
        teacher_states = teacher.get_encoder()(tokens, attention_mask=mask.long()).last_hidden_state
        student_states = student.get_encoder()(tokens).last_hidden_state
    torch.testing.assert_close(teacher_states[mask], student_states[mask], rtol=1e-4, atol=1e-5)
    first, new = teacher.model.decoder.layers[0], teacher.model.decoder.layers[depth]
    expand = student.model.transition.layers[0].feed_forward.expand
    assert torch.equal(first.fc1.weight, expand.weight)
    assert torch.equal(teacher.lm_head.weight, student.model.shared.weight)
    assert new.fc2.weight.std() < 0.2 * new.fc1.weight.std()


def test_teacher_from_student_may_have_fewer_or_more_layers(tokenizer):
    student = small_model(torch.float32, refinement="stacked", vocab_size=len(tokenizer), encoder_layers=2)
    more = student.config.encoder_layers + 1
    teacher = teacher_from_student(student, tokenizer, {"decoder_layers": 1, "encoder_layers": more})
    assert (len(teacher.model.decoder.layers), len(teacher.model.encoder.layers)) == (1, more)
    expand = student.model.encoder.layers[1].feed_forward.expand
    assert torch.equal(teacher.model.encoder.layers[1].fc1.weight, expand.weight)


def test_special_tokens_are_not_generated(tokenizer, tmp_path):
    trainer = make(tokenizer, tmp_path)
    batch = tokenizer([pair.source for pair in PAIRS[:6]], return_tensors="pt", padding=True)
    tokens = trainer.model.generate(**batch, max_length=40)
    suppressed = torch.tensor(tokenizer.convert_tokens_to_ids(["<s>", "<mask>", "<blank>"]))
    assert not torch.isin(tokens, suppressed).any()


def test_unknown_size_or_field_is_refused():
    with pytest.raises(ValueError, match="size 'huge' is unknown; choose one of tiny, small, base, big"):
        TeacherArguments(size="huge")
    with pytest.raises(ValueError, match="config 'refinement' is not a field of MarianConfig"):
        TeacherArguments(config=["refinement=implicit"])

"""Energy training. The energy itself is tested in tests/invariants/test_energy.py."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import hf_deqnar
from hf_deqnar.objectives.energy import OPERATORS
from hf_deqnar.training.energy_run import reference_length_bleu
from hf_deqnar.training.energy_trainer import EnergyTrainingArguments
from hf_deqnar.training.samplers import collate

from ..conftest import PAD, REFINEMENTS, small_model
from ..teachers import MAKERS, small_teacher


def trained_teacher(trainer, steps: int = 120):
    """A teacher trained on the six sentences."""
    teacher = small_teacher(vocabulary=trainer.model.config.vocab_size, init_std=0.1, d_model=32, dropout=0.0).train()
    optimiser = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    batch = collate([trainer.train_dataset[number] for number in range(6)], PAD)
    batch.pop("number")
    for _ in range(steps):
        loss = teacher(**batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.2
    return teacher.eval()


def test_energy_trainer_is_exported_from_the_package():
    assert hf_deqnar.EnergyTrainer.__name__ == "EnergyTrainer"
    assert hf_deqnar.EnergyTrainingArguments is EnergyTrainingArguments


@pytest.mark.parametrize("fed", OPERATORS)
@pytest.mark.parametrize("compared", OPERATORS)
def test_every_pair_of_operators_takes_a_step(make_energy_trainer, fed, compared):
    trainer = make_energy_trainer(
        decoder_input_operator=fed, target_operator=compared, max_steps=1, model={"refinement": "stacked"}
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    moved = [name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])]
    assert "model.length_head.classifier.weight" in moved
    assert any("transition" in name for name in moved)


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("latent", ["none", "vae"])
def test_students_of_every_kind_train_and_log_all_terms(make_energy_trainer, refinement, latent):
    trainer = make_energy_trainer(model={"refinement": refinement, "latent": latent}, max_steps=2, max_nfe=3)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {"energy", "discrete_energy", "token_energy", "length"} <= logged.keys()
    assert ({"nfe", "residual", "converged"} <= logged.keys()) == (refinement != "stacked")
    assert refinement == "stacked" or logged["nfe"] <= 3
    factor = trainer.model.config.length_loss_factor
    assert logged["loss"] == pytest.approx(logged["token_energy"] + factor * logged["length"], rel=1e-4)
    metrics = trainer.evaluate()
    assert {"eval_energy", "eval_discrete_energy", "eval_length", "eval_bleu", "eval_chrf"} <= metrics.keys()


@pytest.mark.parametrize("kind", MAKERS)
def test_energy_training_does_not_change_the_teacher(make_energy_trainer, tokenizer, kind):
    teacher = small_teacher(kind, len(tokenizer)).train()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    modes = [module.training for module in teacher.modules()]
    flags = [weight.requires_grad for weight in teacher.parameters()]
    trainer = make_energy_trainer(teacher=teacher, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert [module.training for module in teacher.modules()] == modes
    assert [weight.requires_grad for weight in teacher.parameters()] == flags
    assert all(weight.grad is None for weight in teacher.parameters())
    assert not any("teacher" in name for name in trainer.model.state_dict())


def test_energy_of_a_pretrained_student_decreases(make_trainer, make_energy_trainer):
    """As in the paper: a CMLM first, then energy training; the weights with the lowest energy are used."""
    model = {"refinement": "stacked", "d_model": 64, "dropout": 0.0}
    options = {"max_tokens": 400, "learning_rate": 2e-3, "eval_strategy": "steps", "eval_steps": 20}
    start = {**options, "max_steps": 120, "learning_rate": 5e-3, "warmup_steps": 20, "label_smoothing_factor": 0.0}
    baseline = make_trainer("cmlm", objective="cmlm", model=model, **start)
    baseline.train()
    teacher = trained_teacher(baseline)
    trainer = make_energy_trainer(teacher=teacher, model=model, **{**options, "learning_rate": 1e-3, "max_steps": 60})
    trainer.model.load_state_dict(baseline.model.state_dict())
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_discrete_energy"] < 0.5 * before["eval_discrete_energy"]
    assert after["eval_energy"] < 0.5 * before["eval_energy"]
    assert after["eval_bleu"] > before["eval_bleu"] + 10
    energies = [entry["eval_discrete_energy"] for entry in trainer.state.log_history if "eval_discrete_energy" in entry]
    assert after["eval_discrete_energy"] == pytest.approx(min(energies), rel=1e-6)
    assert trainer.state.best_metric == pytest.approx(min(energies[:-1]), rel=1e-6)


def test_training_stops_when_the_energy_no_longer_decreases(make_energy_trainer):
    trainer = make_energy_trainer(
        max_steps=60, learning_rate=0.0, eval_strategy="steps", eval_steps=2, early_stopping_patience=3
    )
    trainer.train()
    assert trainer.state.global_step == 8


def test_reference_length_bleu_of_a_trained_student_is_100(make_energy_trainer, tokenizer, monkeypatch):
    trainer = make_energy_trainer()
    student, dataset = trainer.model.eval(), trainer.eval_dataset
    known = {tuple(row["input_ids"]): row["labels"] for row in dataset}

    prepared, prepare, read = [], student.prepare, student.read

    def remember(input_ids, *rest):
        prepared.append(input_ids)
        return prepare(input_ids, *rest)

    def recite(found):
        logits = read(found)
        for place, row in enumerate(prepared[-1].tolist()):
            answer = known[tuple(token for token in row if token != PAD)]
            for position, token in enumerate(answer):
                logits[place, position, token] = 1e3
        return logits

    assert reference_length_bleu(student, tokenizer, dataset, torch.device("cpu")) < 50
    monkeypatch.setattr(student, "prepare", remember)
    monkeypatch.setattr(student, "read", recite)
    assert reference_length_bleu(student, tokenizer, dataset, torch.device("cpu")) == pytest.approx(100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decoder_input_operator": "XS"}, "decoder_input_operator='XS' is unknown; choose one of SX, STL, SG, ST, GX"),
        ({"target_operator": "st"}, "target_operator='st' is unknown"),
        ({"temperature": 0.0}, "temperature must be above 0, not 0.0"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 has no effect on an energy"),
        ({"max_nfe": 0}, "max_nfe must be at least 1"),
    ],
)
def test_invalid_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        EnergyTrainingArguments(str(tmp_path), **options)


def test_greater_is_better_follows_from_the_metric(tmp_path):
    assert EnergyTrainingArguments(str(tmp_path)).greater_is_better is False
    assert EnergyTrainingArguments(str(tmp_path), metric_for_best_model="bleu").greater_is_better is True
    assert EnergyTrainingArguments(str(tmp_path), metric_for_best_model="eval_bleu").greater_is_better is True


def misled_teacher(vocabulary):
    """M2M100 gives padding no position, so a start token equal to the padding token differs from its embedding."""
    return small_teacher("m2m100", vocabulary, decoder_start_token_id=PAD)


def silent_teacher(vocabulary):
    teacher = small_teacher("marian", vocabulary)
    teacher.final_logits_bias[0, 7] = float("-inf")
    return teacher


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        (
            lambda size: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=size)),
            "The teacher is a gpt2",
        ),
        (
            lambda size: small_model(torch.float32, vocab_size=size),
            "DeqNarForConditionalGeneration, does not accept decoder_inputs",
        ),
        (lambda size: small_teacher("bart", size + 3), r"The teacher has \d+ tokens but the model has \d+"),
        (misled_teacher, "M2M100ForConditionalGeneration, computes different log-probabilities from embeddings"),
        (silent_teacher, "MarianMTModel, assigns zero probability to some tokens"),
    ],
)
def test_unsupported_teachers_are_refused(make_energy_trainer, tokenizer, teacher, message):
    with pytest.raises(ValueError, match=message):
        make_energy_trainer(teacher=teacher(len(tokenizer)))


def test_ctc_students_are_refused(make_energy_trainer):
    with pytest.raises(ValueError, match="needs config.length = 'predict', but this model has 'ctc'"):
        make_energy_trainer(model={"length": "ctc"})


def test_texts_longer_than_the_positions_of_the_teacher_are_refused(make_energy_trainer, tokenizer):
    trainer = make_energy_trainer(teacher=small_teacher("marian", len(tokenizer), max_position_embeddings=8))
    with pytest.raises(ValueError, match="is too long for the teacher, which supports 8"):
        trainer.train()

"""The trainer. Resuming and several processes are tested in tests/invariants."""

import copy
import errno
import json
import math
import os
import resource
from pathlib import Path

import pytest
import torch
from torch.utils.tensorboard import SummaryWriter  # noqa: F401  (the test extra has it)
from transformers import AutoModelForSeq2SeqLM, TrainerCallback

from hf_deqnar.models.deqnar.losses_deqnar import SampledWords, Targets
from hf_deqnar.objectives.inputs import masked
from hf_deqnar.objectives.objective import combine
from hf_deqnar.training.arguments import DeqNarTrainingArguments
from hf_deqnar.training.trainer import DeqNarTrainer

from ..conftest import REFINEMENTS
from ..test_readme import documented_objectives
from .conftest import PAIRS, length_for


def offer_candidates(dataset):
    """Candidates of Dynamic KD: the target, and the reversed target."""
    candidates = [[labels, labels[::-1]] for labels in dataset["labels"]]
    similarity = [[[100.0, 30.0], [30.0, 100.0]]] * len(candidates)
    return dataset.add_column("candidates", candidates).add_column("similarity", similarity)


@pytest.mark.parametrize("objective", documented_objectives())
def test_every_documented_objective_trains(make_trainer, objective):
    settings = {"max_steps": 30, "logging_steps": 15, "learning_rate": 3e-3}
    if objective.startswith("dynamic_kd"):
        trainer = make_trainer(objective=objective, prepare=offer_candidates, gamma=[1.0, 2.0], **settings)
    else:
        trainer = make_trainer(objective=objective, **settings)
    before = trainer.evaluate()
    trainer.train()
    losses = [entry["nat"] for entry in trainer.state.log_history if "nat" in entry]
    assert losses[1] < losses[0]
    after = trainer.evaluate()
    assert after["eval_nat"] < before["eval_nat"]


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_log_has_solver_statistics_and_every_term(make_trainer, refinement):
    settings = {"correction": 0.3, "initial": 0.1, "jacobian": 0.1, "random_nfe": True}
    settings = {} if refinement == "stacked" else {**settings, "denoising_steps": 0}
    trainer = make_trainer(model={"refinement": refinement, "latent": "vae"}, **settings)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    dynamics = {"nfe", "residual", "converged", "correction", "initial", "jacobian"}
    assert {"nat", "latent"} <= logged.keys()
    assert (dynamics <= logged.keys()) == (refinement != "stacked")
    metrics = trainer.evaluate()
    assert ("eval_spectral_radius" in metrics) == (refinement != "stacked")
    assert {"eval_bleu", "eval_chrf", "eval_nat", "eval_loss"} <= metrics.keys()


@pytest.mark.parametrize("objective", ["ctc+glat", "glat"])
def test_trained_model_reproduces_its_data_and_validation_measures_it(make_trainer, objective):
    trainer = make_trainer(
        objective=objective,
        max_steps=250,
        learning_rate=5e-3,
        warmup_steps=20,
        max_tokens=400,
        eval_strategy="steps",
        eval_steps=50,
        label_smoothing_factor=0.0,
        model={"dropout": 0.0, "refinement": "stacked", "d_model": 64},
    )
    trainer.train()
    scores = [entry["eval_bleu"] for entry in trainer.state.log_history if "eval_bleu" in entry]
    assert scores[-1] > 90
    assert trainer.evaluate()["eval_bleu"] >= max(scores) - 1e-6  # the model now has the best weights


def test_validation_scores_the_output_of_generate(make_trainer, tokenizer):
    trainer = make_trainer()
    from hf_deqnar.evaluation.metrics import score
    from hf_deqnar.evaluation.translation import translate_sentences

    found = translate_sentences(trainer.model, tokenizer, [pair.source for pair in PAIRS[:6]], 64)
    assert trainer.evaluate()["eval_bleu"] == score(found, PAIRS[:6])["bleu"]


def test_evaluation_does_not_change_training(make_trainer):
    weights = []
    for name, strategy in (("with", "steps"), ("without", "no")):
        trainer = make_trainer(name, eval_strategy=strategy, eval_steps=1, average_best=0)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_learning_rate_decays_with_the_inverse_square_root(make_trainer):
    trainer = make_trainer(max_steps=16, warmup_steps=4, learning_rate=1e-2, logging_steps=1)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates[:5] == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01])
    assert rates[15] == pytest.approx(0.01 * (4 / 15) ** 0.5)


def test_last_weights_are_validated(make_trainer):
    trainer = make_trainer(max_steps=5, eval_strategy="steps", eval_steps=2)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "eval_bleu" in entry] == [2, 4, 5]


def test_last_updates_are_logged(make_trainer):
    trainer = make_trainer(max_steps=5, logging_steps=3)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "cpu_seconds" in entry]
    assert [entry["step"] for entry in logs] == [3, 5]
    assert all(entry["cpu_seconds"] > 0 for entry in logs)


def test_early_stopping_ends_training_without_improvement(make_trainer):
    trainer = make_trainer(
        max_steps=60, learning_rate=0.0, eval_strategy="steps", eval_steps=2, early_stopping_patience=3
    )
    trainer.train()
    assert trainer.state.global_step == 8  # the first is the best, then three that are not better


def test_explicit_models_are_first_trained_to_denoise(make_trainer, monkeypatch):
    recorded = []
    original = DeqNarTrainer._stage
    monkeypatch.setattr(DeqNarTrainer, "_stage", lambda self: recorded.append(original(self)) or recorded[-1])
    make_trainer(model={"refinement": "explicit"}).train()
    assert [budget for _, budget in recorded] == [1, 1, 1, None, None, None]
    assert [objective.input is masked for objective, _ in recorded] == [True] * 3 + [False] * 3
    recorded.clear()
    make_trainer(model={"refinement": "implicit"}, denoising_steps=2, max_nfe=4, correction=0.5).train()
    assert [budget for _, budget in recorded] == [1, 1, 4, 4, 4, 4]
    assert not any(objective.input is masked for objective, _ in recorded)
    assert [objective.correction for objective, _ in recorded] == [0, 0, 0.5, 0.5, 0.5, 0.5]


def test_term_that_starts_between_two_logs_is_averaged_over_its_own_updates(make_trainer):
    options = {"denoising_steps": 5, "correction": 0.5, "correction_share": 1.0, "logging_steps": 6}
    trainer = make_trainer(model={"refinement": "implicit"}, learning_rate=1e-9, **options)
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert logged["correction"] == pytest.approx(logged["nat"], rel=0.3)


def test_denoising_stage_uses_one_evaluation(make_trainer):
    trainer = make_trainer(model={"refinement": "explicit"}, denoising_steps=100, logging_steps=1)
    trainer.train()
    assert all(entry["nfe"] == 1 for entry in trainer.state.log_history if "nfe" in entry)


def test_every_part_of_a_batch_has_its_own_random_numbers(make_trainer):
    seeds = []
    trainer = make_trainer(gradient_accumulation_steps=2, max_steps=3)
    original = trainer._generator
    trainer._generator = lambda: seeds.append(original()) or seeds[-1]
    trainer.train()
    assert trainer.state.global_step == 3
    assert len({generator.initial_seed() for generator in seeds}) == 6


def test_gradient_accumulation_averages_over_batches(make_trainer):
    """With plain gradient descent: parts of a batch are averaged, neither summed nor omitted."""
    settings = {"objective": "ctc", "model": {"dropout": 0.0}, "max_grad_norm": 0.0, "warmup_steps": 0}
    settings |= {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": 1e-2, "weight_decay": 0.0}
    full = make_trainer(gradient_accumulation_steps=2, max_steps=1, logging_steps=1, **settings)
    start = {name: value.clone() for name, value in full.model.state_dict().items()}
    full.train()
    moved = {name: value - start[name] for name, value in full.model.state_dict().items()}
    single = make_trainer(max_steps=1, **settings)
    loader = single.get_train_dataloader()
    loader.set_epoch(0)
    steps = []
    for batch, _ in zip(loader, range(2), strict=False):
        single.model.load_state_dict(start)
        single.model.zero_grad()
        single.model.train()
        single.objective(single.model, batch)["loss"].backward()
        steps.append({name: -1e-2 * weight.grad for name, weight in single.model.named_parameters()})
    for name in steps[0]:
        torch.testing.assert_close(moved[name], (steps[0][name] + steps[1][name]) / 2, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("refinement", ["implicit", "stacked"])
def test_nan_loss_is_reported_with_step_pairs_and_last_checkpoint(make_trainer, tmp_path, refinement):
    trainer = make_trainer(save_strategy="steps", save_steps=2, model={"refinement": refinement})

    class Poison(TrainerCallback):
        def on_step_begin(self, args, state, control, **rest):
            if state.global_step == 3:
                with torch.no_grad():
                    trainer.model.model.shared.weight[10:] = float("nan")

    trainer.add_callback(Poison())
    with pytest.raises(FloatingPointError, match=r"The loss is n.* in update 4, pairs \[\d+, .*checkpoint-2. Lower"):
        trainer.train()
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "checkpoint-2")
    assert all(weight.isfinite().all() for weight in model.state_dict().values())


def test_nan_gradient_stops_training_before_the_update(make_trainer):
    trainer = make_trainer()
    trainer.model.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(FloatingPointError, match="The gradient is .* in update 1, pairs .*no checkpoint was written"):
        trainer.train()
    assert trainer.model.lm_head.weight.isfinite().all()


def test_infinite_gradient_is_accepted_only_with_a_gradient_scaler(make_trainer):
    trainer = make_trainer()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    assert trainer._get_grad_norm(trainer.model, torch.tensor(float("inf"))) == float("inf")
    trainer.accelerator.scaler = None
    with pytest.raises(FloatingPointError, match="The gradient is inf"):
        trainer._get_grad_norm(trainer.model, torch.tensor(float("inf")))


def test_full_disk_leaves_the_previous_checkpoint_intact(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(save_strategy="steps", save_steps=2)
    write = torch.save

    def full_at_the_fourth_step(value, path, *rest, **options):
        if "checkpoint-4" in str(path):
            with open(path, "wb") as file:
                file.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(value, path, *rest, **options)

    monkeypatch.setattr(torch, "save", full_at_the_fourth_step)
    with pytest.raises(OSError, match="checkpoint-4 could not be written.*No space left.*checkpoint-2 is intact"):
        trainer.train()
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == ["checkpoint-2"]
    monkeypatch.undo()
    trainer = make_trainer(save_strategy="steps", save_steps=2)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 6


def test_full_disk_while_saving_best_weights_is_reported_in_one_line(make_trainer, tmp_path):
    """The operating system limits the file size of this process to a few bytes."""
    trainer = make_trainer(eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.is_in_train = True
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="step-6.safetensors could not be written.*checkpoint-6 is intact"):
            trainer._save_if_best({"eval_bleu": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_best_weights_are_deleted_without_checkpoints(make_trainer, tmp_path):
    trainer = make_trainer(eval_strategy="steps", eval_steps=1, average_best=2)
    trainer.train()
    assert len(list((tmp_path / "run" / "best").iterdir())) == 2


@pytest.mark.parametrize("stopped_at", [3, 6])
def test_early_stopping_state_is_restored_on_resume(make_trainer, stopped_at):
    settings = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1, "early_stopping_patience": 4}
    settings |= {"save_strategy": "steps", "save_steps": 1, "max_steps": 50, "save_total_limit": None}
    first = make_trainer(**settings)
    first.train()
    assert first.state.global_step == 5
    again = make_trainer(**settings)
    again.train(resume_from_checkpoint=f"{first.args.output_dir}/checkpoint-{min(stopped_at, 5)}")
    assert again.state.global_step == 5


def test_predict_returns_token_ids_in_order(make_trainer, tokenizer):
    trainer = make_trainer()
    found = trainer.predict(trainer.eval_dataset)
    batch = tokenizer([PAIRS[2].source], return_tensors="pt")
    single = trainer.model.generate(batch["input_ids"], attention_mask=batch["attention_mask"])[0].tolist()
    row = found.predictions[2].tolist()
    assert row[: len(single)] == single
    assert set(row[len(single) :]) <= {tokenizer.pad_token_id}
    assert {"test_bleu", "test_nat"} <= found.metrics.keys()
    assert found.label_ids.shape[0] == 6


def test_predict_after_training_has_no_dropout(make_trainer):
    trainer = make_trainer(model={"dropout": 0.5})
    trainer.train()
    trainer.model.train()
    first, second = (trainer.predict(trainer.eval_dataset).predictions.tolist() for _ in range(2))
    assert trainer.model.training
    trainer.model.eval()
    assert first == second == trainer.predict(trainer.eval_dataset).predictions.tolist()


def test_lists_and_several_validation_sets_are_accepted(make_trainer, tokenizer):
    trainer = make_trainer()
    rows = [trainer.train_dataset[place] for place in range(8)]
    held_out = {"a": trainer.eval_dataset.select([0, 1]), "b": [trainer.eval_dataset[2]]}
    lists = DeqNarTrainer(
        trainer.model, trainer.args, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer
    )
    lists.train()
    assert {"eval_a_bleu", "eval_b_bleu"} <= lists.evaluate().keys()
    with pytest.raises(TypeError, match="train_dataset is a str; give a datasets.Dataset or a list of rows"):
        DeqNarTrainer(trainer.model, trainer.args, train_dataset="rows", processing_class=tokenizer)


def test_several_validation_sets_are_evaluated_in_training(make_trainer, tokenizer, tmp_path):
    trainer = make_trainer()
    sets = {"a": trainer.eval_dataset.select([0, 1]), "b": trainer.eval_dataset.select([2])}
    looks = {"eval_strategy": "steps", "eval_steps": 2, "average_best": 0, "max_steps": 4, "max_tokens": 100}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "save_strategy": "no"}
    several = DeqNarTrainer(
        trainer.model,
        DeqNarTrainingArguments(str(tmp_path / "several"), objective="ctc+glat", **looks, **quiet),
        train_dataset=trainer.train_dataset,
        eval_dataset=sets,
        processing_class=tokenizer,
    )
    several.train()
    for name in ("eval_a_bleu", "eval_b_bleu"):
        assert [entry["step"] for entry in several.state.log_history if name in entry] == [2, 4]


def test_validation_has_no_smoothing_or_random_budgets(make_trainer):
    plain = make_trainer(objective="glat", label_smoothing_factor=0.0, model={"tol": 1e-9})
    smoothed = make_trainer(objective="glat", label_smoothing_factor=0.3, random_nfe=True, model={"tol": 1e-9})
    first, second = plain.evaluate(), smoothed.evaluate()
    assert first["eval_nat"] == second["eval_nat"]
    assert first["eval_nfe"] == second["eval_nfe"] == 6


def test_long_validation_sentence_has_its_own_batch(make_trainer):
    trainer = make_trainer()
    trainer.args.max_tokens = 10
    assert trainer.evaluate()["eval_nat"] > 0


def test_best_checkpoint_follows_the_metric(make_trainer):
    trainer = make_trainer(metric_for_best_model="nat", eval_strategy="steps", eval_steps=2, learning_rate=3e-3)
    trainer.train()
    scores = {entry["step"]: entry["eval_nat"] for entry in trainer.state.log_history if "eval_nat" in entry}
    assert trainer._best_steps()[0] == min(scores, key=scores.get)
    with pytest.raises(ValueError, match="metric_for_best_model=blue is not measured; there are loss, nat"):
        make_trainer(metric_for_best_model="blue", eval_strategy="steps", eval_steps=2).train()


def test_only_weights_that_may_be_averaged_are_stored(make_trainer, tmp_path):
    trainer = make_trainer(
        max_steps=8, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=4, average_best=3
    )
    trainer.train()
    kept = sorted(path.name for path in (tmp_path / "run" / "best").iterdir())
    assert kept == sorted(f"step-{step}.safetensors" for step in trainer._best_steps())
    assert len(kept) == 3
    assert any("averaged_bleu" in entry for entry in trainer.state.log_history)
    state = json.loads((tmp_path / "run" / "checkpoint-8" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] is None


def test_loss_terms_are_logged_to_tensorboard(make_trainer, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "events")
    try:
        make_trainer(report_to="tensorboard").train()
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert {"train/loss", "train/nat", "train/nfe", "train/residual"} <= set(events.Tags()["scalars"])


def test_unsupported_training_setups_are_refused_at_the_start(make_trainer, tokenizer):
    with pytest.raises(ValueError, match="'ctc.glat' needs config.length = 'ctc'"):
        make_trainer(model={"length": "predict"})
    trainer = make_trainer()
    arguments = trainer.args
    arguments.eval_strategy = "steps"
    with pytest.raises(ValueError, match="eval_strategy='steps' needs an eval_dataset"):
        DeqNarTrainer(trainer.model, arguments, train_dataset=trainer.train_dataset, processing_class=tokenizer)
    with pytest.raises(ValueError, match="correction=0.5 has no effect: a stacked model seeks no equilibrium"):
        make_trainer(model={"refinement": "stacked"}, correction=0.5)
    with pytest.raises(ValueError, match="glance_nfe=2 has no effect: objective 'ctc' needs no first prediction"):
        make_trainer(objective="ctc", glance_nfe=2)
    with pytest.raises(ValueError, match="'dynamic_kd.ctc' needs a column of candidates; there are number, input_ids"):
        make_trainer(objective="dynamic_kd+ctc")
    with pytest.raises(ValueError, match="compute_metrics has no effect"):
        DeqNarTrainer(trainer.model, trainer.args, processing_class=tokenizer, compute_metrics=print)
    with pytest.raises(ValueError, match="needs processing_class=tokenizer"):
        DeqNarTrainer(trainer.model, trainer.args, train_dataset=trainer.train_dataset)


def test_configuration_records_the_training_objective(make_trainer, tmp_path):
    trainer = make_trainer(objective="glat")
    trainer.train()
    trainer.save_model()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["objective"] == "glat"
    assert config["length"] == length_for("glat")


SELF_CONDITIONED = {"refinement": "implicit", "feedback": "learned", "self_conditioning": "expected"}


def test_supervised_states_train_and_their_losses_are_logged(make_trainer):
    options = {"state_weights": [0.2, 0.4, 0.4], "truth_share": [0.1, 0.6], "damage_share": 0.1}
    trainer = make_trainer(objective="ctc", model=SELF_CONDITIONED, max_steps=30, learning_rate=3e-3, **options)
    feedback = trainer.model.model.transition.self_conditioning.feedback[0].weight
    assert not feedback.any()
    trainer.train()
    assert feedback.any()
    logs = [entry for entry in trainer.state.log_history if "state_3" in entry]
    assert all({"state_1", "state_2", "state_3"} <= set(entry) and "nfe" not in entry for entry in logs)
    assert logs[-1]["state_3"] < logs[0]["state_3"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"refinement": "implicit", "feedback": "learned"}, "needs a self-conditioned model.*is 'none'"),
        ({**SELF_CONDITIONED, "gradient": "ift"}, "which gradient='ift' needs"),
    ],
)
def test_supervised_states_need_a_self_conditioned_model_and_no_fixed_point(make_trainer, model, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(objective="ctc", model=model, state_weights=[0.5, 0.5])


@pytest.mark.parametrize("layer_norm", ["post", "pre"])
def test_inner_layers_of_a_stack_are_supervised(make_trainer, layer_norm):
    model = {"refinement": "stacked", "decoder_layers": 3, "layer_norm": layer_norm}
    trainer = make_trainer(objective="ctc", model=model, layer_weight=0.7)
    batch = next(iter(trainer.get_train_dataloader()))
    terms = trainer.objective.terms(trainer.model, batch)
    source = trainer.model.prepare(batch["input_ids"], batch["attention_mask"])
    canvas = trainer.model.lay_out(source, batch["labels"])
    losses = []
    for depth in (1, 2, 3):
        shallow = copy.deepcopy(trainer.model)
        shallow.model.transition.layers = shallow.model.transition.layers[:depth]
        features = shallow.solve(source, canvas).value
        losses.append(shallow.length_model.loss(shallow, features, Targets(batch["labels"], canvas.mask))[0])
    torch.testing.assert_close(terms["layers"].total, (losses[0] + losses[1]) / 2)
    torch.testing.assert_close(terms["nat"].total, losses[2])
    combined = combine(terms)
    torch.testing.assert_close(combined["loss"], combined["nat"] + 0.7 * combined["layers"])
    assert "layers" not in trainer.validation_objective.terms(trainer.model, batch)


@pytest.mark.parametrize("model", [{"refinement": "implicit"}, {"refinement": "stacked", "decoder_layers": 1}])
def test_layer_weight_needs_inner_layers(make_trainer, model):
    with pytest.raises(ValueError, match="layer_weight=1.0 has no effect: it needs refinement='stacked'"):
        make_trainer(objective="ctc", model=model, layer_weight=1.0)


@pytest.mark.parametrize("model", [{"refinement": "stacked"}, SELF_CONDITIONED])
def test_fine_tuning_on_the_overlap_increases_it(make_trainer, model):
    states = {"state_weights": [0.5, 0.5]} if model is SELF_CONDITIONED else {}
    options = {"objective": "ctc", "model": {**model, "dropout": 0.0}, "learning_rate": 3e-3, **states}
    first = make_trainer("first", max_steps=200, **options)
    first.train()
    trainer = make_trainer("second", max_steps=60, overlap_weight=1.0, **options)
    trainer.model.load_state_dict(first.model.state_dict())
    batch = next(iter(trainer.get_train_dataloader()))
    names = ["overlap_1", "overlap_2"] if states else ["overlap"]

    def loss() -> float:
        means = combine(trainer.objective.terms(trainer.model, batch))
        torch.testing.assert_close(means["loss"], sum(means[name] for name in names) / len(names))
        assert all(0 <= means[name] <= 1 for name in names)
        return means[names[-1]].item()

    before = loss()
    trainer.train()
    assert loss() < before - 0.1


@pytest.mark.parametrize(("option", "needed"), [("overlap_weight", "ctc or dag"), ("sampled_words", "ctc")])
def test_losses_that_the_length_model_lacks_are_refused(make_trainer, option, needed):
    with pytest.raises(ValueError, match=f"{option}=1 needs config.length={needed}, but this model has 'predict'"):
        make_trainer(objective="glat", **{option: 1})


@pytest.mark.parametrize("model", [{"refinement": "stacked"}, SELF_CONDITIONED])
def test_a_sampled_vocabulary_is_drawn_anew_for_every_batch(make_trainer, monkeypatch, model):
    drawn = []
    draw = SampledWords.draw

    def watch(*arguments):
        drawn.append(draw(*arguments))
        return drawn[-1]

    monkeypatch.setattr(SampledWords, "draw", watch)
    states = {"state_weights": [0.5, 0.5]} if model is SELF_CONDITIONED else {}
    make_trainer(objective="ctc", model=model, sampled_words=20, max_steps=4, **states).train()
    assert len(drawn) == 4
    assert all(len(one.tokens) > 20 for one in drawn)
    assert len({tuple(one.tokens[-20:].tolist()) for one in drawn}) == 4


def test_a_moving_average_is_evaluated_in_place_of_the_weights(make_trainer):
    trainer = make_trainer(ema_decay=0.9, eval_strategy="steps", eval_steps=2, max_steps=4, average_best=0)
    seen = []
    translate = trainer._translate

    def watch(*rest):
        seen.append(trainer.model.lm_head.weight.detach().clone())
        return translate(*rest)

    trainer._translate = watch
    weights = {}
    trainer.add_callback(RecordWeights(weights))
    trainer.train()
    average = next(iter(weights.values())).clone()
    expected = []
    for update, current in list(weights.items())[1:]:
        decay = min(0.9, (1 + update) / (10 + update))
        average = decay * average + (1 - decay) * current
        if update % 2 == 0:
            expected.append(average)
    assert len(seen) == len(expected) == 2
    for one, other in zip(seen, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(trainer.model.lm_head.weight, average)


class RecordWeights(TrainerCallback):
    """Remembers the output embeddings at the start and after every update."""

    def __init__(self, weights):
        self.weights = weights

    def on_train_begin(self, args, state, control, model, **rest):
        self.weights[0] = model.lm_head.weight.detach().clone()

    def on_step_end(self, args, state, control, model, **rest):
        self.weights[state.global_step] = model.lm_head.weight.detach().clone()


@pytest.mark.parametrize("overlap", [0.0, 1.0])
def test_graphs_train_and_resume_with_the_same_weights(make_trainer, overlap):
    options = {
        "objective": "dag+glat",
        "overlap_weight": overlap,
        "model": {"refinement": "stacked", "dag_upsampling": 3},
        "save_steps": 3,
    }
    trainer = make_trainer(save_strategy="steps", eval_strategy="steps", eval_steps=3, **options)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "nat" in entry]
    assert all(entry["excluded"] == 0 and math.isfinite(entry["nat"]) for entry in logged)
    assert any("eval_bleu" in entry for entry in trainer.state.log_history)
    resumed = make_trainer(save_strategy="steps", eval_strategy="steps", eval_steps=3, **options)
    resumed.train(resume_from_checkpoint=str(Path(trainer.args.output_dir) / "checkpoint-3"))
    for name, weight in trainer.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


def test_label_smoothing_of_graphs_is_refused():
    with pytest.raises(ValueError, match="label_smoothing_factor=0.1 has no meaning for CTC and graphs"):
        DeqNarTrainingArguments("unused", objective="dag+glat", label_smoothing_factor=0.1)

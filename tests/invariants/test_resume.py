"""Invariant 9: a training run killed at any step and resumed ends with the same weights, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from hf_deqnar.training.base_trainer import UNFINISHED

from ..conftest import PAIRS_FILE
from ..training.conftest import make_energy_trainer, make_trainer  # noqa: F401  (fixtures)

STEPS = 9


class Killed(BaseException):
    """Raised in place of a kill; handlers of `Exception` do not catch it."""


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **rest):
        if state.global_step == self.step:
            raise Killed


def settings() -> dict:
    return {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "correction": 0.3,
        "correction_share": 0.5,
        "random_nfe": True,
        "average_best": 0,  # the last weights, because the best ones may be older than the kill
        "gradient_accumulation_steps": 1,
        "subword_dropout": 0.2,
        "subword_dropout_target": 0.2,
        "model": {"dropout": 0.1, "latent": "vae"},
    }


def final_weights(trainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def weights_of_a_whole_run(make_trainer, folder="whole", **options) -> dict[str, torch.Tensor]:  # noqa: F811
    trainer = make_trainer(folder, **{**settings(), **options})
    trainer.train()
    return final_weights(trainer)


@pytest.fixture
def uninterrupted(make_trainer):  # noqa: F811
    return weights_of_a_whole_run(make_trainer)


@pytest.mark.parametrize(("optimizer", "steps"), [(None, (3, 4, 7)), ("muon", (5,))])
def test_run_stopped_at_any_step_ends_with_the_same_weights(make_trainer, optimizer, steps):  # noqa: F811
    full = weights_of_a_whole_run(make_trainer, optimizer=optimizer)
    for step in steps:
        trainer = make_trainer(f"stopped-{step}", **settings(), optimizer=optimizer)
        trainer.add_callback(KillAt(step))
        with pytest.raises(Killed):
            trainer.train()
        resumed = make_trainer(f"stopped-{step}", **settings(), optimizer=optimizer)
        resumed.train(resume_from_checkpoint=True)
        assert resumed.state.global_step == STEPS
        found = final_weights(resumed)
        assert all(torch.equal(found[name], full[name]) for name in full)


@pytest.mark.parametrize("average_best", [0, 2])
def test_a_moving_average_of_weights_survives_a_kill(make_trainer, average_best):  # noqa: F811
    options = {**settings(), "ema_decay": 0.8, "average_best": average_best}
    full = weights_of_a_whole_run(make_trainer, **{"ema_decay": 0.8, "average_best": average_best})
    trainer = make_trainer("stopped", **options)
    trainer.add_callback(KillAt(5))
    with pytest.raises(Killed):
        trainer.train()
    resumed = make_trainer("stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    found = final_weights(resumed)
    assert all(torch.equal(found[name], full[name]) for name in full)
    plain = weights_of_a_whole_run(make_trainer, average_best=average_best, folder="plain")
    assert any(not torch.equal(plain[name], full[name]) for name in full)


def test_run_killed_while_saving_resumes_from_previous_checkpoint(
    make_trainer,  # noqa: F811
    uninterrupted,
    monkeypatch,
    tmp_path,
):
    trainer = make_trainer("writing", **settings())
    write = torch.save

    def killed_at_the_fourth_step(value, path, *rest, **options):
        if "checkpoint-4" in str(path) and "scheduler" in str(path):
            raise Killed
        write(value, path, *rest, **options)

    monkeypatch.setattr(torch, "save", killed_at_the_fourth_step)
    with pytest.raises(Killed):
        trainer.train()
    monkeypatch.undo()
    assert (tmp_path / "writing" / UNFINISHED).is_dir()
    resumed = make_trainer("writing", **settings())
    resumed.train(resume_from_checkpoint=True)
    found = final_weights(resumed)
    assert all(torch.equal(found[name], uninterrupted[name]) for name in uninterrupted)
    assert not (tmp_path / "writing" / UNFINISHED).exists()


def flip_a_bit(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(
    make_trainer,  # noqa: F811
    uninterrupted,
    tmp_path,
    caplog,
):
    trainer = make_trainer("stopped", **settings())
    trainer.add_callback(KillAt(7))
    with pytest.raises(Killed):
        trainer.train()
    run = tmp_path / "stopped"
    flip_a_bit(run / "checkpoint-6" / "optimizer.pt")
    with pytest.raises(ValueError, match="checkpoint-6/optimizer.pt is damaged: .*; resume from another checkpoint"):
        make_trainer("stopped", **settings()).train(resume_from_checkpoint=str(run / "checkpoint-6"))
    resumed = make_trainer("stopped", **settings())
    resumed.train(resume_from_checkpoint=True)
    assert "checkpoint-6/optimizer.pt is damaged" in caplog.text
    assert f"{run / 'checkpoint-4'} is used instead" in caplog.text
    found = final_weights(resumed)
    assert all(torch.equal(found[name], uninterrupted[name]) for name in uninterrupted)
    for checkpoint in run.glob("checkpoint-*"):
        (checkpoint / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"checkpoint-\d/trainer_state.json is damaged.*no intact checkpoint; remove"):
        make_trainer("stopped", **settings()).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("damage", [flip_a_bit, lambda path: os.truncate(path, 1000)])
def test_damaged_best_weights_are_named_and_not_averaged(make_trainer, tmp_path, damage):  # noqa: F811
    trainer = make_trainer("stopped", **{**settings(), "average_best": 2})
    trainer.add_callback(KillAt(7))
    with pytest.raises(Killed):
        trainer.train()
    for file in (tmp_path / "stopped" / "best").iterdir():
        damage(file)
    resumed = make_trainer("stopped", **{**settings(), "average_best": 8})
    with pytest.raises(ValueError, match=r"best/step-\d.safetensors is damaged \(.*\); remove it, and the run"):
        resumed.train(resume_from_checkpoint=True)


class TerminateAt(TrainerCallback):
    """Sends SIGTERM to this process in the middle of an update."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, **rest):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_sigterm_writes_a_checkpoint_from_which_the_run_ends_with_the_same_weights(
    make_trainer,  # noqa: F811
    tmp_path,
    capsys,
    strategy,
):
    options = {**settings(), "save_strategy": strategy, "eval_strategy": strategy, "average_best": 3}
    full = weights_of_a_whole_run(make_trainer, **options)
    handler = signal.getsignal(signal.SIGTERM)
    stopped = make_trainer("stopped", **options)
    stopped.add_callback(TerminateAt(4))
    with pytest.raises(SystemExit) as ended:
        stopped.train()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "Ended by SIGTERM after update 5 of 9; checkpoint-5 is written" in capsys.readouterr().err
    assert (tmp_path / "stopped" / "checkpoint-5" / "model.safetensors").is_file()
    resumed = make_trainer("stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    found = final_weights(resumed)
    assert all(torch.equal(found[name], full[name]) for name in full)


def test_best_weights_are_restored_on_resume(make_trainer):  # noqa: F811
    full = make_trainer("whole", **{**settings(), "average_best": 2})
    full.train()
    stopped = make_trainer("stopped", **{**settings(), "average_best": 2})
    stopped.add_callback(KillAt(7))
    with pytest.raises(Killed):
        stopped.train()
    resumed = make_trainer("stopped", **{**settings(), "average_best": 2})
    resumed.train(resume_from_checkpoint=True)
    found, expected = final_weights(resumed), final_weights(full)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_finished_run_is_not_trained_further(make_trainer):  # noqa: F811
    first = make_trainer("whole", **{**settings(), "max_steps": 6})
    first.train()
    again = make_trainer("whole", **{**settings(), "max_steps": 6})
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    found, expected = final_weights(again), final_weights(first)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_finished_run_of_one_and_a_half_epochs_is_not_trained_further(make_trainer):  # noqa: F811
    """Stopped after its last checkpoint, before its weights were saved; the next epoch is not started."""
    halves = {**settings(), "max_steps": -1, "num_train_epochs": 1.5, "save_strategy": "epoch", "eval_strategy": "no"}
    first = make_trainer("whole", **halves)
    first.train()
    again = make_trainer("whole", **halves)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == first.state.global_step
    found, expected = final_weights(again), final_weights(first)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    longer = make_trainer("whole", **{**halves, "num_train_epochs": 2.5})
    longer.train(resume_from_checkpoint=True)
    assert longer.state.global_step > first.state.global_step


def test_resumed_energy_training_draws_the_same_noise(make_energy_trainer):  # noqa: F811
    operators = {"decoder_input_operator": "GX", "target_operator": "SG", "average_best": 0}
    strategies = {
        f"{what}_{setting}": value
        for what in ("save", "eval")
        for setting, value in (("strategy", "steps"), ("steps", 2))
    }
    options = {**operators, **strategies, "model": {"dropout": 0.1}, "max_steps": 5}
    full = make_energy_trainer("whole", **options)
    full.train()
    stopped = make_energy_trainer("stopped", **options)
    stopped.add_callback(KillAt(3))
    with pytest.raises(Killed):
        stopped.train()
    resumed = make_energy_trainer("stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 5
    found, expected = final_weights(resumed), final_weights(full)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_run_of_200_steps_resumes_after_sigkill(tmp_path):
    """With `accelerate launch`: killed by SIGKILL, restarted, and compared bit by bit."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--cpu", "scripts/train.py"]
    command += ["--train_data", PAIRS_FILE, "--validation_data", PAIRS_FILE]
    command += ["--source", "en", "--target", "de", "--validation_limit", "20"]
    command += ["--vocab_size", "600", "--preset", "tiny", "--objective", "ctc+glat", "--cache_dir", tmp_path / "cache"]
    command += ["--config", "length=ctc", "refinement=implicit", "encoder_layers=1", "d_model=32", "max_nfe=6"]
    command += ["--max_tokens", "256", "--learning_rate", "1e-3", "--warmup_steps", "50", "--max_steps", "200"]
    command += ["--eval_strategy", "steps", "--eval_steps", "100", "--save_steps", "50", "--disable_tqdm", "true"]
    command = [str(part) for part in command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    folder = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))

    def start(name):
        log = open(tmp_path / f"{name}.log", "ab")  # noqa: SIM115  (the process holds it)
        return subprocess.Popen(
            [*command, "--output_dir", str(tmp_path / name)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    full = start("whole")
    killed = start("killed")
    deadline = time.monotonic() + 300
    while not (tmp_path / "killed" / "checkpoint-100").is_dir():
        assert killed.poll() is None, (tmp_path / "killed.log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not (tmp_path / "killed" / "model.safetensors").exists()
    again = start("killed")
    assert again.wait(300) == 0, (tmp_path / "killed.log").read_text()
    assert full.wait(300) == 0, (tmp_path / "whole.log").read_text()
    assert "Resuming from" in (tmp_path / "killed.log").read_text()
    for file in ("checkpoint-200/model.safetensors", "model.safetensors"):
        first, second = (load_file(tmp_path / name / file) for name in ("whole", "killed"))
        assert all(torch.equal(first[name], second[name]) for name in first)
    history = json.loads((tmp_path / "whole" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["nat"] for entry in history if "nat" in entry]
    assert losses[-1] < losses[0]

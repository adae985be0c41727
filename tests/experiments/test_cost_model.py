"""The cost model agrees with what torch counts."""

import cost_model
import pytest
import torch
from cost_model import Sentence, Training
from torch.utils.flop_counter import FlopCounterMode

from hf_deqnar import DeqNarConfig
from hf_deqnar.benchmarks.common import untrained_model
from hf_deqnar.objectives.objective import parse_objective
from hf_deqnar.objectives.states import SupervisedStates

VOCABULARY, ROWS, TARGET = 600, 2, 10
SELF_CONDITIONED = {"refinement": "implicit", "feedback": "learned", "self_conditioning": "expected"}
# Configuration, objective, training. Tolerances that no solve reaches make the number of evaluations known.
UPDATES = {
    "stacked": ({"refinement": "stacked"}, {}, Training()),
    "one layer": ({"refinement": "stacked", "decoder_layers": 1}, {}, Training()),
    "glancing": ({"refinement": "stacked"}, {"objective": "ctc+glat"}, Training(first_prediction=True)),
    "implicit": ({"refinement": "implicit", "max_nfe": 2, "tol": 1e-30}, {}, Training(evaluations=2)),
    "supervised states": (
        {**SELF_CONDITIONED, "transition_layers": 1},
        {"states": SupervisedStates((0.3, 0.3, 0.4)), "equilibrium": 0.0},
        Training(states=3),
    ),
}


def make(fields: dict, length: str = "ctc") -> torch.nn.Module:
    config = DeqNarConfig.preset("tiny", vocab_size=VOCABULARY, length=length, **fields)
    torch.manual_seed(0)
    model = untrained_model(config)
    model.set_attn_implementation("eager")
    for name, weight in model.named_parameters():
        if "feedback" in name:  # zero at first, then torch skips part of the backward pass
            torch.nn.init.normal_(weight, std=0.05)
    return model


def batch(source: int) -> dict[str, torch.Tensor]:
    sizes = {"input_ids": (ROWS, source), "labels": (ROWS, TARGET)}
    return {name: torch.randint(6, VOCABULARY, size) for name, size in sizes.items()}


@pytest.mark.parametrize("source", [12, 40])
@pytest.mark.parametrize("name", UPDATES)
def test_operations_and_memory_of_an_update(name, source):
    fields, options, training = UPDATES[name]
    model = make(fields).train()
    objective = parse_objective(
        options.get("objective", "ctc"), **{k: v for k, v in options.items() if k != "objective"}
    )
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with FlopCounterMode(display=False) as counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        loss = objective(model, batch(source))["loss"]
        loss.backward()
    sentence = Sentence(source, 2 * source)
    expected = ROWS * cost_model.update_cost(model.config, sentence, training).total
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)
    memory = ROWS * cost_model.activation_bytes(model.config, sentence, training.states)
    memory += cost_model.vocabulary_bytes(model.config, training)
    assert sum(kept.values()) == pytest.approx(memory, rel=0.2)


@pytest.mark.parametrize("evaluations", [1, 3])
@pytest.mark.parametrize("fields", [{"refinement": "implicit"}, SELF_CONDITIONED], ids=["implicit", "self-conditioned"])
def test_operations_of_a_translation(fields, evaluations):
    model = make(fields).eval()
    source = batch(15)["input_ids"]
    with FlopCounterMode(display=False) as counter:
        model.generate(input_ids=source, max_nfe=evaluations, tol=1e-30, solver="picard")
    expected = ROWS * cost_model.translation_cost(model.config, Sentence(15, 30), evaluations).total
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("fields", [{"refinement": "stacked"}, SELF_CONDITIONED], ids=["stacked", "self-conditioned"])
def test_parameters(fields):
    model = make(fields)
    counted = sum(weight.numel() for weight in model.parameters())
    assert cost_model.parameters(model.config) == pytest.approx(counted, rel=0.02)  # without biases and norms


def test_the_table_has_a_row_for_every_model(capsys):
    assert cost_model.main(["--preset", "small", "--layers", "2", "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("\n") == 5
    assert "self-conditioned, 3 states" in printed
    assert " 0 " in printed, "one process sends nothing"

"""No device is assumed: training and translation on an emulated accelerator give what they give on the CPU."""

import pytest
import torch

from hf_deqnar.objectives.objective import parse_objective
from hf_deqnar.objectives.states import SupervisedStates

from ...conftest import padded, random_sentences, self_conditioned_model, small_model
from ...emulated_device import DeviceTensor, emulated_device, host, move

TRANSLATIONS = [
    ({"length": "ctc", "refinement": "implicit"}, {"solver": "anderson"}),
    ({"length": "ctc", "refinement": "implicit"}, {"solver": "broyden"}),
    ({"length": "ctc", "refinement": "implicit"}, {"solver": "picard", "ctc_beam_size": 3, "num_return_sequences": 2}),
    ({"length": "ctc", "refinement": "stacked"}, {"refinement_passes": 2}),
    # Few evaluations: rows that do not converge amplify differences in rounding.
    (
        {"length": "predict", "refinement": "mixed"},
        {"length_beams": 2, "refinement_passes": 3, "deduplicate": True, "max_nfe": 6},
    ),
    ({"length": "predict", "refinement": "explicit"}, {"stop_on_stable_tokens": 2}),
    ({"length": "dag"}, {"dag_search": "lookahead"}),
    ({"length": "dag"}, {"dag_search": "viterbi"}),
    ({"length": "dag"}, {"dag_beam_size": 3}),
]
OBJECTIVES = [
    ({"length": "ctc"}, "ctc+glat", {}),
    ({"length": "ctc", "gradient": "ift"}, "ctc", {"correction": 0.5, "initial": 0.1, "random_nfe": True}),
    ({"length": "ctc", "weight_norm": "spectral"}, "ctc", {"jacobian": 0.1, "noisy_start": 0.5, "overlap": 0.3}),
    ({"length": "predict"}, "cmlm", {"label_smoothing": 0.1}),
    ({"length": "predict", "latent": "vae"}, "axe+glat", {}),
    ({"length": "predict"}, "oaxe", {}),
    ({"length": "dag"}, "dag+glat", {}),
    ({"length": "dag"}, "dag", {"overlap": 0.5}),
]


def names(case: tuple) -> str:
    return "-".join(str(value) for part in case for value in (part.values() if isinstance(part, dict) else [part]))


def sources() -> torch.Tensor:
    return padded(random_sentences(4))


def targets() -> torch.Tensor:
    return padded(random_sentences(4, shortest=2, longest=4, seed=1), padding=-100)


@pytest.mark.parametrize("case", TRANSLATIONS, ids=names)
def test_translations_are_those_of_the_cpu(case):
    fields, options = case
    model, batch = small_model(**fields), sources()
    options = {**options, "return_dict_in_generate": True}
    expected = model.generate(input_ids=batch, **options)
    with emulated_device():
        move(model)
        found = model.generate(input_ids=DeviceTensor(batch), **options)
    assert torch.equal(host(found.sequences), expected.sequences)
    assert torch.equal(host(found.nfe), expected.nfe)
    torch.testing.assert_close(host(found.sequences_scores), expected.sequences_scores)


def gradients(model: torch.nn.Module, batch: dict[str, torch.Tensor], objective) -> tuple[float, dict]:
    torch.manual_seed(0)
    loss = objective(model, batch)["loss"]
    loss.backward()
    found = {name: host(weight.grad) for name, weight in model.named_parameters() if weight.grad is not None}
    return host(loss.detach()).item(), found


def compare_training(model: torch.nn.Module, objective) -> None:
    batch = {"input_ids": sources(), "labels": targets()}
    loss, expected = gradients(model, batch, objective)
    model.zero_grad(set_to_none=True)
    with emulated_device():
        move(model)
        on_device = {name: DeviceTensor(value) for name, value in batch.items()}
        found, on_weights = gradients(model, on_device, objective)
    assert found == pytest.approx(loss, rel=1e-10)
    assert on_weights.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(on_weights[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("case", OBJECTIVES, ids=names)
def test_gradients_are_those_of_the_cpu(case):
    fields, name, options = case
    compare_training(small_model(**{"refinement": "implicit", **fields}), parse_objective(name, **options))


@pytest.mark.parametrize("length", ["ctc", "dag"])
def test_gradients_at_supervised_states_are_those_of_the_cpu(length):
    states = SupervisedStates(damage_share=0.2)
    model = self_conditioned_model(length=length)
    compare_training(model, parse_objective(length, states=states, equilibrium=0.5))


def test_a_solve_reads_a_few_values_an_evaluation():
    """Which rows stop is decided on the host: an accelerator waits for it in every evaluation."""
    model, batch = small_model(length="ctc", refinement="implicit"), sources()
    with emulated_device() as reads:
        move(model)
        source = model.prepare(DeviceTensor(batch))
        canvas = model.lay_out(source)
        before = reads.total()
        found = model.solve(source, canvas, max_nfe=10, tol=1e-12)
        assert reads.total() - before <= 7 * 10 + 2
    assert host(found.nfe).tolist() == [10] * len(batch)


@pytest.mark.parametrize("self_conditioning", ["none", "expected"])
@pytest.mark.parametrize("solver", ["picard", "anderson", "broyden"])
def test_with_a_check_interval_a_solve_reads_one_value_in_that_many_evaluations(solver, self_conditioning):
    fields = {"length": "ctc", "refinement": "implicit", "solver": solver, "self_conditioning": self_conditioning}
    model = (small_model if self_conditioning == "none" else self_conditioned_model)(**fields)
    batch = sources()
    options = {"max_nfe": 8, "tol": 1e-12, "return_dict_in_generate": True}
    expected = model.generate(input_ids=batch, **options)
    model.config.check_interval = 4
    with emulated_device() as reads:
        move(model)
        source = model.prepare(DeviceTensor(batch))
        canvas = model.lay_out(source)
        before = reads.total()
        model.solve(source, canvas, max_nfe=8, tol=1e-12)
        assert reads.total() - before <= 8 // 4 + 4  # and four of the mask
        found = model.generate(input_ids=DeviceTensor(batch), **options)
    assert torch.equal(host(found.sequences), expected.sequences)
    assert torch.equal(host(found.nfe), expected.nfe)

"""Muon: updates of matrices and of other parameters, and the selection of parameters."""

import pytest
import torch
from torch import nn

from hf_deqnar.models.lstm_seq2seq.modeling_lstm_seq2seq import RecurrentConfig, RecurrentForConditionalGeneration
from hf_deqnar.training.muon import COEFFICIENTS, ITERATIONS, Muon, make_muon, matrices_of_layers, orthogonalise

from ..conftest import REFINEMENTS, small_model
from ..teachers import small_teacher

SHAPES = [(8, 8), (24, 8), (8, 40)]


def as_it_is_written(matrix: torch.Tensor) -> torch.Tensor:
    """The plain Newton-Schulz iteration on one matrix."""
    a, b, c = COEFFICIENTS
    state = matrix / (matrix @ matrix.T).norm().sqrt()
    for _ in range(ITERATIONS):
        gram = state @ state.T
        state = a * state + b * gram @ state + c * gram @ gram @ state
    return state


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalise_agrees_with_the_plain_iteration(shape):
    matrices = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for matrix, found in zip(matrices, orthogonalise(matrices), strict=True):
        torch.testing.assert_close(found, as_it_is_written(matrix), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_orthogonalise_approximates_the_nearest_orthogonal_matrix(shape):
    matrix = torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalise(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.65
    assert values.max() < 1.25
    assert nn.functional.cosine_similarity(found.flatten(), (left @ right).flatten(), dim=0) > 0.97


def stepped(weights: list[torch.Tensor], gradients: list[list[torch.Tensor]], optimizer) -> None:
    for several in gradients:
        for weight, gradient in zip(weights, several, strict=True):
            weight.grad = gradient.clone()
        optimizer.step()


def random_gradients(weights: list[torch.Tensor], steps: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(weight.shape, generator=generator) for weight in weights] for _ in range(steps)]


@pytest.mark.parametrize("shape", SHAPES)
def test_update_agrees_with_torch_optim_muon(shape):
    actual, expected = (nn.Parameter(torch.ones(shape)) for _ in range(2))
    gradients = random_gradients([actual], steps=5)
    options = {"lr": 0.01, "weight_decay": 0.1}
    stepped([actual], gradients, Muon([{"params": [actual], "parts": 1}], **options))
    stepped([expected], gradients, torch.optim.Muon([expected], **options, adjust_lr_fn="match_rms_adamw"))
    result, other = (actual - 1).detach().flatten(), (expected - 1).detach().flatten()
    assert nn.functional.cosine_similarity(result, other, dim=0) > 0.98  # torch iterates once more, in bfloat16
    assert 0.85 < result.norm() / other.norm() < 1.15


def test_stacked_matrices_are_updated_separately():
    full = nn.Parameter(torch.ones(24, 8))
    parts = [nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    gradients = random_gradients([full], steps=3)
    stepped([full], gradients, Muon([{"params": [full], "parts": 3}], lr=0.01))
    apart = [list(several[0].chunk(3)) for several in gradients]
    stepped(parts, apart, Muon([{"params": parts, "parts": 1}], lr=0.01))
    torch.testing.assert_close(full.detach(), torch.cat(parts).detach())


def test_other_parameters_are_updated_by_adamw():
    actual, expected = (nn.Parameter(torch.ones(6, 5)) for _ in range(2))
    matrix = nn.Parameter(torch.ones(4, 4))
    gradients = random_gradients([actual, matrix], steps=4)
    options = {"lr": 0.01, "betas": (0.9, 0.98), "weight_decay": 0.1}
    optimizer = Muon([{"params": [matrix], "parts": 1}, {"params": [actual]}], **options)
    stepped([actual, matrix], gradients, optimizer)
    stepped([expected], [several[:1] for several in gradients], torch.optim.AdamW([expected], **options))
    assert torch.equal(actual, expected)
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("length", ["ctc", "predict"])
def test_muon_updates_exactly_the_matrices_of_layers(refinement, length):
    feedback = "sum" if refinement == "stacked" else "learned"
    model = small_model(refinement=refinement, length=length, latent="vae", feedback=feedback)
    found = matrices_of_layers(model)
    homes = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    heads = ("lm_head", "prior", "posterior", "lift", "classifier")
    expected = {f"{name}.weight" for name in homes if not name.endswith(heads)}
    assert set(found) == expected
    assert {name.split(".")[-2] for name, parts in found.items() if parts == 3} == {"query_key_value"}
    assert {name.split(".")[-2] for name, parts in found.items() if parts == 2} == {"key_value"}


def test_muon_updates_all_matrices_of_a_teacher_but_embeddings():
    model = small_teacher("marian")
    left = {name for name, weight in model.named_parameters() if weight.ndim == 2} - set(matrices_of_layers(model))
    positions = {f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder")}
    assert left == {"model.shared.weight", *positions}
    assert set(matrices_of_layers(model).values()) == {1}


def test_closure_is_called_and_momentum_is_saved():
    weights = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))]
    optimizer = Muon([{"params": weights[:1], "parts": 1}, {"params": weights[1:]}], momentum=0.8, lr=0.01)

    def closure():
        optimizer.zero_grad()
        loss = sum(weight.sum() for weight in weights)
        loss.backward()
        return loss

    assert optimizer.step(closure) == 20
    assert optimizer.step(closure) < 20
    assert all((weight.grad == 1).all() for weight in weights)
    assert optimizer.state_dict()["param_groups"][0]["momentum"] == 0.8


def test_every_weight_is_in_one_group_and_only_matrices_decay():
    model = small_model(length="predict", weight_norm="weight")
    names = matrices_of_layers(model)
    assert not any("parametrizations" in name for name in names)
    optimizer = make_muon(model, ["model.shared.weight"], lr=1e-3, weight_decay=0.1)
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    assert len({id(weight) for weight in weights}) == len(weights) == len(list(model.parameters()))
    known = dict(model.named_parameters())
    decayed = {id(weight) for group in optimizer.param_groups if group["weight_decay"] for weight in group["params"]}
    assert decayed == {id(known[name]) for name in [*names, "model.shared.weight"]}


def test_muon_refuses_model_without_matrices():
    with pytest.raises(ValueError, match="but RecurrentForConditionalGeneration has none; leave it unset"):
        make_muon(RecurrentForConditionalGeneration(RecurrentConfig(vocab_size=50)), [], lr=1e-3, weight_decay=0.0)


def test_training_with_muon_lowers_the_loss(make_trainer):
    trainer = make_trainer(optimizer="muon", max_steps=30, learning_rate=3e-3)
    before = trainer.evaluate()
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, Muon)
    assert trainer.evaluate()["eval_nat"] < 0.8 * before["eval_nat"]

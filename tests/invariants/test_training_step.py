"""Gradients of a training step: the optimiser receives the gradient of the iterated model.

The loss is a complete objective: a first solve selects revealed tokens; a second one is supervised at its end, at a
random state of its trajectory and at its first evaluation. Only the first of these three terms depends on the
equilibrium, and it must not affect the others.
"""

import pytest
import torch

from hf_deqnar.objectives.objective import parse_objective

from ..conftest import PAD, padded, random_sentences, small_model

# Enough evaluations to converge, too few for a residual of zero, which would end a row early: all gradients then have
# the same trajectory, and draw the same state of it.
BUDGET = {"implicit": 50, "explicit": 25, "mixed": 80}
IFT = {"gradient": "ift", "gradient_tol": 1e-12, "gradient_max_nfe": 100}
OBJECTIVES = pytest.mark.parametrize("name", ["glat", "ctc+glat"])


def training_step(
    name: str, refinement: str = "implicit", dropout: float = 0.0, **fields
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The terms of one step and the gradient of every parameter; equal except for the gradient option in `fields`."""
    length = "ctc" if name.startswith("ctc") else "predict"
    fields |= {"refinement": refinement, "dropout": dropout, "length": length}
    model = small_model(solver="picard", tol=1e-30, max_nfe=BUDGET[refinement], **fields).train()
    if refinement == "mixed":  # a random fusion cycles between tokens; a small one converges
        model.model.transition.fusion[2].weight.data *= 0.001
    tokens = padded(random_sentences(4, shortest=4))
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)}
    objective = parse_objective(name, correction=0.5, initial=0.3)
    torch.manual_seed(1)
    terms = objective(model, batch, progress=0.5, generator=torch.Generator().manual_seed(2))
    terms["loss"].backward()
    terms = {name: term.detach() for name, term in terms.items()}
    return terms, {name: parameter.grad for name, parameter in model.named_parameters()}


def distance(actual: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Distance of two gradients, relative to the exact one."""
    difference = torch.cat([(actual[name] - exact[name]).flatten() for name in exact])
    return float(difference.norm() / torch.cat([gradient.flatten() for gradient in exact.values()]).norm())


@OBJECTIVES
@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_step_with_ift_equals_that_of_the_unrolled_iteration(name, refinement, dropout):
    budget = BUDGET[refinement]
    unrolled_terms, exact = training_step(name, refinement, dropout, gradient="unrolled", gradient_steps=budget)
    terms, actual = training_step(name, refinement, dropout, **IFT)
    assert terms["nfe"] == unrolled_terms["nfe"] == budget
    assert terms["residual"] < 1e-8
    for term, value in unrolled_terms.items():
        torch.testing.assert_close(terms[term], value, rtol=1e-9, atol=1e-10, msg=term)
    for parameter, gradient in exact.items():
        atol = 1e-6 * float(gradient.abs().max())
        torch.testing.assert_close(actual[parameter], gradient, rtol=1e-5, atol=atol, msg=parameter)


@OBJECTIVES
def test_training_step_with_phantom_converges_to_the_exact_one(name):
    _, exact = training_step(name, **IFT)
    errors = []
    for steps in (1, 4, 16, 64):
        _, actual = training_step(name, gradient="phantom", gradient_steps=steps)
        errors.append(distance(actual, exact))
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.1
    assert errors[-1] < 1e-4


@OBJECTIVES
def test_training_step_with_one_step_differs_from_the_exact_one(name):
    """Otherwise the tests above would hold for any gradient."""
    _, exact = training_step(name, **IFT)
    _, actual = training_step(name, gradient="one_step")
    assert distance(actual, exact) > 0.1

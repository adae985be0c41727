import pytest
import torch
from torch.nn import functional

from hf_deqnar.models.deqnar.losses_deqnar import OwnWords, Targets, predict_state
from hf_deqnar.objectives.objective import parse_objective
from hf_deqnar.objectives.states import SupervisedStates, damage, proxy_prediction, supervise_states

from ..conftest import padded, random_sentences, self_conditioned_model

MODELS = [
    {"length": length, "refinement": refinement, "self_conditioning": kind}
    for length in ("ctc", "predict")
    for refinement in ("implicit", "mixed")
    for kind in ("expected", "argmax")
]


def problem(**fields):
    """A model, f of a batch, and its targets."""
    model = self_conditioned_model(**fields)
    sources = random_sentences(4, shortest=5, longest=9)
    source = model.prepare(padded(sources))
    labels = padded(random_sentences(4, shortest=2, longest=6, seed=1), padding=-100)
    canvas = model.lay_out(source, labels)
    return model, model.model.bind(source, canvas), Targets(labels, canvas.mask)


@pytest.mark.parametrize("segment_nfe", [1, 2])
@pytest.mark.parametrize("fields", MODELS, ids=lambda fields: "-".join(fields.values()))
def test_without_truth_the_states_are_those_of_plain_iteration(fields, segment_nfe):
    model, function, targets = problem(**fields)
    states = SupervisedStates((0.2, 0.3, 0.5), segment_nfe, truth_share=(0.0, 0.0))
    losses = supervise_states(model, function, targets, states)
    assert [loss.weight for loss in losses] == [0.2, 0.3, 0.5]
    state = torch.zeros_like(function.context.injection)
    for loss in losses:
        for _ in range(segment_nfe):
            state = function(state)
        total, count = model.length_model.loss(model, state, targets)
        torch.testing.assert_close(loss.total, total)
        assert loss.count == count
    assert len({round(loss.total.item(), 6) for loss in losses}) == 3, "iterating changes the loss"


def test_gradients_stay_within_a_segment():
    model, function, targets = problem(length="ctc")
    feedback = model.model.transition.feedback.weight
    first, second, _ = supervise_states(model, function, targets, SupervisedStates())
    assert not first.total.requires_grad or torch.autograd.grad(first.total, feedback, allow_unused=True)[0].norm() == 0
    (gradient,) = torch.autograd.grad(second.total, feedback, retain_graph=True)
    state = function.features(torch.zeros_like(function.context.injection)).detach()
    plain, *_ = supervise_states(model, function, targets, SupervisedStates((1.0,), segment_nfe=2))
    (through,) = torch.autograd.grad(plain.total, feedback)
    assert gradient.norm() > 0
    assert state.norm() > 0
    assert (gradient - through).norm() > 1e-3 * through.norm(), "two evaluations in a segment have the full gradient"


def test_without_detaching_the_gradient_is_that_of_the_unrolled_path():
    model, function, targets = problem(length="ctc")
    transition = model.model.transition
    for layer in transition.self_conditioning.feedback:
        layer.weight.data.zero_()  # predictions have no gradient, but finite differences would see their change
    weight = transition.layers[0].self_attention.output.weight

    def loss(detach: bool) -> torch.Tensor:
        states = supervise_states(model, function, targets, SupervisedStates((0.3, 0.7), detach=detach))
        return sum(state.weight * state.total for state in states)

    (found,) = torch.autograd.grad(loss(detach=False), weight)
    (detached,) = torch.autograd.grad(loss(detach=True), weight)
    direction = found / found.norm()

    @torch.no_grad()
    def changed(step: float) -> float:
        weight.add_(direction, alpha=step)
        value = loss(detach=False).item()
        weight.sub_(direction, alpha=step)
        return value

    slope = (changed(1e-5) - changed(-1e-5)) / 2e-5
    assert slope == pytest.approx(found.norm().item(), rel=1e-5)
    assert (detached - found).norm() > 1e-3 * found.norm()


@pytest.mark.parametrize("fields", MODELS[::2], ids=lambda fields: "-".join(fields.values()))
def test_truth_is_shown_at_wrong_positions_only(fields):
    model, function, targets = problem(**fields)
    features = function.features(torch.zeros_like(function.context.injection)).detach()
    *_, prediction = model.length_model.loss_and_prediction(model, features, targets)
    own = OwnWords.of(targets.labels, model.config.blank_token_id)
    lengths = (targets.labels >= 0).sum(dim=1)
    aligned = model.length_model.align(prediction.scores, own.labels, targets.canvas_mask.sum(dim=1), lengths)
    truth = own.tokens(aligned.clamp_min(0))
    wrong = (prediction.scores.tokens != truth) & targets.canvas_mask
    assert wrong.sum() > 2
    weight, scale = model.model.shared.weight, model.model.embedding_scale
    plain = proxy_prediction(model, prediction, targets, SupervisedStates(truth_share=(0.0, 0.0)))
    torch.testing.assert_close(plain, prediction.expected * scale)
    shown = proxy_prediction(model, prediction, targets, SupervisedStates(truth_share=(1.0, 1.0)))
    torch.testing.assert_close(shown[wrong], functional.embedding(truth[wrong], weight) * scale)
    torch.testing.assert_close(shown[~wrong], plain[~wrong])
    some = proxy_prediction(model, prediction, targets, SupervisedStates(truth_share=(0.4, 0.6)))
    changed = (some != plain).any(dim=-1)
    assert not (changed & ~wrong).any()
    assert 0 < changed.sum() < wrong.sum()


def test_damage_shows_other_tokens_blanks_and_repetitions():
    model, function, targets = problem(length="ctc")
    features = function.features(torch.zeros_like(function.context.injection)).detach()
    *_, prediction = model.length_model.loss_and_prediction(model, features, targets)
    plain = proxy_prediction(model, prediction, targets, SupervisedStates(truth_share=(0.0, 0.0)))
    damaged = proxy_prediction(model, prediction, targets, SupervisedStates(truth_share=(0.0, 0.0), damage_share=0.5))
    changed = (damaged != plain).any(dim=-1)
    assert not (changed & ~targets.canvas_mask).any()
    assert 0.2 < changed.sum() / targets.canvas_mask.sum() < 0.8
    tokens = torch.arange(10, 40).reshape(3, 10)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    kinds = [damage(tokens, torch.full(tokens.shape, draw), mask, blank=5) for draw in (0.1, 0.5, 0.9)]
    assert set(kinds[0].flatten().tolist()) <= set(tokens.flatten().tolist())
    assert (kinds[1] == 5).all()
    assert torch.equal(kinds[2][:, 1:], tokens[:, :-1])


def test_the_number_of_segments_is_drawn_and_the_weights_add_up():
    states = SupervisedStates((0.2, 0.3, 0.5), random_segments=True)
    generator = torch.Generator().manual_seed(0)
    drawn = [states.draw_weights(generator) for _ in range(60)]
    assert {len(weights) for weights in drawn} == {1, 2, 3}
    assert all(sum(weights) == pytest.approx(1.0) for weights in drawn)
    assert (1.0,) in drawn


def test_an_objective_may_add_the_loss_at_the_equilibrium():
    model = self_conditioned_model(length="ctc")
    batch = {
        "input_ids": padded(random_sentences(3, shortest=5)),
        "labels": padded(random_sentences(3, shortest=2, longest=4, seed=1), padding=-100),
    }
    path = parse_objective("ctc", states=SupervisedStates(), equilibrium=0.0)(model, batch)
    assert set(path) == {"loss", "state_1", "state_2", "state_3"}
    torch.testing.assert_close(path["loss"], 0.2 * path["state_1"] + 0.4 * path["state_2"] + 0.4 * path["state_3"])
    both = parse_objective("ctc", states=SupervisedStates(truth_share=(0.0, 0.0)), equilibrium=0.5)(model, batch)
    alone = parse_objective("ctc")(model, batch)
    torch.testing.assert_close(both["nat"], alone["nat"])
    assert {"nfe", "residual", "converged"} <= set(both)


@pytest.mark.parametrize("length", ["ctc", "predict"])
def test_the_prediction_that_comes_with_a_loss_is_that_of_the_features(length):
    model, function, targets = problem(length=length)
    features = function.features(torch.zeros_like(function.context.injection))
    total, count, prediction = model.length_model.loss_and_prediction(model, features, targets)
    expected_total, expected_count = model.length_model.loss(model, features, targets)
    own = OwnWords.of(targets.labels, model.config.blank_token_id)
    expected = predict_state(features, targets.canvas_mask, model.lm_head.weight, own.words)
    assert torch.equal(prediction.scores.tokens, expected.scores.tokens)
    torch.testing.assert_close(prediction.expected, expected.expected)
    mask = targets.canvas_mask
    torch.testing.assert_close(prediction.scores.log_probs[mask], expected.scores.log_probs[mask])
    assert count == expected_count
    weights = [model.lm_head.weight, model.model.transition.layers[0].feed_forward.contract.weight]
    for found, plain in zip(
        torch.autograd.grad(total, weights, retain_graph=True),
        torch.autograd.grad(expected_total, weights),
        strict=True,
    ):
        torch.testing.assert_close(found, plain)


def test_a_loss_that_is_not_finite_names_its_state():
    model, function, targets = problem(length="ctc")
    model.model.transition.self_conditioning.feedback[0].weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="The loss at state 2 of 3, after 2 evaluations, is not finite"):
        supervise_states(model, function, targets, SupervisedStates())

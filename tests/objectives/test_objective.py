"""Objectives: losses, terms and errors of impossible combinations."""

import math

import pytest
import torch
from torch.nn import functional

from hf_deqnar.objectives.inputs import INPUTS
from hf_deqnar.objectives.objective import check_objective, parse_objective
from hf_deqnar.objectives.targets import TARGETS, choose_candidates

from ..conftest import PAD, REFINEMENTS, padded, random_sentences, small_model

MASK, BLANK = 4, 5
FOR_PREDICTED_LENGTHS = [*INPUTS, "ce", "raw", "distilled", "axe", "oaxe", "axe+glat", "oaxe+cmlm", "ce+glat"]
FOR_CTC = ["ctc", "ctc+glat", "ctc+cmlm", "distilled+ctc+glat_levenshtein", "glat_reference+ctc", "ctc+glat_difficulty"]


def batch(count: int = 4) -> dict[str, torch.Tensor]:
    tokens = padded(random_sentences(count, shortest=4))
    return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)}


@pytest.mark.parametrize("refinement", REFINEMENTS)
@pytest.mark.parametrize("name", FOR_PREDICTED_LENGTHS + FOR_CTC)
def test_every_objective_decreases_its_loss(name, refinement):
    length = "ctc" if "ctc" in name.split("+") else "predict"
    model = small_model(refinement=refinement, length=length, dropout=0.0).train()
    objective = parse_objective(name)
    check_objective(objective, model.config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for step in range(12):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(0)
        terms = objective(model, batch(), progress=step / 12, generator=generator)
        terms["loss"].backward()
        optimizer.step()
        losses.append(terms["nat"].item())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_default_objective_is_the_loss_of_forward():
    for length, name in (("predict", "ce"), ("ctc", "ctc")):
        model = small_model(length=length, latent="vae")
        with torch.no_grad():
            torch.testing.assert_close(parse_objective(name)(model, batch())["loss"], model(**batch()).loss)


def test_revealed_tokens_are_on_the_canvas_and_not_in_the_loss(monkeypatch):
    model, bound = small_model(), {}
    original = model.model.bind
    monkeypatch.setattr(
        model.model, "bind", lambda source, canvas: bound.update(canvas=canvas.tokens) or original(source, canvas)
    )
    data = batch()
    with torch.no_grad():
        terms = parse_objective("cmlm")(model, data, generator=torch.Generator().manual_seed(3))
        canvas = bound["canvas"]
        labels, masked = data["labels"], canvas == MASK
        assert torch.equal(canvas[~masked & (labels >= 0)], labels[~masked & (labels >= 0)])
        assert 0 < masked.sum() < (labels >= 0).sum()
        logits = model(input_ids=data["input_ids"], decoder_input_ids=canvas).logits
        expected = functional.cross_entropy(logits[masked], labels[masked])
    torch.testing.assert_close(terms["nat"], expected.to(terms["nat"].dtype), rtol=1e-4, atol=1e-5)


def test_ctc_glancing_reveals_tokens_of_the_target_and_blanks(monkeypatch):
    model, canvases = small_model(length="ctc"), []
    original = model.model.bind
    monkeypatch.setattr(
        model.model, "bind", lambda source, canvas: canvases.append(canvas.tokens) or original(source, canvas)
    )
    data = batch()
    with torch.no_grad():
        parse_objective("ctc+glat")(model, data)
    first, second = canvases
    assert (first[first != PAD] == MASK).all()
    revealed = (second != MASK) & (second != PAD)
    assert revealed.any()
    for row in range(4):
        words = set(data["labels"][row].tolist()) | {BLANK}
        assert set(second[row][revealed[row]].tolist()) <= words


def test_label_smoothing_is_that_of_torch():
    model, data = small_model(), batch()
    with torch.no_grad():
        smoothed = parse_objective("ce", label_smoothing=0.1)(model, data)["nat"]
        logits = model(**data).logits
        expected = functional.cross_entropy(logits.flatten(0, 1), data["labels"].flatten(), label_smoothing=0.1)
    torch.testing.assert_close(smoothed, expected)
    with pytest.raises(ValueError, match="label_smoothing=0.1 has no meaning for CTC"):
        parse_objective("ctc", label_smoothing=0.1)(small_model(length="ctc"), data)


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_dynamics_terms_are_added_with_their_weights(refinement):
    model, data = small_model(refinement=refinement), batch()
    weights = {"correction": 0.5, "initial": 0.3, "jacobian": 0.2}
    torch.manual_seed(0)
    terms = parse_objective("glat", **weights)(model, data, generator=torch.Generator().manual_seed(1))
    total = terms["nat"] + model.config.length_loss_factor * terms["length"]
    total = total + sum(weight * terms[name] for name, weight in weights.items())
    torch.testing.assert_close(terms["loss"], total)
    for name in weights:
        assert terms[name] > 0
        model.zero_grad()
        terms[name].backward(retain_graph=True)
        assert model.model.transition.layers[0].feed_forward.expand.weight.grad.abs().sum() > 0
    assert 1 <= terms["nfe"] <= model.config.max_nfe
    assert 0 <= terms["converged"] <= 1


@pytest.mark.parametrize("refinement", ["implicit", "explicit", "mixed"])
def test_initial_term_is_the_distance_from_first_evaluation_to_equilibrium(refinement):
    """‖f(z) − f(0)‖₁, which is 0 after a single evaluation."""
    model, data = small_model(refinement=refinement, tol=1e-30), batch()
    objective = parse_objective("ce", initial=1.0)
    steps = {most: objective(model, data, max_nfe=most)["initial"].item() for most in (1, 2, 3, 20)}
    few = 2 if refinement == "explicit" else 1  # the last evaluation of an explicit model computes its features
    assert steps[1] == 0
    assert steps[few] == 0
    assert steps[few + 1] > 0
    assert steps[20] == pytest.approx(steps[3], rel=0.7)


def test_solves_from_noise_reach_the_same_equilibrium():
    model, data = small_model(tol=1e-10, max_nfe=200), batch()
    plain = parse_objective("ce")(model, data)
    noisy = parse_objective("ce", noisy_start=1.0)(model, data, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(noisy["nat"], plain["nat"], rtol=1e-6, atol=1e-6)
    once = {"max_nfe": 1, "generator": torch.Generator().manual_seed(0)}
    assert (
        parse_objective("ce", noisy_start=1.0)(model, data, **once)["nat"]
        != parse_objective("ce")(model, data, max_nfe=1)["nat"]
    )


def test_random_nfe_covers_all_budgets():
    model, generator = small_model(tol=1e-30, max_nfe=6), torch.Generator().manual_seed(0)
    objective = parse_objective("ce", random_nfe=True)
    with torch.no_grad():
        drawn = {int(objective(model, batch(), generator=generator)["nfe"]) for _ in range(40)}
    assert drawn == {1, 2, 3, 4, 5, 6}


def test_glance_nfe_limits_only_the_glancing_solve(monkeypatch):
    model, budgets = small_model(tol=1e-30, max_nfe=6), []
    solve = model.model.solve

    def record(*arguments, **options):
        found = solve(*arguments, **options)
        budgets.append(int(found.nfe.max()))
        return found

    monkeypatch.setattr(model.model, "solve", record)
    for glance, most, expected in ((None, None, [6, 6]), (2, None, [2, 6]), (2, 4, [2, 4]), (9, 4, [4, 4])):
        budgets.clear()
        parse_objective("glat", glance_nfe=glance)(model, batch(), max_nfe=most)
        assert budgets == expected


def test_order_agnostic_target_is_the_reference_at_first():
    log_probs = torch.randn(2, 3, 9).log_softmax(dim=-1)
    labels, lengths = torch.tensor([[6, 7, 8], [8, 7, 6]]), torch.tensor([3, 3])
    assert torch.equal(TARGETS["oaxe"](labels, lengths, log_probs, 0, 0.2), labels)
    later = TARGETS["oaxe"](labels, lengths, log_probs, 0, 0.9)
    assert torch.equal(later.sort(dim=1).values, labels.sort(dim=1).values)


def test_dynamic_kd_chooses_by_loss_and_distortion():
    torch.manual_seed(0)
    losses, similarity, gamma = torch.rand(20, 3) * 5, torch.rand(20, 3, 3), torch.tensor([0.7, 1.3, 2.3])
    chosen = choose_candidates(losses, similarity, gamma, beta=0.8)
    for row in range(20):
        scores = [
            float(losses[row, j]) - 0.8 * sum(float(gamma[i] * similarity[row, i, j]) for i in range(3))
            for j in range(3)
        ]
        assert int(chosen[row]) == scores.index(min(scores))
    assert len(set(chosen.tolist())) > 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ctc+glatt", "'glatt' is unknown. Choose among targets: raw"),
        ("glat+cmlm", "glat and cmlm are both inputs; give one"),
        ("axe+ctc", "ctc has its own alignment, so axe has no effect"),
    ],
)
def test_impossible_objective_is_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_objective(name)


def test_objective_must_fit_the_length_model():
    with pytest.raises(ValueError, match="'ctc.glat' needs config.length = 'ctc'.*use objective 'ce.glat', or train"):
        check_objective(parse_objective("ctc+glat"), small_model().config)
    wanted = "'glat' needs config.length = 'predict', but this model has 'ctc'; use objective 'glat.ctc'"
    with pytest.raises(ValueError, match=wanted):
        check_objective(parse_objective("glat"), small_model(length="ctc").config)


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_dynamic_kd_trains_on_the_chosen_candidate(length):
    """Compared with one forward pass per sentence and candidate."""
    model = small_model(length=length, length_loss_factor=0.0)
    torch.manual_seed(0)
    sentences = random_sentences(12, shortest=3, longest=6, seed=5)
    rows = padded(sentences, padding=-100)
    candidates = rows.reshape(4, 3, -1)
    data = {"input_ids": padded(random_sentences(4, shortest=4)), "candidates": candidates, "labels": candidates[:, 0]}
    data["similarity"] = torch.rand(4, 3, 3)
    name = "dynamic_kd+ctc" if length == "ctc" else "dynamic_kd+glat"
    gamma, beta = (1.0, 2.0, 3.0), 0.05
    objective = parse_objective(name, gamma=gamma, beta=beta)
    chosen, by_sum = [], []
    for row in range(4):
        scores, sums = [], []
        for j in range(3):
            words = candidates[row, j][candidates[row, j] >= 0][None]
            with torch.no_grad():
                loss = float(model(input_ids=data["input_ids"][row : row + 1], labels=words).loss)  # per token
            distortion = -beta * sum(gamma[i] * float(data["similarity"][row, i, j]) for i in range(3))
            scores.append(loss + distortion)
            sums.append(loss * words.shape[1] + distortion)
        chosen.append(scores.index(min(scores)))
        by_sum.append(sums.index(min(sums)))
    assert chosen != by_sum
    with torch.no_grad():
        labels = objective._choose_candidate(model, data, model.prepare(data["input_ids"]))
    assert [candidates[row, j].tolist() for row, j in enumerate(chosen)] == labels.tolist()
    objective(model, data)["loss"].backward()
    with pytest.raises(ValueError, match="3 candidates per sentence but gamma has 2"):
        parse_objective("dynamic_kd", gamma=(1.0, 1.0))(small_model(), data)

import math

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from hf_deqnar.evaluation.mple_report import measure_losses
from hf_deqnar.objectives.input_predictor import (
    check_vanilla,
    choose_final_proxy,
    ensure_input_head,
    fit_input_predictor,
    negative_log_probability,
)
from hf_deqnar.objectives.objective import parse_objective

from ..conftest import PAD, padded, random_sentences, small_model
from .test_objective import batch

MASK = 4


def batches(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    made = []
    for number in range(count):
        tokens = padded(random_sentences(8, shortest=4, seed=seed + number))
        made.append({"input_ids": tokens, "labels": tokens.masked_fill(tokens == PAD, -100)})
    return made


def test_new_input_predictor_is_uniform_and_changes_no_output():
    model, data = small_model(), batch()
    with torch.no_grad():
        before = model(**data).logits
        head = ensure_input_head(model)
        assert head is ensure_input_head(model)
        features = model(**data)
        assert torch.equal(features.logits, before)
        assert (head(features.last_hidden_state) == 0).all()
    assert model.config.input_predictor
    fresh = small_model(input_predictor=True)
    assert (fresh.model.input_head.weight == 0).all()
    assert (fresh.model.input_head.bias == 0).all()


@pytest.mark.parametrize(("name", "length"), [("glat", "predict"), ("ctc+glat", "ctc")])
def test_fitting_lowers_the_loss_on_unseen_sentences_and_changes_no_other_weight(name, length, tmp_path):
    model = small_model(torch.float32, length=length, latent="vae").train()
    objective, unseen = parse_objective(name), batches(2, seed=100)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    ensure_input_head(model)
    even = measure_losses(model, objective, unseen)
    fit = fit_input_predictor(model, objective, batches(6, seed=0), steps=30)
    assert model.training
    fitted = measure_losses(model, objective, unseen)
    assert fit.before == pytest.approx(math.log(2))
    assert fit.after < fit.before
    assert fitted.input < even.input - 0.03
    assert fitted.nat == pytest.approx(even.nat)
    for key, value in weights.items():
        assert torch.equal(value, model.state_dict()[key]), key

    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.model.input_head.weight, model.model.input_head.weight)
    assert measure_losses(loaded, objective, unseen).input == pytest.approx(fitted.input)


def test_fit_is_the_best_constant_for_uninformative_features():
    """With constant features only the bias is fitted: the log-odds of the masked share."""
    model, objective = small_model(), parse_objective("cmlm_fixed")
    torch.nn.init.zeros_(model.model.transition.layers[-1].norms[-1].weight)
    data = batches(3, seed=0)
    fit = fit_input_predictor(model, objective, data)
    lengths = torch.cat([(part["labels"] >= 0).sum(dim=1) for part in data])
    share = 1 - (lengths // 5).sum().item() / lengths.sum().item()
    assert model.model.input_head.bias.sigmoid().item() == pytest.approx(share, abs=1e-4)
    assert fit.after == pytest.approx(-share * math.log(share) - (1 - share) * math.log(1 - share), abs=1e-4)
    assert fit.positions == lengths.sum()


@pytest.mark.parametrize(("name", "length"), [("cmlm", "predict"), ("axe+glat", "predict"), ("ctc+glat", "ctc")])
@pytest.mark.parametrize("other", [False, True])
def test_negative_log_probability_is_a_sum_over_positions(name, length, other):
    """Compared with the definition in appendix E.6, with plain forward passes over one sentence at a time."""
    exact = {"length": length, "tol": 1e-10, "max_nfe": 60}
    model, data = small_model(**exact, input_predictor=True), batch()
    model.model.input_head.weight.data.normal_(std=0.5)
    model.model.input_head.bias.data.fill_(-0.3)
    vanilla = small_model(**exact, seed=7) if other else None
    with torch.no_grad():
        proxy = choose_final_proxy(model, parse_objective(name), data, torch.Generator().manual_seed(2))
        assert proxy.revealed.any()
        found = negative_log_probability(model, data, proxy, vanilla).item()
        expected = 0.0
        for row, length in enumerate(proxy.canvas.lengths.tolist()):
            source = data["input_ids"][row][data["input_ids"][row] != PAD][None]
            canvas = torch.full((1, length), MASK)
            outputs = model(input_ids=source, decoder_input_ids=canvas)
            tokens = (vanilla or model)(input_ids=source, decoder_input_ids=canvas).logits[0].softmax(dim=-1)
            is_masked = model.model.input_head(outputs.last_hidden_state)[0].sigmoid()
            for position, token in enumerate(proxy.canvas.tokens[row, :length].tolist()):
                if token == MASK:
                    chance = is_masked[position]
                else:
                    chance = (1 - is_masked[position]) * tokens[position, token]
                expected -= chance.log().item()
    assert found == pytest.approx(expected, rel=1e-7)


def test_fitting_without_revealed_tokens_or_sentences_is_refused():
    with pytest.raises(ValueError, match="'ce' reveals nothing, so there is no input to predict"):
        fit_input_predictor(small_model(), parse_objective("ce"), [batch()])
    with pytest.raises(ValueError, match="needs config.length = 'ctc'"):
        fit_input_predictor(small_model(), parse_objective("ctc+glat"), [batch()])
    with pytest.raises(ValueError, match="cannot be fitted without sentences"):
        fit_input_predictor(small_model(), parse_objective("glat"), [])
    with pytest.raises(ValueError, match="vanilla model has length=ctc but the model has predict"):
        check_vanilla(small_model().config, small_model(length="ctc").config)

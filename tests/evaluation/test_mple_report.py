import itertools
import math

import numpy
import pytest
import torch
from torch.nn import functional

from hf_deqnar.evaluation.mple_report import (
    conditional_total_correlation,
    input_log_probability,
    measure_losses,
    pearson,
    set_log_probability,
    target_loss,
)
from hf_deqnar.models.deqnar.ctc import collapse
from hf_deqnar.models.deqnar.refinement_deqnar import Canvas
from hf_deqnar.objectives.input_predictor import choose_final_proxy, negative_log_probability
from hf_deqnar.objectives.inputs import INPUTS, Prediction
from hf_deqnar.objectives.objective import Proxy, parse_objective

from ..conftest import PAD, VOCABULARY, padded, random_sentences, small_model
from ..models.deqnar.test_generation_deqnar import reranker
from ..objectives.test_objective import batch

MASK, BLANK = 4, 5
EXACT = {"tol": 1e-10, "max_nfe": 60}


def probability_of_set(weights: list[float], chosen: tuple[int, ...]) -> float:
    """By definition: over all orders in which the set can be drawn, the product of the probabilities of the draws."""
    total = 0.0
    for order in itertools.permutations(chosen):
        probability, left = 1.0, dict(enumerate(weights))
        for position in order:
            probability *= left[position] / sum(left.values())
            del left[position]
        total += probability
    return total


def set_mask(chosen: tuple[int, ...], size: int) -> torch.Tensor:
    return torch.tensor([[position in chosen for position in range(size)]])


@pytest.mark.parametrize(
    "weights",
    [
        [0.3, 0.9, 0.1, 0.5, 0.7],
        [1e-9, 1.0, 1e-4, 0.5, 1e-9],  # a confident model: some tokens have very low probability
        [1e-12, 1e-12, 1e-12, 1.0, 1.0],
        [1.0, 1.0, 1.0, 1.0, 1.0],
    ],
)
def test_probability_of_a_weighted_set_is_the_sum_over_all_orders(weights):
    mask, total = torch.ones(1, 5, dtype=torch.bool), {count: 0.0 for count in range(6)}
    for count in range(6):
        for chosen in itertools.combinations(range(5), count):
            row = torch.tensor([weights], dtype=torch.float64)
            found = set_log_probability(row, set_mask(chosen, 5), mask).item()
            assert found == pytest.approx(math.log(probability_of_set(weights, chosen)), abs=1e-9)
            total[count] += math.exp(found)
    assert list(total.values()) == pytest.approx([1.0] * 6)


@pytest.mark.parametrize(("length", "count"), [(30, 7), (120, 60), (200, 199)])
def test_equal_weights_give_all_sets_of_a_long_row_equal_probability(length, count):
    weights = torch.full((1, length + 3), 0.37)
    mask = torch.arange(length + 3)[None] < length
    revealed = torch.zeros_like(mask)
    revealed[:, torch.randperm(length)[:count]] = True
    found = set_log_probability(weights, revealed, mask).item()
    assert found == pytest.approx(-math.log(math.comb(length, count)), abs=1e-6)


@pytest.mark.parametrize("name", INPUTS)
def test_input_probability_equals_the_frequency_with_which_the_rule_draws_it(name):
    """Drawn 40,000 times: the share of every set of positions against exp(log Q)."""
    torch.manual_seed(0)
    rows, size = 40_000, 5
    target = torch.arange(6, 6 + size).expand(rows, size)
    mask = torch.ones(rows, size + 1, dtype=torch.bool)
    mask[:, -1] = False
    target = torch.cat([target, torch.full((rows, 1), PAD)], dim=1)
    chances = torch.tensor([[0.9, 0.05, 0.3, 0.6, 0.2, 0.0]]).expand(rows, -1)
    prediction = Prediction(torch.full_like(target, 40), chances)
    revealed = INPUTS[name](target, mask, prediction, 0.5, None)  # λ = 0.4: two of five errors
    drawn, counts = revealed.unique(dim=0, return_counts=True)
    assert len(drawn) == {"masked": 1, "cmlm": 2**size - 1, "cmlm_fixed": 5}.get(name, 10)
    few = slice(0, len(drawn))
    proxy = Proxy(None, target[few], Canvas(target[few], mask[few]), drawn, chances[few])
    found = input_log_probability(INPUTS[name], proxy).exp().tolist()
    assert sum(found) == pytest.approx(1.0)
    for expected, count in zip(found, counts.tolist(), strict=True):
        assert count / rows == pytest.approx(expected, abs=4 * math.sqrt(expected / rows) + 1e-9)


@pytest.mark.parametrize("name", ["masked", "cmlm", "axe", "oaxe+glat", "glat_difficulty"])
def test_losses_are_sums_over_unrevealed_tokens(name):
    """Against plain forward passes, in batches of one, with the same T and Z."""
    model, objective = small_model(**EXACT, input_predictor=True), parse_objective(name, label_smoothing=0.1)
    model.model.input_head.bias.data.fill_(0.7)
    data = [batch(3), batch(5)]
    found = measure_losses(model, objective, data, seed=4)
    generator = torch.Generator().manual_seed(4)
    nat = input_loss = tokens = 0
    targets = []
    with torch.no_grad():
        for part in data:
            proxy = choose_final_proxy(model, objective, part, generator)
            for row, length in enumerate((proxy.labels >= 0).sum(dim=1).tolist()):
                source = part["input_ids"][row][part["input_ids"][row] != PAD][None]
                canvas, labels = proxy.canvas.tokens[row : row + 1, :length], proxy.labels[row, :length]
                logits = model(input_ids=source, decoder_input_ids=canvas).logits[0]
                losses = functional.cross_entropy(logits, labels, reduction="none")
                nat += losses[canvas[0] == MASK].sum().item()
                tokens += length
                targets.append([token for token in labels.tolist() if token != BLANK])
            if objective.input is not INPUTS["masked"]:
                assert proxy.revealed.any()
                input_loss += negative_log_probability(model, part, proxy).item()
                input_loss += input_log_probability(objective.input, proxy).sum().item()
    assert found.nat == pytest.approx(nat / tokens, rel=1e-7)
    assert found.input == pytest.approx(input_loss / tokens, rel=1e-9)
    assert (found.input > 0) == (objective.input is not INPUTS["masked"])
    assert (found.tokens, found.dropped, found.targets) == (tokens, 0, targets)


def paths_of(labels: list[int], canvas: int) -> list[tuple[int, ...]]:
    symbols = sorted({*labels, BLANK})
    matching = []
    for path in itertools.product(symbols, repeat=canvas):
        text, count = collapse(torch.tensor([path]), torch.tensor([canvas]), BLANK, PAD)
        if text[0, : int(count)].tolist() == labels:
            matching.append(path)
    return matching


def test_ctc_loss_sums_over_paths_and_drops_targets_that_do_not_fit():
    model = small_model(**EXACT, length="ctc", input_predictor=True)
    sentences, answers = [[7, 8, 9], [10, 11], [12]], [[20, 20, 21], [30, 31, 30, 31, 30], [22]]
    data = {"input_ids": padded(sentences), "labels": padded(answers, padding=-100)}
    objective = parse_objective("ctc+glat")
    found = measure_losses(model, objective, [data], seed=1)
    assert found.dropped == 1  # five tokens on a canvas of four
    assert found.targets == answers
    fitting = {name: values[[0, 2]] for name, values in data.items()}
    with torch.no_grad():
        proxy = choose_final_proxy(model, objective, fitting, torch.Generator().manual_seed(1))
        assert proxy.revealed.any()
        nat = 0.0
        for row, (sentence, answer) in enumerate([(sentences[0], answers[0]), (sentences[2], answers[2])]):
            canvas = proxy.canvas.tokens[row : row + 1, : 2 * len(sentence)]
            chances = model(input_ids=torch.tensor([sentence]), decoder_input_ids=canvas).logits[0].softmax(dim=-1)
            paths = paths_of(answer, canvas.shape[1])
            nat -= math.log(sum(math.prod(chances[i, s].item() for i, s in enumerate(path)) for path in paths))
    assert found.nat == pytest.approx(nat / 4, rel=1e-6)
    assert found.tokens == 4


def test_losses_of_several_draws_are_averaged():
    model, objective = small_model(input_predictor=True), parse_objective("cmlm")
    data = [batch(6)]
    many = measure_losses(model, objective, data, draws=3, seed=2)
    generator, single = torch.Generator().manual_seed(2), []
    for _ in range(3):
        with torch.no_grad():
            proxy = choose_final_proxy(model, objective, data[0], generator)
            input_loss = negative_log_probability(model, data[0], proxy).item()
            single.append(input_loss + input_log_probability(objective.input, proxy).sum().item())
    assert many.input == pytest.approx(sum(single) / 3 / many.tokens)
    assert len(many.targets) == 6
    assert len(set(single)) == 3


def test_latent_divergence_is_part_of_the_input_loss():
    model, objective = small_model(latent="vae"), parse_objective("ce")
    assert measure_losses(model, objective, [batch()]).input == 0  # posterior and prior agree at first
    model.model.latent_head.posterior.weight.data.normal_(std=0.3)
    with torch.no_grad():
        divergence = model(**batch()).latent_kl.sum().item()
    found = measure_losses(model, objective, [batch()])
    assert found.input == pytest.approx(divergence / found.tokens)
    assert divergence > 0


def test_objectives_that_cannot_be_measured_are_refused():
    with pytest.raises(ValueError, match="'glat' reveals tokens, but the model has no input predictor"):
        measure_losses(small_model(), parse_objective("glat"), [batch()])
    with pytest.raises(ValueError, match="'dynamic_kd' selects among candidates, which a report does not have"):
        measure_losses(small_model(), parse_objective("dynamic_kd"), [batch()])
    with pytest.raises(ValueError, match="vanilla model has vocab_size=51"):
        measure_losses(small_model(), parse_objective("ce"), [batch()], vanilla=small_model(vocab_size=51))


def test_target_loss_is_a_mean_over_references_then_sentences():
    assert target_loss([[10.0, 30.0], [60.0]], beta=0.2) == pytest.approx(-0.2 * (20 + 60) / 2)


def test_correlation_equals_numpys():
    torch.manual_seed(0)
    first, second = torch.randn(9).tolist(), torch.randn(9).tolist()
    assert pearson(first, second) == pytest.approx(numpy.corrcoef(first, second)[0, 1])
    assert pearson([1.0, 2.0], [1.0, 3.0]) is None
    assert pearson([1.0, 2.0, 3.0], [5.0, 5.0, 5.0]) is None


def test_total_correlation_is_the_difference_of_two_entropies_in_bits():
    model, teacher, data = small_model(**EXACT), reranker().double(), [batch(2), batch(4)]
    found = conditional_total_correlation(model, teacher, data)
    parallel = autoregressive = tokens = 0.0
    with torch.no_grad():
        for part in data:
            for source, labels in zip(part["input_ids"], part["labels"], strict=True):
                source, labels = source[source != PAD][None], labels[labels >= 0]
                losses = model(input_ids=source, decoder_input_ids=torch.full((1, len(labels)), MASK)).logits[0]
                parallel += functional.cross_entropy(losses, labels, reduction="sum").item() / math.log(2)
                shifted = torch.cat([torch.tensor([teacher.config.decoder_start_token_id]), labels[:-1]])[None]
                logits = teacher(input_ids=source, decoder_input_ids=shifted).logits[0]
                autoregressive += functional.cross_entropy(logits, labels, reduction="sum").item() / math.log(2)
                tokens += len(labels)
    assert found.parallel == pytest.approx(parallel / tokens, rel=1e-6)
    assert found.autoregressive == pytest.approx(autoregressive / tokens, rel=1e-6)
    assert found.bits == pytest.approx((parallel - autoregressive) / tokens, rel=1e-5)
    assert found.tokens == tokens


def test_total_correlation_needs_one_position_per_token_and_one_vocabulary():
    with pytest.raises(ValueError, match="Total correlation needs a model with length='predict'"):
        conditional_total_correlation(small_model(length="ctc"), reranker(), [batch()])
    with pytest.raises(ValueError, match=f"autoregressive model has 60 tokens but the model has {VOCABULARY}"):
        conditional_total_correlation(small_model(), reranker(vocabulary=60), [batch()])
    long = padded(random_sentences(1, shortest=70, longest=70))
    with pytest.raises(ValueError, match="too long for the autoregressive model, which supports 64"):
        conditional_total_correlation(small_model(), reranker().double(), [{"input_ids": long, "labels": long}])

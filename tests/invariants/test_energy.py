"""Invariant 7: the energy of one-hot inputs is the negative log-likelihood; operators are those of table 1."""

import math

import pytest
import torch
from torch.nn import functional

from hf_deqnar.models.deqnar.reranking import teacher_forced
from hf_deqnar.objectives.energy import (
    OPERATORS,
    EnergyObjective,
    check_teacher,
    energy,
    forbid_early_end,
    gumbel_noise,
    reader_of,
)

from ..conftest import PAD, REFINEMENTS, VOCABULARY, padded, random_sentences, small_model
from ..teachers import END, MAKERS, small_teacher

SOURCES = random_sentences(4, 2, 9, seed=1)
TARGETS = [[*sentence, END] for sentence in random_sentences(4, 1, 7, seed=2)]


def batch_of(rows=range(4), extra: int = 0) -> dict[str, torch.Tensor]:
    sources, targets = [SOURCES[row] for row in rows], [TARGETS[row] for row in rows]
    input_ids = padded(sources, extra=extra)
    return {
        "input_ids": input_ids,
        "attention_mask": (input_ids != PAD).long(),
        "labels": padded(targets, padding=-100, extra=extra),
    }


def random_logits(seed: int = 5, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*batch_of()["labels"].shape, VOCABULARY)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


# ---- The energy


@pytest.mark.parametrize("kind", MAKERS)
def test_energy_of_one_hot_inputs_is_the_negative_log_likelihood(kind):
    teacher, batch = small_teacher(kind).double(), batch_of(extra=2)
    check_teacher(teacher, VOCABULARY)
    labels = batch["labels"]
    mask, tokens = labels >= 0, labels.clamp_min(0)
    read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
    with torch.no_grad():
        by_distribution = energy(read, *2 * [functional.one_hot(tokens, VOCABULARY).double()], mask)
        by_token = energy(read, tokens, tokens, mask)
        likelihoods = [
            teacher(**{name: value[row : row + 1] for name, value in batch.items()}).loss * mask[row].sum()
            for row in range(len(labels))
        ]
    assert torch.allclose(by_distribution, torch.stack(likelihoods), rtol=1e-12)
    assert torch.allclose(by_token, torch.stack(likelihoods), rtol=1e-12)
    assert by_token.std() > 1  # sentences of different likelihood, for a meaningful test


@pytest.mark.parametrize("kind", MAKERS)
def test_soft_tokens_are_embedded_as_mixtures(kind):
    """Independently of `reader_of`: a hook in the embedding of the teacher mixes the embeddings."""
    teacher, batch = small_teacher(kind).double(), batch_of()
    mask, first, second = batch["labels"] >= 0, batch["labels"].clamp_min(0), batch["labels"].clamp_min(0).flip(1)
    share = 0.3
    soft = share * functional.one_hot(first, VOCABULARY) + (1 - share) * functional.one_hot(second, VOCABULARY)
    with torch.no_grad():
        found = reader_of(teacher, batch["input_ids"], batch["attention_mask"])(soft.double(), mask)
        start = torch.full_like(first[:, :1], teacher.config.decoder_start_token_id)
        other = torch.cat([start, second[:, :-1]], dim=1)

        def mix(module, arguments, output):
            if arguments[0].shape == other.shape and torch.equal(arguments[0], fed):
                return share * output + (1 - share) * type(module).forward(module, other)
            return output

        fed = torch.cat([start, first[:, :-1]], dim=1)
        hook = teacher.get_decoder().get_input_embeddings().register_forward_hook(mix)
        expected = teacher(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=fed,
            decoder_attention_mask=torch.cat([torch.ones_like(mask[:, :1]), mask[:, :-1]], dim=1).long(),
        ).logits.log_softmax(dim=-1)
        hook.remove()
    assert torch.allclose(found[mask], expected[mask], atol=1e-12)


def test_any_function_can_be_the_teacher():
    """A bigram model without a source: e = −Σ_t y_t·log p(· | y_{t−1}), p(· | v) in row v of a table."""
    table = torch.randn(5, 5, dtype=torch.float64).log_softmax(dim=-1)
    tokens, mask = torch.tensor([[1, 4, 2], [3, 2, 0]]), torch.tensor([[True, True, True], [True, True, False]])

    def read(sequence, mask):
        distributions = sequence if sequence.is_floating_point() else functional.one_hot(sequence, 5).double()
        start = functional.one_hot(torch.zeros(len(sequence), 1, dtype=torch.long), 5).double()
        return torch.cat([start, distributions[:, :-1]], dim=1) @ table

    expected = [-(table[0, 1] + table[1, 4] + table[4, 2]), -(table[0, 3] + table[3, 2])]
    assert torch.allclose(energy(read, tokens, tokens, mask), torch.stack(expected))


def test_forbid_early_end_changes_only_inner_end_tokens():
    teacher, batch = small_teacher().double(), batch_of(extra=1)
    mask, tokens = batch["labels"] >= 0, batch["labels"].clamp_min(0)
    read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
    strict = forbid_early_end(read, END)
    with torch.no_grad():
        assert torch.equal(energy(strict, tokens, tokens, mask), energy(read, tokens, tokens, mask))
        ended = torch.full_like(tokens, END)
        output = read(ended, mask)
        lengths = mask.sum(dim=1)
        for row, length in enumerate(lengths.tolist()):
            early = -output[row, : length - 1].amin(dim=-1).sum() - output[row, length - 1, END]
            assert torch.isclose(energy(strict, ended, ended, mask)[row], early)
        by_distribution = functional.one_hot(ended, VOCABULARY).double()
        found = energy(strict, ended, by_distribution, mask)
        assert torch.allclose(found, energy(strict, ended, ended, mask))


@pytest.mark.parametrize("forbidden", [True, False])
def test_objective_forbids_early_ends_by_default(forbidden):
    student, teacher, batch = small_model(refinement="stacked"), small_teacher().double(), batch_of()
    bonus = torch.zeros(VOCABULARY, dtype=torch.float64).index_fill(0, torch.tensor([END]), 100.0)
    student.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bonus)
    read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
    terms = EnergyObjective(forbid_early_end=forbidden).terms(student, read, batch)
    ended, mask = torch.full_like(batch["labels"], END), batch["labels"] >= 0
    expected = energy(forbid_early_end(read, END) if forbidden else read, ended, ended, mask).sum()
    assert torch.allclose(terms["discrete_energy"].total, expected)
    assert torch.allclose(terms["energy"].total, expected)


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_energy_does_not_depend_on_batch(refinement):
    student, teacher = small_model(refinement=refinement), small_teacher().double()
    objective = EnergyObjective()

    def totals(batch):
        read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
        terms = objective.terms(student, read, batch)
        return torch.stack([terms[name].total for name in ("energy", "discrete_energy", "length")])

    single = sum(totals(batch_of([row])) for row in range(4))
    assert torch.allclose(totals(batch_of(extra=3)), single, rtol=1e-9)
    assert torch.allclose(totals(batch_of([2, 0, 3, 1])), single, rtol=1e-9)


def test_padding_does_not_affect_the_energy_or_its_gradient():
    teacher, batch = small_teacher().double(), batch_of(extra=2)
    mask = batch["labels"] >= 0
    read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
    logits = torch.randn(*mask.shape, VOCABULARY, dtype=torch.float64).requires_grad_()
    found = energy(read, OPERATORS["SX"](logits), OPERATORS["ST"](logits), mask)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert (gradient[~mask] == 0).all()
    assert (gradient[mask].abs().sum(dim=-1) > 0).all()
    changed = torch.where(mask[..., None], logits, torch.randn_like(logits))
    again = energy(read, OPERATORS["SX"](changed), OPERATORS["ST"](changed), mask)
    assert torch.allclose(found, again, rtol=1e-12)


@pytest.mark.parametrize("kind", MAKERS)
def test_teacher_is_restored_and_has_no_dropout(kind):
    teacher, batch = small_teacher(kind).double(), batch_of()
    student = small_model(torch.float64).train()
    objective = EnergyObjective()

    def relaxed():
        torch.manual_seed(0)
        read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
        terms = objective.terms(student, read, batch)
        terms["token_energy"].total.backward()
        return terms["energy"].total

    expected = relaxed()
    teacher.train()
    frozen_one = next(teacher.parameters())
    frozen_one.requires_grad_(False)
    teacher.get_encoder().eval()
    modes = [module.training for module in teacher.modules()]
    flags = [weight.requires_grad for weight in teacher.parameters()]
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    assert torch.equal(relaxed(), expected)
    check_teacher(teacher, VOCABULARY)
    assert [module.training for module in teacher.modules()] == modes
    assert [weight.requires_grad for weight in teacher.parameters()] == flags
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(weight.grad is None for weight in teacher.parameters())


@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_discrete_energy_is_that_of_the_predicted_tokens(refinement):
    """Also if the most likely token is <pad>, <mask> or <s>, which are never generated."""
    student, teacher, batch = small_model(refinement=refinement), small_teacher().double(), batch_of()
    never = [student.config.pad_token_id, student.config.mask_token_id, student.config.bos_token_id]
    bonus = torch.zeros(VOCABULARY, dtype=torch.float64).index_fill(0, torch.tensor(never), 100.0)
    student.lm_head.register_forward_hook(lambda module, arguments, logits: logits + bonus)
    mask = batch["labels"] >= 0
    with torch.no_grad():
        canvas = torch.where(mask, student.config.mask_token_id, student.config.pad_token_id)
        logits = student(batch["input_ids"], decoder_input_ids=canvas).logits - 1000 * bonus
        tokens = logits.argmax(dim=-1)
        sources = (batch["input_ids"], batch["attention_mask"])
        expected = -teacher_forced(teacher, *sources, tokens, mask, "the teacher").sum()
        objective = EnergyObjective(forbid_early_end=False)
        found = objective.terms(student, reader_of(teacher, *sources), batch)["discrete_energy"]
    assert torch.allclose(found.total, expected, rtol=1e-12)
    assert found.count == 4


# ---- Operators


def by_hand(name: str, logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """O(z) and ∂O/∂z of one position, from table 1: ∂q/∂z = (diag(q) − q·qᵀ)/τ."""
    noisy = name in ("SG", "GX")
    shifted = logits + gumbel_noise(logits, seeded()) if noisy else logits
    weights = [math.exp(value / temperature) for value in shifted.tolist()]
    q = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    jacobian = (torch.diag(q) - torch.outer(q, q)) / temperature
    if name in ("SX", "GX"):
        return q, jacobian
    hard = torch.zeros_like(q)
    hard[max(range(len(q)), key=shifted.tolist().__getitem__)] = 1.0
    return hard, torch.eye(len(q), dtype=torch.float64) if name == "STL" else jacobian


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", OPERATORS)
def test_values_and_gradients_of_operators_agree_with_table_1(name, temperature):
    logits = torch.tensor([0.3, -1.0, 2.0, 1.9, 0.0], dtype=torch.float64)

    def apply(values):
        return OPERATORS[name](values, temperature, seeded())

    value, jacobian = by_hand(name, logits, temperature)
    found = apply(logits)
    assert torch.allclose(found, value, atol=1e-14)
    assert name in ("SX", "GX") or torch.equal(found, value)
    assert torch.allclose(torch.autograd.functional.jacobian(apply, logits), jacobian, atol=1e-14)


def test_there_are_five_different_operators():
    assert list(OPERATORS) == ["SX", "STL", "SG", "ST", "GX"]
    logits = random_logits()
    values = {name: operator(logits, 1.0, seeded()) for name, operator in OPERATORS.items()}
    assert torch.equal(values["ST"], values["STL"])
    assert not torch.equal(values["SG"], values["ST"])
    for name in ("STL", "SG", "ST"):
        assert torch.equal(values[name].sort(dim=-1).values[..., -1], torch.ones_like(values[name][..., 0]))
        assert torch.equal(values[name].sum(dim=-1), torch.ones_like(values[name][..., 0]))


def test_noise_is_gumbel_and_determined_by_the_generator():
    noise = gumbel_noise(torch.empty(200_000, dtype=torch.float64), seeded())
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert torch.equal(noise, gumbel_noise(torch.empty(200_000, dtype=torch.float64), seeded()))
    torch.manual_seed(99)
    assert torch.equal(OPERATORS["GX"](noise[:9], 1.0, seeded()), OPERATORS["GX"](noise[:9], 1.0, seeded()))


@pytest.mark.parametrize("fed", OPERATORS)
@pytest.mark.parametrize("compared", OPERATORS)
def test_gradient_of_every_pair_of_operators_follows_the_chain_rule(fed, compared):
    """∂E/∂z = Σ ∂E/∂O·∂O/∂z: outer derivatives with both sequences as leaves, Jacobians by hand at one position."""
    teacher, batch, logits = small_teacher().double(), batch_of(), random_logits().requires_grad_()
    mask = batch["labels"] >= 0
    read = reader_of(teacher, batch["input_ids"], batch["attention_mask"])
    generator = seeded()
    sequences = [OPERATORS[name](logits, 1.0, generator) for name in (fed, compared)]
    leaves = [sequence.detach().requires_grad_() for sequence in sequences]
    outer = torch.autograd.grad(energy(read, *leaves, mask).sum(), leaves)
    (found,) = torch.autograd.grad(energy(read, *sequences, mask).sum(), logits)
    expected = torch.zeros_like(found)
    generator = seeded()
    for name, slope in zip((fed, compared), outer, strict=True):
        noise = gumbel_noise(logits, generator) if name in ("SG", "GX") else 0.0
        q = (logits.detach() + noise).softmax(dim=-1)
        through_softmax = q * (slope - (q * slope).sum(dim=-1, keepdim=True))
        expected += slope if name == "STL" else through_softmax
    assert torch.allclose(found, expected, atol=1e-10)
    assert (outer[0][:, :-1][mask[:, 1:]].abs().sum(dim=-1) > 0).all()  # the teacher's inputs matter
    last = mask.sum(dim=1) - 1
    assert (outer[0][torch.arange(4), last] == 0).all()  # the last token is no decoder input

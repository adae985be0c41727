"""The training step and its reference implementation have the same loss and gradients in float64. No timings."""

import pytest
import torch

from hf_deqnar.benchmarks.training import LONGEST, SHORTEST, caption_batches, reference_loss, systems
from hf_deqnar.objectives.objective import parse_objective

from ..conftest import PAD, padded, random_sentences, small_model

CASES = [
    (name, refinement, settings)
    for name in ("ctc", "ctc+glat", "ce", "glat", "ce+cmlm", "ctc+glat_difficulty", "glat_levenshtein")
    for refinement, settings in (("stacked", {}), ("implicit", {}), ("implicit", {"correction": 0.5}), ("mixed", {}))
]


@pytest.mark.parametrize(("name", "refinement", "settings"), CASES)
def test_loss_and_gradients_agree_with_the_reference_implementation(name, refinement, settings):
    source, target = (padded(random_sentences(5, shortest=4, longest=9, seed=seed)) for seed in (1, 2))
    batch = {"input_ids": source, "labels": target.masked_fill(target == PAD, -100)}
    length = "ctc" if "ctc" in name.split("+") else "predict"
    objective = parse_objective(name, **settings)
    model = small_model(refinement=refinement, length=length).train()  # both draw the same dropout

    found = []
    for loss_of in (objective, lambda *arguments, **options: reference_loss(objective, *arguments, **options)):
        torch.manual_seed(7)
        model.zero_grad()
        terms = loss_of(model, batch, generator=torch.Generator().manual_seed(3))
        terms["loss"].backward()
        found.append((terms["loss"].detach(), {key: value.grad for key, value in model.named_parameters()}))
    (loss, gradients), (expected, expected_gradients) = found
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-6, atol=1e-6)  # counts are in float32
    assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[key], rtol=1e-6, atol=1e-8, msg=key)


def test_batches_have_caption_lengths_within_the_token_budget():
    batches = caption_batches(vocabulary=100, max_tokens=256, count=6, seed=0)
    assert len(batches) == 6
    for batch in batches:
        rows, longest = batch["input_ids"].shape[0], max(tokens.shape[1] for tokens in batch.values())
        assert rows * longest <= 256
        for lengths in ((batch["input_ids"] != PAD).sum(dim=1), (batch["labels"] >= 0).sum(dim=1)):
            assert SHORTEST <= lengths.min() <= lengths.max() <= LONGEST
    again = caption_batches(vocabulary=100, max_tokens=256, count=6, seed=0)
    assert all(torch.equal(one["labels"], other["labels"]) for one, other in zip(batches, again, strict=True))


def test_system_names_are_unique():
    names = [one.name for one in systems(6, 0.5, sampled=True)]
    assert len(set(names)) == len(names)
    sampled = [name for name in names if "sampled_words" in name]
    assert [name for name in names if name not in sampled] == [one.name for one in systems(6, 0.5, sampled=False)]

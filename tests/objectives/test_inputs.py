import math

import pytest
import torch

from hf_deqnar.objectives.inputs import INPUTS, Prediction, needs_prediction, reveal

ROWS, WIDTH = 400, 10


def batch():
    torch.manual_seed(0)
    target = torch.randint(6, 20, (ROWS, WIDTH))
    lengths = torch.randint(1, WIDTH + 1, (ROWS,))
    mask = torch.arange(WIDTH)[None] < lengths[:, None]
    wrong = torch.rand(ROWS, WIDTH) < 0.5
    prediction = Prediction(torch.where(wrong, target + 1, target), torch.rand(ROWS, WIDTH))
    return target, mask, lengths, prediction


@pytest.mark.parametrize("name", INPUTS)
def test_only_tokens_are_revealed_and_never_padding(name):
    target, mask, _, prediction = batch()
    revealed = INPUTS[name](target, mask, prediction, 0.5, None)
    assert revealed.dtype == torch.bool
    assert not (revealed & ~mask).any()


def test_masked_input_reveals_no_token():
    target, mask, _, _ = batch()
    assert not INPUTS["masked"](target, mask).any()


def test_cmlm_reveals_a_random_share_and_cmlm_fixed_a_fifth():
    target, mask, lengths, _ = batch()
    share = INPUTS["cmlm"](target, mask).sum(dim=1) / lengths
    assert share.min() == 0
    assert 0.3 < share[lengths == WIDTH].mean() < 0.55
    assert share.max() > 0.8
    fixed = INPUTS["cmlm_fixed"](target, mask).sum(dim=1)
    assert fixed.tolist() == [length // 5 for length in lengths.tolist()]


@pytest.mark.parametrize(("progress", "ratio"), [(0.0, 0.5), (0.5, 0.4), (1.0, 0.3), (2.0, 0.3)])
def test_glat_reveals_a_decreasing_share_of_the_errors(progress, ratio):
    target, mask, _, prediction = batch()
    errors = ((prediction.tokens != target) & mask).sum(dim=1)
    revealed = INPUTS["glat"](target, mask, prediction, progress, None)
    assert revealed.sum(dim=1).tolist() == [math.floor(ratio * count + 1e-6) for count in errors.tolist()]


def test_glat_levenshtein_counts_a_shift_as_one_edit():
    target = torch.tensor([[7, 8, 9, 10, 11, 12]])
    prediction = Prediction(torch.tensor([[8, 9, 10, 11, 12, 12]]), torch.ones(1, 6))
    mask = torch.ones(1, 6, dtype=torch.bool)
    assert INPUTS["glat"](target, mask, prediction, 0.0, None).sum() == 2  # five wrong positions
    assert INPUTS["glat_levenshtein"](target, mask, prediction, 0.0, None).sum() == 1  # two edits


@pytest.mark.parametrize(("name", "favoured"), [("glat_reference", 0), ("glat_difficulty", 1)])
def test_glat_can_prefer_easy_or_hard_tokens(name, favoured):
    target = torch.full((2000, 2), 7)
    prediction = Prediction(torch.full((2000, 2), 8), torch.tensor([[0.8, 0.2]]).expand(2000, 2))
    revealed = INPUTS[name](target, torch.ones(2000, 2, dtype=torch.bool), prediction, 0.0, None)
    assert revealed.sum(dim=1).tolist() == [1] * 2000
    assert revealed[:, favoured].double().mean() == pytest.approx(0.8, abs=0.04)


def test_positions_are_drawn_evenly_and_repeatably():
    mask = torch.ones(4000, 4, dtype=torch.bool)
    count = torch.full((4000,), 2)
    drawn = [reveal(count, mask, torch.ones(4000, 4), torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*drawn)
    assert drawn[0].double().mean(dim=0).tolist() == pytest.approx([0.5] * 4, abs=0.03)


def test_only_glancing_needs_a_first_prediction():
    assert [name for name, chosen in INPUTS.items() if needs_prediction(chosen)] == [
        "glat", "glat_levenshtein", "glat_reference", "glat_difficulty"
    ]  # fmt: skip

import pytest
import torch

from hf_deqnar.data.parallel_text import read_parallel
from hf_deqnar.evaluation.calibration import calibrate, foreign_pairs, regress, spearman, table
from hf_deqnar.models.deqnar.quality import FEATURES, Familiarity

from ..conftest import PAIRS_FILE, small_model


def test_regression_finds_the_parameters_that_scores_were_made_from():
    torch.manual_seed(0)
    features = torch.randn(4000, 3) * torch.tensor([1.0, 5.0, 0.2]) + torch.tensor([0.0, 3.0, -1.0])
    scores = (features @ torch.tensor([1.0, -0.2, 3.0]) + 2.5).sigmoid()
    bias, *weights = regress(features, scores)
    assert [bias, *weights] == pytest.approx([2.5, 1.0, -0.2, 3.0], rel=0.05)
    constant = regress(torch.ones(10, 1), torch.full((10,), 0.75))
    assert torch.tensor(constant[0] + constant[1]).sigmoid() == pytest.approx(0.75, abs=1e-3)


def test_tables_count_every_row_once():
    quality, scores = torch.linspace(0, 1, 101), torch.linspace(0, 1, 101)
    rows = table(quality, scores)
    assert sum(count for _, _, count, _, _ in rows) == 101
    assert all(low <= mean <= high and mean == pytest.approx(score) for low, high, _, mean, score in rows)


def test_rank_correlation_averages_the_ranks_of_equal_values():
    stats = pytest.importorskip("scipy.stats")
    first, second = torch.tensor([1.0, 1.0, 2.0, 5.0, 3.0]), torch.tensor([2.0, 1.0, 2.0, 2.0, 9.0])
    assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_foreign_texts_are_references_and_shuffled_sources():
    pairs = read_parallel(PAIRS_FILE, "en", "de")
    foreign = foreign_pairs(pairs)
    assert foreign == foreign_pairs(pairs)
    assert len(foreign) == 10
    sources = {pair.source for pair in pairs}
    assert sum(one.source == one.references[0] for one in foreign) == 5
    assert all(one.source not in sources for one in foreign[5:])
    assert all(sorted(one.source) in [sorted(source) for source in sources] for one in foreign[5:])


@pytest.mark.parametrize("length", ["predict", "ctc"])
def test_a_calibrated_model_estimates_its_mean_chrf(tokenizer, length):
    """The regression has a bias, so the mean estimate of what it was fitted on is the mean score."""
    model = small_model(torch.float32, length=length, vocab_size=len(tokenizer))
    pairs = read_parallel(PAIRS_FILE, "en", "de")
    found = calibrate(model, tokenizer, pairs, [pair.source for pair in pairs], batch_size=8)
    assert len(found.quality["sentence"]) == len(FEATURES) + 1
    assert sum(count for _, _, count, _, _ in found.sentences) == len(pairs)
    estimated = sum(count * mean for _, _, count, mean, _ in found.sentences) / len(pairs)
    actual = sum(count * score for _, _, count, _, score in found.sentences) / len(pairs)
    assert estimated == pytest.approx(actual, abs=0.05)
    assert 0 <= found.foreign < actual + 0.02
    sources = tokenizer([pair.source for pair in pairs])["input_ids"]
    familiarity = Familiarity(found.quality)
    assert sum(familiarity.is_unfamiliar(torch.tensor(row)) for row in sources) <= 1
    batch = tokenizer([pairs[0].source], return_tensors="pt")
    out = model.generate(**batch, quality=found.quality, return_dict_in_generate=True)
    assert 0 < float(out.quality) < 1

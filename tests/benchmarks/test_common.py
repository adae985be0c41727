import numpy
import pytest
import torch

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.benchmarks.common import in_milliseconds, machine, time_interleaved, untrained_model
from hf_deqnar.models.deqnar.layers_deqnar import BranchEnd

from ..conftest import small_config


def test_systems_are_timed_in_rotating_order():
    calls = []

    def system(name):
        def run(one):
            calls.append((name, one))
            return name + one

        return run

    timings = time_interleaved({name: system(name) for name in "abc"}, ["x", "y"], repeats=2, warm_up=1)
    warm_up = [("a", "x"), ("b", "x"), ("c", "x")]
    first = [("a", "x"), ("b", "x"), ("c", "x"), ("b", "y"), ("c", "y"), ("a", "y")]
    second = [("c", "x"), ("a", "x"), ("b", "x"), ("a", "y"), ("b", "y"), ("c", "y")]
    assert calls == warm_up + first + second
    assert timings.outputs == {"a": ["ax", "ay"], "b": ["bx", "by"], "c": ["cx", "cy"]}
    for name in "abc":
        assert [len(repeat) for repeat in timings.seconds[name]] == [2, 2]
        assert all(second >= 0 for repeat in timings.seconds[name] for second in repeat)


@pytest.mark.parametrize("count", [1, 2, 19, 100])
def test_percentiles_agree_with_sorted_times(count):
    times = numpy.random.default_rng(count).permutation(count) / 1000  # 0 … count − 1 milliseconds
    figures = in_milliseconds(times)
    assert figures["median"] == pytest.approx((count - 1) / 2)
    assert figures["p95"] == pytest.approx(0.95 * (count - 1))
    assert figures["mean"] == pytest.approx((count - 1) / 2)


def test_machine_lists_threads_and_package_versions():
    assert "numpy" not in machine(1)
    assert machine(2, "numpy")["numpy"] == numpy.__version__
    assert machine(2)["threads"] == 2


def test_untrained_model_has_residual_branches_at_full_scale(monkeypatch):
    config = small_config()
    torch.manual_seed(0)
    expected = DeqNarForConditionalGeneration(config).state_dict()  # in tests the gain is one
    monkeypatch.setattr(BranchEnd, "initial_gain", 0.1)
    torch.manual_seed(0)
    for name, weight in untrained_model(config).state_dict().items():
        torch.testing.assert_close(weight, expected[name])

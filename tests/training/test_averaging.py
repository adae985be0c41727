import pytest
import torch
from safetensors.torch import save_file

from hf_deqnar.training.averaging import (
    average_weights,
    best_steps,
    load_weights,
    remove_all_but,
    save_weights,
    whole_weights,
)

from ..conftest import small_model


def test_best_steps_are_found_in_the_log():
    history = [{"step": 10, "loss": 1.0}, {"step": 10, "eval_bleu": 5.0}, {"step": 20, "eval_bleu": 9.0}]
    history += [{"step": 30, "eval_bleu": 5.0}, {"step": 40, "eval_bleu": 1.0}, {"step": 50, "averaged_bleu": 99.0}]
    assert best_steps(history, "eval_bleu", 3) == [20, 30, 10]
    assert best_steps(history, "eval_bleu", 2, greater_is_better=False) == [40, 30]
    assert best_steps(history, "eval_bleu", 0) == []


def test_average_is_the_mean_of_every_weight(tmp_path):
    models = [small_model(torch.float32, seed=seed, weight_norm="weight") for seed in range(3)]
    paths = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for model, path in zip(models, paths, strict=True):
        save_weights(whole_weights(model), path)
    averaged = small_model(torch.float32, seed=9, weight_norm="weight")
    load_weights(averaged, average_weights(paths))
    expected = [model.state_dict() for model in models]
    for name, value in averaged.state_dict().items():
        mean = sum(weights[name].double() for weights in expected) / 3
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
    assert averaged.lm_head.weight is averaged.model.shared.weight


def test_integer_tensors_are_not_averaged(tmp_path):
    for number in (1, 2):
        save_file({"count": torch.tensor([number]), "weight": torch.tensor([float(number)])}, tmp_path / f"{number}")
    found = average_weights([tmp_path / "1", tmp_path / "2"])
    assert found["count"].tolist() == [1]
    assert found["weight"].tolist() == [1.5]


def test_weights_of_another_model_are_refused(tmp_path):
    save_weights(whole_weights(small_model(torch.float32, length="predict")), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="do not belong to this model: model.length_head"):
        load_weights(small_model(torch.float32, length="ctc"), average_weights([tmp_path / "weights.safetensors"]))


def test_remove_all_but_deletes_other_files(tmp_path):
    for name in ("step-1.safetensors", "step-2.safetensors", "step-3.unfinished", "note.txt"):
        (tmp_path / name).write_text("x")
    remove_all_but(tmp_path, [tmp_path / "step-2.safetensors"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note.txt", "step-2.safetensors"]

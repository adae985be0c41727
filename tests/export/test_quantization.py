import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hf_deqnar.export.quantization import quantise_embedding, quantise_rows

from .conftest import KINDS


def initializers(path) -> dict[str, np.ndarray]:
    return {weight.name: numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}


def test_the_error_of_a_row_is_at_most_half_of_its_scale():
    table = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32) * np.logspace(-3, 3, 50)[:, None]
    table[7] = 0
    values, scales = quantise_rows(table.astype(np.float32))
    assert values.dtype == np.int8
    assert scales.shape == (50, 1)
    assert (np.abs(values * scales - table) <= scales * 0.5001).all()
    assert (np.abs(np.delete(values, 7, axis=0).astype(int)).max(axis=1) == 127).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["source", "canvas"])
def test_only_the_token_embedding_is_stored_by_rows(exported, kind, name):
    model, folders = exported(kind)
    before, after = (initializers(folders[precision] / f"{name}.onnx") for precision in ("fp32", "int8"))
    (table,) = (weight for key, weight in before.items() if key.endswith("shared.weight"))
    assert table.shape == (model.config.vocab_size, model.config.d_model)
    assert not [key for key in after if key.endswith("shared.weight")]
    (values,) = (weight for key, weight in after.items() if key.endswith("shared.weight_int8"))
    (scales,) = (weight for key, weight in after.items() if key.endswith("shared.weight_scale"))
    np.testing.assert_array_equal(values, quantise_rows(table)[0])
    np.testing.assert_allclose(values * scales, table, atol=np.abs(table).max() / 200)


def test_table_with_other_uses_is_not_removed(tmp_path):
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Gather", ["shared.weight", "tokens"], ["embedded"]),
            onnx.helper.make_node("ReduceSum", ["shared.weight"], ["total"]),
        ],
        "both",
        [onnx.helper.make_tensor_value_info("tokens", onnx.TensorProto.INT64, ["count"])],
        [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("embedded", "total")],
        [numpy_helper.from_array(table, "shared.weight")],
    )
    onnx.save(onnx.helper.make_model(graph), tmp_path / "both.onnx")
    quantise_embedding(tmp_path / "both.onnx", tmp_path / "both.onnx")
    assert set(initializers(tmp_path / "both.onnx")) == {
        "shared.weight",
        "shared.weight_int8",
        "shared.weight_scale",
    }

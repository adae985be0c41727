import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from hf_deqnar.export.calibration import activation_ranges
from hf_deqnar.export.quantization import affine, quantise, quantise_embedding, quantise_rows

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


def test_zero_is_exact_and_the_ends_of_a_range_are_representable():
    for lowest, highest in ((-1.0, 4.0), (0.0, 3.0), (-2.0, 0.0), (-0.3, 0.2)):
        scale, zero = affine(lowest, highest)
        ends = np.clip(np.rint(np.array([lowest, 0.0, highest]) / scale) + zero, 0, 255)
        np.testing.assert_allclose((ends - zero) * scale, [lowest, 0, highest], atol=scale / 2)
        assert (ends[1] - zero) == 0


def save_product(path, weight: np.ndarray) -> None:
    """x → relu(x)·W."""
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Relu", ["x"], ["positive"], name="relu"),
            onnx.helper.make_node("MatMul", ["positive", "weight"], ["y"], name="product"),
        ],
        "product",
        [info("x", onnx.TensorProto.FLOAT, ["rows", weight.shape[0]])],
        [info("y", onnx.TensorProto.FLOAT, ["rows", weight.shape[1]])],
        [numpy_helper.from_array(weight, "weight")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)


def test_a_product_is_computed_within_the_precision_of_both_factors(tmp_path):
    import onnxruntime

    generator = np.random.default_rng(0)
    weight = generator.normal(size=(64, 12)).astype(np.float32)
    samples = [{"x": generator.normal(size=(5, 64)).astype(np.float32)} for _ in range(4)]
    save_product(tmp_path / "fp32.onnx", weight)
    ranges = activation_ranges(tmp_path / "fp32.onnx", samples)
    largest = max(sample["x"].max() for sample in samples)
    assert ranges == {"positive": (0.0, pytest.approx(largest))}
    errors = {}
    for eight_bits in (False, True):
        quantise(tmp_path / "fp32.onnx", tmp_path / "int8.onnx", ranges, eight_bits)
        session = onnxruntime.InferenceSession(tmp_path / "int8.onnx")
        for sample in samples:
            (found,) = session.run(None, sample)
            expected = np.maximum(sample["x"], 0) @ weight
            errors[eight_bits] = np.abs(found - expected).max() / np.abs(expected).max()
            assert errors[eight_bits] < (0.02 if eight_bits else 0.03)
            alone = [session.run(None, {"x": sample["x"][row : row + 1]})[0] for row in range(5)]
            np.testing.assert_array_equal(np.concatenate(alone), found)  # no row depends on another
        beyond = np.full((1, 64), 3 * largest, dtype=np.float32)
        np.testing.assert_allclose(
            session.run(None, {"x": beyond})[0], session.run(None, {"x": np.full_like(beyond, largest)})[0], rtol=1e-5
        )
    assert errors[True] < errors[False]


def test_products_with_the_rows_of_a_shortlist_are_quantised(tmp_path):
    import onnxruntime

    generator = np.random.default_rng(1)
    table = generator.normal(size=(40, 16)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [
            onnx.helper.make_node("Gather", ["table", "words"], ["rows"], name="rows"),
            onnx.helper.make_node("Transpose", ["rows"], ["columns"], name="columns", perm=[1, 0]),
            onnx.helper.make_node("MatMul", ["x", "columns"], ["y"], name="product"),
        ],
        "listed",
        [info("x", onnx.TensorProto.FLOAT, ["rows", 16]), info("words", onnx.TensorProto.INT64, ["words"])],
        [info("y", onnx.TensorProto.FLOAT, ["rows", "words"])],
        [numpy_helper.from_array(table, "table")],
    )
    path = tmp_path / "fp32.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10), path)
    sample = {"x": generator.normal(size=(5, 16)).astype(np.float32), "words": np.array([3, 39, 0, 7])}
    quantise(path, tmp_path / "int8.onnx", activation_ranges(path, [sample]), eight_bits=True)
    weights = initializers(tmp_path / "int8.onnx")
    assert "table" not in weights
    assert weights["table_int8"].dtype == np.int8
    (found,) = onnxruntime.InferenceSession(tmp_path / "int8.onnx").run(None, sample)
    expected = sample["x"] @ table[sample["words"]].T
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()

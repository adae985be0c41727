import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hf_deqnar.export.shared_weights import ALIGNMENT, SHARED_WEIGHTS, SMALLEST, all_initializers, share_weights

from .conftest import KINDS


def write(path, **weights: np.ndarray) -> None:
    graph = helper.make_graph([], path.stem, [], [], [numpy_helper.from_array(w, name) for name, w in weights.items()])
    onnx.save(helper.make_model(graph), path)


def read(path) -> dict[str, np.ndarray]:
    return {weight.name: numpy_helper.to_array(weight) for weight in onnx.load(path).graph.initializer}


def test_equal_weights_are_stored_once_and_read_back(tmp_path):
    large, other, small = np.arange(1000.0), np.arange(999, dtype=np.float32), np.arange(3.0)
    write(tmp_path / "a.onnx", first=large, second=other, third=small)
    write(tmp_path / "b.onnx", fourth=large, fifth=large.reshape(10, 100))
    share_weights(tmp_path)
    size = (tmp_path / SHARED_WEIGHTS).stat().st_size
    assert large.nbytes + other.nbytes <= size < large.nbytes + other.nbytes + ALIGNMENT
    found = read(tmp_path / "a.onnx") | read(tmp_path / "b.onnx")
    expected = {"first": large, "second": other, "third": small, "fourth": large, "fifth": large.reshape(10, 100)}
    for name, weight in expected.items():
        np.testing.assert_array_equal(found[name], weight)
        assert found[name].dtype == weight.dtype
    graph = onnx.load(tmp_path / "a.onnx", load_external_data=False).graph
    places = {weight.name: weight.data_location for weight in graph.initializer}
    assert places == {"first": TensorProto.EXTERNAL, "second": TensorProto.EXTERNAL, "third": TensorProto.DEFAULT}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_no_weight_of_an_export_is_stored_twice(exported, kind, precision):
    _, folders = exported(kind)
    distinct = set()
    for path in folders[precision].glob("*.onnx"):
        for weight in all_initializers(onnx.load(path, load_external_data=False).graph):
            assert weight.data_location == TensorProto.EXTERNAL or weight.ByteSize() < 2 * SMALLEST
        distinct |= {numpy_helper.to_array(weight).tobytes() for weight in all_initializers(onnx.load(path).graph)}
    size = (folders[precision] / SHARED_WEIGHTS).stat().st_size
    large = [len(data) for data in distinct if len(data) >= SMALLEST]
    assert size <= sum(large) + ALIGNMENT * len(large)

import importlib.util
import json

import onnx
import pytest
import torch

from hf_deqnar.export import graphs
from hf_deqnar.export.graphs import INT8_TOL, check_exportable, export_model, frozen_copy, graphs_of
from hf_deqnar.export.quantization import products_with_listed_rows, quantise

from ..conftest import small_config, small_model
from .conftest import KINDS


def test_each_precision_is_a_complete_folder(exported):
    model, folders = exported("implicit")
    for precision, folder in folders.items():
        names = {path.name for path in folder.iterdir()}
        assert {"source.onnx", "canvas.onnx", "transition.onnx", "head.onnx", "tokenizer.json"} <= names
        assert {"config.json", "generation_config.json", "deqnar_onnx.json"} <= names
        assert not [name for name in names if name.endswith(".py")]
        manifest = json.loads((folder / "deqnar_onnx.json").read_text())
        assert manifest["limits"] == {"source": 64, "canvas": 128}
        tol = json.loads((folder / "generation_config.json").read_text()).get("tol")
        assert tol == (INT8_TOL if precision == "int8" else None)
    assert not (folder.parent / "unfinished").exists()
    assert model.config.tol < INT8_TOL
    assert model.generation_config.tol is None  # the model itself is not changed
    assert model.config._attn_implementation != "eager"


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_inputs_of_the_transition_and_only_weights_are_quantised(exported, kind):
    _, folders = exported(kind)
    cell = onnx.load(folders["fp32"] / "transition.onnx")
    inputs = {value.name: [axis.dim_param for axis in value.type.tensor_type.shape.dim] for value in cell.graph.input}
    # q·k and p·v of both attentions; where words are chosen among, their embeddings are picked: logits, and p·emb
    constants = {constant.name for constant in cell.graph.initializer}
    constants |= {
        node.output[0] for node in cell.graph.node if node.op_type == "Transpose" and node.input[0] in constants
    }
    products = [node for node in cell.graph.node if node.op_type == "MatMul"]
    computed = sum(constants.isdisjoint(product.input) for product in products)
    if kind != "graph":  # which also computes expected positions, by doubling steps
        assert computed == {"mixed with a shortlist": 5, "self-conditioned": 6}.get(kind, 4)
    words = ["words", "outside"] if kind in ("mixed with a shortlist", "self-conditioned") else []
    assert list(inputs) == ["state", "injection", "canvas_mask", "memory_mask", "key_0", "value_0", *words]
    assert inputs["state"][:2] == ["rows", "canvas"]
    assert inputs["key_0"][2] == "source"
    assert cell.opset_import[0].version == graphs.OPSET
    quantised = [node.op_type for node in onnx.load(folders["int8"] / "transition.onnx").graph.node]
    listed = len(products_with_listed_rows(cell.graph))  # logits of a shortlist
    assert listed == (1 if words else 0)
    assert quantised.count("MatMul") == computed - listed
    assert quantised.count("MatMulIntegerToFloat") == len(products) - computed + listed > 0
    assert (folders["fp32"] / "feedback.onnx").exists() == (kind == "explicit")


def test_frozen_copy_computes_the_same_function():
    model = small_model(torch.float32, weight_norm="spectral", length="ctc")
    tokens = torch.randint(6, 50, (2, 5))
    with torch.no_grad():
        torch.testing.assert_close(frozen_copy(model)(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_int8_weights_have_seven_bits_unless_eight_are_requested(exported, tmp_path):
    _, folders = exported("implicit")
    largest = {}
    for eight_bits in (False, True):
        quantise(folders["fp32"] / "head.onnx", tmp_path / "head.onnx", {"features": (-1.0, 1.0)}, eight_bits)
        (weight,) = (
            one for one in onnx.load(tmp_path / "head.onnx").graph.initializer if one.data_type == 3 and one.dims[1:]
        )
        largest[eight_bits] = abs(onnx.numpy_helper.to_array(weight).astype(int)).max()
    assert largest[True] == 127
    assert largest[False] == 63
    initializers = onnx.load(folders["int8"] / "head.onnx").graph.initializer
    (weight,) = (one for one in initializers if one.data_type == 3 and one.dims[1:])
    assert abs(onnx.numpy_helper.to_array(weight).astype(int)).max() == largest[False]


def test_unsupported_models_are_refused_by_option(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="architecture='bilstm' cannot be exported"):
        check_exportable(small_config(architecture="bilstm", refinement="stacked"))
    model = small_model(architecture="bilstm", refinement="stacked")
    with pytest.raises(ValueError, match="architecture='bilstm' cannot be exported"):
        export_model(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_package_is_reported_with_its_extra(monkeypatch, tokenizer, tmp_path):
    monkeypatch.setattr(
        graphs, "find_spec", lambda name: None if name == "onnxscript" else importlib.util.find_spec(name)
    )
    with pytest.raises(ImportError, match=r"needs the package onnxscript: pip install 'hf_deqnar\[onnx\]'"):
        export_model(small_model(), tokenizer, tmp_path)


def test_folder_without_export_is_not_overwritten(tokenizer, tmp_path):
    (tmp_path / "fp32").mkdir()
    (tmp_path / "fp32" / "thesis.tex").write_text("three years of work")
    with pytest.raises(FileExistsError, match="exists and is not an export"):
        export_model(small_model(), tokenizer, tmp_path)
    assert (tmp_path / "fp32" / "thesis.tex").exists()


def test_examples_of_different_axes_differ():
    sizes = {}
    for graph in graphs_of(frozen_copy(small_model(length="ctc"))).values():
        for example, axes in graph.inputs.values():
            for axis, name in axes.items():
                sizes.setdefault(name, set()).add(example.shape[axis])
    assert all(len(found) == 1 for found in sizes.values())
    assert len({min(found) for found in sizes.values()}) == 3

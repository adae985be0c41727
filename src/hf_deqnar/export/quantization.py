"""int8 weights: matrix products by onnxruntime's dynamic quantisation, the token embedding by rows."""

from pathlib import Path
from typing import Any

import numpy as np

from .messages import quiet

INT8_MAX = 127
EMBEDDING = "shared.weight"  # suffix of the name of the token embedding


def quantise(source: Path, target: Path, eight_bits: bool) -> None:
    """Quantise the weights of every matrix product to int8, with one scale per output channel.

    Activations are quantised dynamically, with one scale per tensor.

    Args:
        eight_bits: use all 8 bits of a weight instead of 7; see `export_model`.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    transpose_weights(model.graph)
    del model.graph.value_info[:]  # the quantiser transposes some weights without their recorded shapes
    with quiet():
        quantize_dynamic(
            model,
            target,
            op_types_to_quantize=["MatMul"],
            per_channel=True,
            reduce_range=not eight_bits,
            weight_type=QuantType.QInt8,
        )


def transpose_weights(graph: Any) -> None:
    """Replace `Transpose(weight)` by the transposed weight: the quantiser only finds weights that are initializers.

    Such nodes occur where one matrix is used twice, as the embedding in a `mixed` transition.
    """
    from onnx import numpy_helper

    weights = {weight.name: weight for weight in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Transpose" and node.input[0] in weights]:
        order = next((list(attribute.ints) for attribute in node.attribute if attribute.name == "perm"), None)
        transposed = numpy_helper.to_array(weights[node.input[0]]).transpose(order)
        graph.initializer.append(numpy_helper.from_array(transposed.copy(), node.output[0]))
        graph.node.remove(node)


def quantise_embedding(source: Path, target: Path) -> None:
    """Store the token embedding as int8 with one scale per row: Gather(E, i) becomes Gather(Q, i) · Gather(s, i).

    All 8 bits are used, because embeddings are not multiplied as integers.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(source)
    graph = model.graph
    tables = {weight.name: weight for weight in graph.initializer if weight.name.endswith(EMBEDDING)}
    nodes, quantised = [], set()
    for node in graph.node:
        if node.op_type != "Gather" or node.input[0] not in tables:
            nodes.append(node)
            continue
        table, indices, output = node.input[0], node.input[1], node.output[0]
        quantised.add(table)
        values, scales, cast = f"{output}_int8", f"{output}_scale", f"{output}_cast"
        nodes += [
            helper.make_node("Gather", [f"{table}_int8", indices], [values], name=f"{node.name}_int8"),
            helper.make_node("Gather", [f"{table}_scale", indices], [scales], name=f"{node.name}_scale"),
            helper.make_node("Cast", [values], [cast], name=f"{node.name}_cast", to=TensorProto.FLOAT),
            helper.make_node("Mul", [cast, scales], [output], name=f"{node.name}_mul"),
        ]
    del graph.node[:]
    graph.node.extend(nodes)
    still_used = {name for node in graph.node for name in node.input}
    for name in quantised:
        weight = tables[name]
        values, scales = quantise_rows(numpy_helper.to_array(weight))
        graph.initializer.append(numpy_helper.from_array(values, f"{name}_int8"))
        graph.initializer.append(numpy_helper.from_array(scales, f"{name}_scale"))
        if name not in still_used:
            graph.initializer.remove(weight)
    onnx.save(model, target)


def quantise_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 values and the scale of each row, (rows, 1).

    >>> quantise_rows(np.array([[1.0, -2.0], [0.0, 0.0]], dtype=np.float32))
    (array([[  64, -127],
           [   0,    0]], dtype=int8), array([[0.01574803],
           [1.        ]], dtype=float32))
    """
    scales = np.abs(table).max(axis=1, keepdims=True) / INT8_MAX
    scales[scales == 0] = 1
    return np.rint(table / scales).astype(np.int8), scales.astype(np.float32)

"""int8 products of activations and weights, and the token embedding in int8 by rows."""

from pathlib import Path
from typing import Any

import numpy as np

INT8_MAX = 127
SEVEN_BITS_MAX = 63
UINT8_MAX = 255
EMBEDDING = "shared.weight"  # suffix of the name of the token embedding
CONTRIBUTED = "com.microsoft"  # domain of onnxruntime's own operators


def quantise(source: Path, target: Path, ranges: dict[str, tuple[float, float]], eight_bits: bool) -> None:
    """Replace x·W by s_x·(q − z_x)·(Q·s_W), with integers q = round(x / s_x) + z_x in 0 … 255 and Q = round(W / s_W).

    Weights have a scale for every output channel. The scale and the zero point of an activation are constants.

    Args:
        ranges: least and largest value of every activation that is multiplied with weights.
        eight_bits: use all 8 bits of a weight instead of 7; see `export_model`.
    """
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load(source)
    graph = model.graph
    transpose_weights(graph)
    del graph.value_info[:]
    weights = {weight.name: numpy_helper.to_array(weight) for weight in graph.initializer if len(weight.dims) == 2}
    products = {product.output[0] for product in products_with_weights(graph)}
    listed = products_with_listed_rows(graph)
    nodes, constants = [], {}
    for node in graph.node:
        if node.output[0] not in products | listed.keys():
            nodes.append(node)
            continue
        activation, weight = node.input
        if f"{activation}_scale" not in constants:
            constants[f"{activation}_scale"], constants[f"{activation}_zero"] = affine(*ranges[activation])
            inputs = [activation, f"{activation}_scale", f"{activation}_zero"]
            name = f"{activation}_uint8"
            nodes.append(helper.make_node("QuantizeLinear", inputs, [name], name=name))
        values, scales = f"{weight}_int8", f"{weight}_scales"
        if node.output[0] in products:
            if values not in constants:
                constants[values], constants[scales] = quantise_columns(weights[weight], eight_bits)
        else:  # rows of the table become columns of the factor
            table, indices = listed[node.output[0]]
            if f"{table}_int8" not in constants:
                columns, constants[f"{table}_scales"] = quantise_columns(weights[table].T, eight_bits)
                constants[f"{table}_int8"] = columns.T.copy()
            rows = f"{node.output[0]}_rows"
            values, scales = f"{node.output[0]}_int8", f"{node.output[0]}_scales"
            nodes += [
                helper.make_node("Gather", [f"{table}_int8", indices], [rows], name=rows),
                helper.make_node("Transpose", [rows], [values], name=values, perm=[1, 0]),
                helper.make_node("Gather", [f"{table}_scales", indices], [scales], name=scales),
            ]
        inputs = [f"{activation}_uint8", values, f"{activation}_scale", scales, f"{activation}_zero"]
        nodes.append(
            helper.make_node("MatMulIntegerToFloat", inputs, list(node.output), name=node.name, domain=CONTRIBUTED)
        )
    del graph.node[:]
    graph.node.extend(used_nodes(nodes, graph.output))
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    used = {name for node in graph.node for name in node.input} | {one.name for one in graph.output}
    remaining = [weight for weight in graph.initializer if weight.name in used]
    del graph.initializer[:]
    graph.initializer.extend(remaining)
    if constants:
        model.opset_import.append(helper.make_opsetid(CONTRIBUTED, 1))
    onnx.save(model, target)


def products_with_weights(graph: Any) -> list[Any]:
    """The nodes that multiply an activation with a matrix of weights."""
    matrices = {weight.name for weight in graph.initializer if len(weight.dims) == 2}
    return [node for node in graph.node if node.op_type == "MatMul" and node.input[1] in matrices]


def products_with_listed_rows(graph: Any) -> dict[str, tuple[str, str]]:
    """Products of an activation with some rows of a table, as x·Eᵀ with the embeddings E of a shortlist: their outputs,
    and the names of the table and of the indices of the rows.
    """
    matrices = {weight.name for weight in graph.initializer if len(weight.dims) == 2}
    made_by = {output: node for node in graph.node for output in node.output}
    found = {}
    for node in graph.node:
        factor = made_by.get(node.input[1]) if node.op_type == "MatMul" else None
        rows = made_by.get(factor.input[0]) if factor is not None and factor.op_type == "Transpose" else None
        if rows is not None and rows.op_type == "Gather" and rows.input[0] in matrices:
            found[node.output[0]] = (rows.input[0], rows.input[1])
    return found


def used_nodes(nodes: list[Any], outputs: Any) -> list[Any]:
    """The nodes that the outputs of a graph depend on."""
    needed, chosen = {one.name for one in outputs}, []
    for node in reversed(nodes):
        if needed & set(node.output):
            needed |= set(node.input)
            chosen.append(node)
    return chosen[::-1]


def affine(lowest: float, highest: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point that map a range, which includes zero, to the integers from 0 to 255.

    >>> affine(-1.0, 4.0)
    (np.float32(0.019607844), np.uint8(51))
    """
    scale = max((highest - lowest) / UINT8_MAX, np.finfo(np.float32).tiny)
    return np.float32(scale), np.uint8(round(-lowest / scale))


def quantise_columns(matrix: np.ndarray, eight_bits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 values of 7 or 8 bits, and the scale of each column."""
    largest = INT8_MAX if eight_bits else SEVEN_BITS_MAX
    scales = np.abs(matrix).max(axis=0) / largest
    scales[scales == 0] = 1
    return np.rint(matrix / scales).astype(np.int8), scales.astype(np.float32)


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

"""One file of weights for all graphs of a folder.

The graphs of an export share most of their weights: `sentence` repeats those of `source`, `transition` and `head`, and
`source` and `canvas` both embed tokens. ONNX allows the data of a tensor to be in another file, at an offset, so every
distinct tensor is written once.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHARED_WEIGHTS = "weights.onnx.data"
SMALLEST = 1024  # bytes; graph optimisations of onnxruntime need small constants inside the graph
ALIGNMENT = 64  # bytes; a cache line


def share_weights(folder: Path) -> None:
    """Move the large weights of every graph in the folder to one file in which each occurs once."""
    import onnx
    from onnx import StringStringEntryProto, TensorProto, numpy_helper

    offsets: dict[str, int] = {}
    with (folder / SHARED_WEIGHTS).open("wb") as file:
        for path in sorted(folder.glob("*.onnx")):
            model = onnx.load(path)
            for weight in all_initializers(model.graph):
                data = numpy_helper.to_array(weight).tobytes()
                if len(data) < SMALLEST:
                    continue
                digest = hashlib.sha256(data).hexdigest()
                if digest not in offsets:
                    file.write(bytes(-file.tell() % ALIGNMENT))
                    offsets[digest] = file.tell()
                    file.write(data)
                place = {"location": SHARED_WEIGHTS, "offset": offsets[digest], "length": len(data)}
                entries = [StringStringEntryProto(key=key, value=str(value)) for key, value in place.items()]
                external = TensorProto(
                    name=weight.name,
                    dims=weight.dims,
                    data_type=weight.data_type,
                    data_location=TensorProto.EXTERNAL,
                    external_data=entries,
                )
                weight.CopyFrom(external)
            onnx.save(model, path)


def all_initializers(graph: Any) -> Iterator[Any]:
    """The weights of a graph and of the graphs inside its nodes, such as the body of a loop."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from all_initializers(attribute.g)

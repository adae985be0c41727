"""Ranges of activations, measured on sentences, for the int8 products of an export.

The scale of an activation is a constant of an int8 graph. So a sentence does not depend on the others of its batch, as
it would with scales of the largest value in a tensor, and nothing has to be searched at run time. Values beyond the
measured range are cut off.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ..evaluation.translation import encode_texts
from ..models.deqnar.refinement_deqnar import Canvas
from ..models.deqnar.text import longest_source
from .quantization import products_with_listed_rows, products_with_weights, transpose_weights
from .runtime import DeqNarOnnxModel, Session

Sample = dict[str, numpy.ndarray]  # inputs of one call of a graph
Ranges = dict[str, tuple[float, float]]  # of activations by name

# Used without calibration data; English, of several lengths, with numbers, names and unusual spellings.
SENTENCES = (
    "Hello!",
    "Thank you very much.",
    "What time is it?",
    "She is reading a book.",
    "I don't know what to say.",
    "Where is the nearest train station?",
    "My brother has been learning German for three years.",
    "Could you please tell me how to get to the airport?",
    "He would have come if you had asked him.",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "PLEASE DO NOT TOUCH THE PAINTINGS!",
    "On 3 October 1990, at 12:45, about 2,500 people stood in front of the building.",
    "Mary and Tom went to Boston with Mr. Jackson, who used to live there.",
    "The meeting was moved to Thursday, 14 May, because 3 of the 12 members could not come.",
    "The weather was so bad that nobody wanted to leave the house, not even the children or the dog.",
    "If it rains tomorrow we will stay at home, play cards with the children, and cook something warm in the evening.",
    "I bought two apples, five bananas and a bottle of water, but when I came home, I noticed that I had left all of "
    "it in the shop, and so I had to go back.",
)


class RecordingSession(Session):
    """A graph that keeps copies of the inputs of its calls."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, threads=1)
        self.samples: list[Sample] = []

    def __call__(self, inputs: dict[str, Tensor], outputs: list[str] | None = None) -> list[Tensor]:
        self.samples.append({name: tensor.numpy().copy() for name, tensor in inputs.items()})
        return super().__call__(inputs, outputs)


def record_inputs(
    model: Any, tokenizer: Any, folder: Path, limits: dict[str, int], sentences: list[str]
) -> dict[str, list[Sample]]:
    """Inputs of every graph of an fp32 export while it translates sentences, one at a time.

    Every canvas is solved as it is laid out, and, if the model can refine a canvas, once more with every other token
    revealed.

    Args:
        model: in torch.
        folder: the graphs.
        limits: as in a manifest.
    """
    sessions = {path.stem: RecordingSession(path) for path in folder.glob("*.onnx")}
    core = model.model
    exported = DeqNarOnnxModel(
        model.config,
        model.generation_config,
        dict(sessions),
        {"precision": "fp32", "limits": limits},
        core.shortlist,
        core.ngrams,
    )
    longest = longest_source(model.config)
    inputs_of_sentences = []
    with torch.inference_mode():
        for sentence in sentences:
            batch = encode_texts(tokenizer, [sentence], longest)
            inputs_of_sentences.append({"input_ids": batch["input_ids"].numpy()})
            source = exported.model.prepare(**batch, shortlist=core.shortlist is not None)
            canvas = exported.model.lay_out(source)
            tokens = exported.read_tokens(exported.model.solve(source, canvas).value, source.words)
            if not exported.length_model.reads_once:
                revealed = torch.arange(tokens.shape[1]) % 2 == 0
                exported.model.solve(source, Canvas(torch.where(revealed, tokens, canvas.tokens), canvas.mask))
    found = {name: session.samples for name, session in sessions.items()}
    # The parts of the sentence graph compute the same from inputs of other names.
    row = numpy.ones(1)
    figures = {"residual": row.astype(numpy.float32), "residual_before": row.astype(numpy.float32)}
    figures |= {"nfe": row.astype(numpy.int64), "active": row.astype(bool), "tol": numpy.zeros((), numpy.float32)}
    found["opening"] = inputs_of_sentences
    found["step"] = [{"start": sample["state"], **figures, **sample} for sample in found["transition"]]
    found["reading"] = found["head"]
    return found


def activation_ranges(path: Path, samples: list[Sample]) -> Ranges:
    """Least and largest value of every activation that is multiplied with weights."""
    import onnx
    from onnx import TensorProto, helper

    from .runtime import import_onnxruntime

    onnxruntime = import_onnxruntime()
    model = onnx.load(path)
    transpose_weights(model.graph)
    del model.graph.value_info[:]
    listed = products_with_listed_rows(model.graph)
    activations = {product.input[0] for product in products_with_weights(model.graph)}
    activations |= {node.input[0] for node in model.graph.node if node.output[0] in listed}
    given = {one.name for one in model.graph.input}
    computed = sorted(activations - given)
    known = {one.name for one in model.graph.output}
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in computed if name not in known
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # all names remain
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    needed = {one.name for one in session.get_inputs()}
    lowest: dict[str, float] = defaultdict(float)
    highest: dict[str, float] = defaultdict(float)  # zero is always part of the range
    for sample in samples:
        values = dict(sample)
        if computed:
            inputs = {name: value for name, value in sample.items() if name in needed}
            values |= dict(zip(computed, session.run(computed, inputs), strict=True))
        for name in activations:
            lowest[name] = min(lowest[name], float(values[name].min()))
            highest[name] = max(highest[name], float(values[name].max()))
    return {name: (lowest[name], highest[name]) for name in sorted(activations)}

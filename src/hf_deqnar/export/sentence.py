"""The sentence graph: translates a single sentence from tokens to tokens in one call, for low latency.

For one sentence the overhead of calling several graphs is as long as the graphs themselves. This graph joins them: a
loop repeats z ← f(z) until the residual is below the tolerance. There is a single row and no padding, hence no masks.
The loop is Picard iteration, which all solvers are for two evaluations; it ends early if the residual does not
decrease, then the runtime uses the general solver. As in `graphs.py`, the parts call `encode_source`, `inject` and the
transition instead of `prepare`, `lay_out` and `solve`, whose checks of values cannot be exported.

    opening   tokens → z = 0, u, keys and values of every decoder layer
    step      z, u, keys, values → f(z), ‖f(z) − z‖ / ‖f(z)‖
    reading   features → the most likely tokens, and the inputs of a beam search
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..models.deqnar.lengths import LENGTH_MODELS
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
from ..models.deqnar.shortlist import Words, never_written
from ..models.deqnar.transition_deqnar import Context, transition_class

PARTS = ("opening", "step", "reading")
READ = ["tokens", "log_probabilities", "candidates"]
NO_RESIDUAL = float("inf")  # before the first evaluation
WIDEST_BEAM = 5  # largest beam supported by the sentence graph
CANDIDATES = 2 * WIDEST_BEAM + 1  # per position, including the blank


def has_sentence_graph(config: Any) -> bool:
    """Whether the source length determines the canvas length, and tokens are predicted from the state."""
    return LENGTH_MODELS[config.length].has_own_alignment and transition_class(config).state_is_features


class OpeningGraph(nn.Module):
    """tokens → the initial state, u, key and value of every decoder layer."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        core = self.core
        source = core.encode_source(input_ids, None)
        shape = (1, input_ids.shape[1] * core.config.upsampling)
        canvas = torch.full(shape, core.config.mask_token_id, dtype=torch.long)
        canvas_mask, source_mask = (torch.ones_like(tokens, dtype=torch.bool) for tokens in (canvas, input_ids))
        injection = core.inject(canvas, canvas_mask, source.encoder_states, source_mask)
        return (torch.zeros_like(injection), injection, *(part for pair in source.keys_values for part in pair))


class StepGraph(nn.Module):
    """z, u, keys, values and, for a mixed model with a shortlist, words → f(z) and its residual."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, state: Tensor, injection: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        core, count = self.core, 2 * len(self.core.transition.layers)
        memory, words = list(zip(rest[:count:2], rest[1:count:2], strict=True)), rest[count:]
        embedding = core.shared.weight[words[0]] if words else core.shared.weight
        listed = Words(words[0], None) if words else None
        fields = (embedding, core.embedding_scale, listed, core.link_head)
        context = Context(injection, None, memory, None, None, None, *fields)
        value = core.transition(state, context)
        return value, (value - state).norm() / value.norm().clamp_min(1e-12)


class ReadingGraph(nn.Module):
    """features and, for a model with a shortlist, words → the most likely token of every position; for a beam search
    also all log-probabilities and the indices of the largest. Unused outputs are not computed.
    """

    def __init__(self, model: DeqNarForConditionalGeneration) -> None:
        super().__init__()
        self.weight = model.lm_head.weight
        bias = torch.zeros(model.config.vocab_size)
        bias[never_written(model.config)] = float("-inf")
        self.register_buffer("bias", bias)

    def logits(self, features: Tensor, words: Tensor | None) -> Tensor:
        """Logits of all tokens or of the shortlist; −∞ for tokens that are never generated."""
        if words is None:
            return functional.linear(features, self.weight, self.bias)
        return functional.linear(features, self.weight[words], self.bias[words])

    def forward(self, features: Tensor, words: Tensor | None = None) -> tuple[Tensor, ...]:
        logits = self.logits(features, words)
        best = logits.argmax(dim=-1)
        candidates = logits.topk(min(CANDIDATES, len(self.weight)), dim=-1).indices
        return best if words is None else words[best], logits.log_softmax(dim=-1), candidates


class GraphReadingGraph(ReadingGraph):
    """`ReadingGraph`, and log E and the log-probability of the most likely token, from which a path is read."""

    def __init__(self, model: DeqNarForConditionalGeneration) -> None:
        super().__init__(model)
        self.link_head = model.model.link_head

    def forward(self, features: Tensor, words: Tensor | None = None) -> tuple[Tensor, ...]:
        tokens, log_probs, candidates = super().forward(features, words)
        return tokens, log_probs, candidates, self.link_head(features, None), log_probs.amax(dim=-1)


def reading_graph(model: DeqNarForConditionalGeneration) -> tuple[ReadingGraph, list[str]]:
    """The graph that reads features, and the names of its outputs."""
    if model.model.link_head is None:
        return ReadingGraph(model), READ
    return GraphReadingGraph(model), [*READ, "log_links", "scores"]


def join_parts(folder: Path, target: Path, repeats: bool) -> None:
    """Join the three graphs in a folder to one.

    Its inputs are `input_ids`, `words` of a model with a shortlist and, if `repeats`, `max_nfe` and `tol`; its outputs
    `tokens`, `log_probabilities`, `candidates`, of a graph `log_links` and `scores`, `residual` and, if `repeats`,
    `residual_before` and `nfe`.
    """
    import onnx
    from onnx import helper

    models = {name: onnx.load(folder / f"{name}.onnx") for name in PARTS}
    parts = [private_names(model.graph, name) for name, model in models.items()]
    opening, step, reading = parts
    inputs = list({one.name: one for part in parts for one in part.input if is_graph_input(one.name)}.values())
    outputs, middle, weights = [*reading.output, scalar("residual", "FLOAT")], list(step.node), list(step.initializer)
    if repeats:
        inputs += [scalar("max_nfe", "INT64"), scalar("tol", "FLOAT")]
        outputs += [scalar("residual_before", "FLOAT"), scalar("nfe", "INT64")]
        loop, weights = repeated(step)
        middle = [loop]
    graph = helper.make_graph(
        [*opening.node, *middle, *reading.node],
        "sentence",
        inputs,
        outputs,
        [*opening.initializer, *weights, *reading.initializer],
    )
    opsets = {one.domain: one.version for model in models.values() for one in model.opset_import}
    joined = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=max(model.ir_version for model in models.values()),
    )
    onnx.save(joined, target)


def repeated(step: Any) -> tuple[Any, list[Any]]:
    """A loop over the step, from `start` to `features`, and its initial constants.

    It repeats while the residual decreases and is not below the tolerance, for at most `max_nfe` evaluations.
    """
    from onnx import TensorProto, helper

    body = helper.make_graph(
        [
            *step.node,
            helper.make_node("GreaterOrEqual", ["residual_now", "tol"], ["moving"]),
            helper.make_node("Less", ["residual_now", "residual_then"], ["falling"]),
            helper.make_node("And", ["moving", "falling"], ["again"]),
            helper.make_node("Add", ["count_then", "one"], ["count_now"]),
            helper.make_node("Identity", ["residual_then"], ["residual_kept"]),
        ],
        "evaluation",
        [
            scalar("evaluation", "INT64"),
            scalar("started", "BOOL"),
            *carried("state", "residual_then", "residual_older", "count_then"),
        ],
        [scalar("again", "BOOL"), *carried("value", "residual_now", "residual_kept", "count_now")],
        list(step.initializer),
    )
    loop = helper.make_node(
        "Loop",
        ["max_nfe", "yes", "start", "no_residual", "no_residual", "zero"],
        ["features", "residual", "residual_before", "nfe"],
        body=body,
    )
    constants = [
        helper.make_tensor("one", TensorProto.INT64, [], [1]),
        helper.make_tensor("zero", TensorProto.INT64, [], [0]),
        helper.make_tensor("no_residual", TensorProto.FLOAT, [], [NO_RESIDUAL]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
    ]
    return loop, constants


def scalar(name: str, kind: str) -> Any:
    """A scalar input or output of a graph."""
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.DataType.Value(kind), [])


def is_graph_input(name: str) -> bool:
    """Whether an input of a part is an input of the joined graph; the others come from the preceding part."""
    return name in ("input_ids", "words")


def carried(state: str, residual: str, residual_before: str, count: str) -> list[Any]:
    """Loop-carried values; the shape of the state is dynamic."""
    from onnx import TensorProto, helper

    shapeless = helper.make_tensor_value_info(state, TensorProto.FLOAT, None)
    return [shapeless, scalar(residual, "FLOAT"), scalar(residual_before, "FLOAT"), scalar(count, "INT64")]


def private_names(graph: Any, part: str) -> Any:
    """Prefix all names except inputs and outputs with the name of the part."""
    public = {one.name for one in (*graph.input, *graph.output)}

    def prefixed(name: str) -> str:
        return name if not name or name in public else f"{part}/{name}"

    for node in graph.node:
        node.input[:], node.output[:] = list(map(prefixed, node.input)), list(map(prefixed, node.output))
        node.name = f"{part}/{node.name}"
    for weight in graph.initializer:
        weight.name = prefixed(weight.name)
    return graph

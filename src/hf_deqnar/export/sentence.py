"""The sentence graph: translates sentences of one length from tokens to tokens in one call.

For one sentence the overhead of calling several graphs is as long as the graphs themselves. This graph joins them: a
loop repeats z ← f(z) for every row until its residual is below the tolerance. All rows have the same length, hence
there are neither padding nor masks. The loop is Picard iteration, which all solvers are for two evaluations; for a row
it ends early if the residual does not decrease, then the runtime uses the general solver. As in `graphs.py`, the parts
call `encode_source`, `inject` and the transition instead of `prepare`, `lay_out` and `solve`, whose checks of values
cannot be exported.

    opening   tokens → z = 0 and the figures of every row, u, keys and values of every decoder layer
    step      z, figures, u, keys, values → f(z) and the figures of every row that is active, whether any still is
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
CARRIED = ("state", "residual", "residual_before", "nfe", "active")  # through the loop
KINDS_CARRIED = ("FLOAT", "FLOAT", "FLOAT", "INT64", "BOOL")
FIGURES = {"residual": "FLOAT", "residual_before": "FLOAT", "nfe": "INT64"}  # outputs of the joined graph
STARTS = ("start", "no_residual", "no_residual_before", "no_nfe", "all_active")  # their initial values
READ = ["tokens", "log_probabilities", "candidates"]
NO_RESIDUAL = float("inf")  # before the first evaluation
WIDEST_BEAM = 5  # largest beam supported by the sentence graph
CANDIDATES = 2 * WIDEST_BEAM + 1  # per position, including the blank


def has_sentence_graph(config: Any) -> bool:
    """Whether the source length determines the canvas length, and tokens are predicted from the state."""
    return LENGTH_MODELS[config.length].has_own_alignment and transition_class(config).state_is_features


class OpeningGraph(nn.Module):
    """tokens → the initial state and figures, u, key and value of every decoder layer."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        core = self.core
        source = core.encode_source(input_ids, None)
        shape = (input_ids.shape[0], input_ids.shape[1] * core.config.upsampling)
        canvas = torch.full(shape, core.config.mask_token_id, dtype=torch.long)
        canvas_mask, source_mask = (torch.ones_like(tokens, dtype=torch.bool) for tokens in (canvas, input_ids))
        injection = core.inject(canvas, canvas_mask, source.encoder_states, source_mask)
        residual = torch.full(shape[:1], NO_RESIDUAL)
        nfe = torch.zeros(shape[:1], dtype=torch.long)
        start = (torch.zeros_like(injection), residual, residual.clone(), nfe, nfe == 0)
        return (*start, injection, *(part for pair in source.keys_values for part in pair))


class SingleStepGraph(nn.Module):
    """z, u, keys, values and, if tokens of a shortlist are predicted, words → f(z)."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, state: Tensor, injection: Tensor, *rest: Tensor) -> Tensor:
        core, count = self.core, 2 * len(self.core.transition.layers)
        memory, words = list(zip(rest[:count:2], rest[1:count:2], strict=True)), rest[count:]
        embedding = functional.embedding(words[0], core.shared.weight) if words else core.shared.weight
        listed = Words(*words) if words else None
        fields = (embedding, core.embedding_scale, listed, core.link_head)
        return core.transition(state, Context(injection, None, memory, None, None, None, *fields))


class StepGraph(SingleStepGraph):
    """One evaluation for the rows that are active; the others keep their state and figures.

    A row stays active while its residual ‖f(z) − z‖ / ‖f(z)‖ is not below the tolerance and decreases.
    """

    def forward(
        self,
        state: Tensor,
        residual: Tensor,
        residual_before: Tensor,
        nfe: Tensor,
        active: Tensor,
        tol: Tensor,
        injection: Tensor,
        *rest: Tensor,
    ) -> tuple[Tensor, ...]:
        value = super().forward(state, injection, *rest)
        measured = (value - state).norm(dim=(1, 2)) / value.norm(dim=(1, 2)).clamp_min(1e-12)
        following = active & (measured >= tol) & (measured < residual)
        return (
            torch.where(active[:, None, None], value, state),
            torch.where(active, measured, residual),
            torch.where(active, residual, residual_before),
            nfe + active.long(),
            following,
            following.any(),
        )


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

    def logits(self, features: Tensor, words: Tensor | None, outside: Tensor | None) -> Tensor:
        """Logits of all tokens or of the shortlist; −∞ for tokens that are never generated or not listed."""
        if words is None:
            return functional.linear(features, self.weight, self.bias)
        listed = functional.embedding(words, self.weight)
        return Words(words, outside).hide(functional.linear(features, listed, self.bias.index_select(0, words)))

    def forward(
        self, features: Tensor, words: Tensor | None = None, outside: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        logits = self.logits(features, words, outside)
        best = logits.argmax(dim=-1)
        candidates = logits.topk(min(CANDIDATES, len(self.weight)), dim=-1).indices
        return best if words is None else words[best], logits.log_softmax(dim=-1), candidates


class GraphReadingGraph(ReadingGraph):
    """`ReadingGraph`, and log E and the log-probability of the most likely token, from which a path is read."""

    def __init__(self, model: DeqNarForConditionalGeneration) -> None:
        super().__init__(model)
        self.link_head = model.model.link_head

    def forward(
        self, features: Tensor, words: Tensor | None = None, outside: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        tokens, log_probs, candidates = super().forward(features, words, outside)
        return tokens, log_probs, candidates, self.link_head(features, None), log_probs.amax(dim=-1)


def reading_graph(model: DeqNarForConditionalGeneration) -> tuple[ReadingGraph, list[str]]:
    """The graph that reads features, and the names of its outputs."""
    if model.model.link_head is None:
        return ReadingGraph(model), READ
    return GraphReadingGraph(model), [*READ, "log_links", "scores"]


def join_parts(folder: Path, target: Path, repeats: bool) -> None:
    """Join the three graphs in a folder to one.

    Its inputs are `input_ids`, `words` and `outside` of a model with a shortlist and, if `repeats`, `max_nfe` and
    `tol`; its outputs `tokens`, `log_probabilities`, `candidates`, of a graph `log_links` and `scores` and, if
    `repeats`, `residual`, `residual_before` and `nfe` of every row.
    """
    import onnx
    from onnx import helper

    models = {name: onnx.load(folder / f"{name}.onnx") for name in PARTS}
    parts = [private_names(model.graph, name) for name, model in models.items()]
    opening, step, reading = parts
    inputs = list({one.name: one for part in parts for one in part.input if is_graph_input(one.name)}.values())
    outputs, middle, weights = list(reading.output), list(step.node), list(step.initializer)
    if repeats:
        inputs.append(value_info("max_nfe", "INT64", []))
        outputs += [value_info(name, kind, ["rows"]) for name, kind in FIGURES.items()]
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
    """A loop over the step, from `start` to `features`, and its initial constant.

    It repeats while a row is active, for at most `max_nfe` evaluations.
    """
    from onnx import TensorProto, helper

    body = helper.make_graph(
        list(step.node),
        "evaluation",
        [value_info("evaluation", "INT64", []), value_info("started", "BOOL", []), *carried("")],
        [value_info("again", "BOOL", []), *carried("next_")],
        list(step.initializer),
    )
    loop = helper.make_node("Loop", ["max_nfe", "yes", *STARTS], ["features", *FIGURES, "still_active"], body=body)
    return loop, [helper.make_tensor("yes", TensorProto.BOOL, [], [True])]


def value_info(name: str, kind: str, shape: list[str] | None) -> Any:
    """An input or output of a graph; without a shape if that is None."""
    from onnx import TensorProto, helper

    return helper.make_tensor_value_info(name, TensorProto.DataType.Value(kind), shape)


def is_graph_input(name: str) -> bool:
    """Whether an input of a part is an input of the joined graph; the others come from the preceding part."""
    return name in ("input_ids", "words", "outside", "tol")


def carried(prefix: str) -> list[Any]:
    """Values carried through the loop; their shapes are dynamic."""
    return [value_info(f"{prefix}{name}", kind, None) for name, kind in zip(CARRIED, KINDS_CARRIED, strict=True)]


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

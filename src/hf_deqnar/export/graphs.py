"""A model as a few ONNX graphs.

    source      encoder outputs: cross-attention keys and values, memory (if copied to the canvas), length logits
    canvas      the injection u: once per pass
    transition  f(z) from z, u, keys, values and masks: once per evaluation (F(z + u, x) of an `explicit` model)
    feedback    only of `explicit` models: features → expected embeddings (a learned W·z is part of the transition)
    head        features → the most likely token, its log-probability, and the log-probabilities of all tokens
    input_head  only of models with an input predictor
    links       only of models with length='dag': features and canvas mask → log E of the links
    sentence    only of CTC models and graphs that are not `explicit`: one graph for a single sentence (`sentence.py`)

In a model with a shortlist, graphs that predict tokens also take the shortlist as input.
Rows, source and canvas are dynamic axes of all graphs. The runtime that solves with them is in `runtime.py`; its core
has the same `prepare`, `lay_out` and `solve` as a model in torch. Graphs call what these consist of: `encode_source`,
`inject` and the transition. A graph can contain neither checks of values nor a solver.
"""

import copy
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.layers_deqnar import Positions, sinusoidal_positions
from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration, DeqNarModel
from ..models.deqnar.shortlist import Words
from ..models.deqnar.stability import remove_rescaling
from ..models.deqnar.text import longest_source
from ..models.deqnar.transition_deqnar import Context
from ..utils.locks import try_lock
from .calibration import SENTENCES, Ranges, activation_ranges, record_inputs
from .manifest import NGRAMS, PRECISIONS, SHORTLIST, is_export, write_manifest
from .messages import quiet
from .quantization import quantise, quantise_embedding
from .sentence import (
    CANDIDATES,
    CARRIED,
    PARTS,
    STARTS,
    OpeningGraph,
    ReadingGraph,
    SingleStepGraph,
    StepGraph,
    has_sentence_graph,
    join_parts,
    reading_graph,
)
from .shared_weights import share_weights

OPSET = 18
# In int8, f(z) is discontinuous because of rounding. Within 20 evaluations a Tatoeba model reached 5e-3 on none of 322
# validation sentences, 1e-2 on 72 % and 2e-2 on 95 %; the last takes as many evaluations as 1e-2 does in fp32. BLEU is
# the same for all three.
INT8_TOL = 2e-2
# `feedback` is not quantised: the small probabilities of a softmax would all be zero in 8 bits.
QUANTISED = ("source", "transition", "head", *PARTS)
EMBEDDING_TOKENS = ("source", "canvas", "opening")


class SourceGraph(nn.Module):
    """tokens, mask → [length logits], [memory], key and value of every decoder layer."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, input_ids: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        source = self.core.encode_source(input_ids, source_mask)
        outputs = [] if source.length_logits is None else [source.length_logits]
        if self.core.config.copies_source:
            outputs.append(source.encoder_states)
        return (*outputs, *(tensor for pair in source.keys_values for tensor in pair))


class CanvasGraph(nn.Module):
    """canvas tokens → u; with a copied source also the canvas mask, the memory and its mask."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, canvas: Tensor, *copied: Tensor) -> Tensor:
        return self.core.inject(canvas, *(copied or (None, None, None)))


class TransitionGraph(nn.Module):
    """z, u, masks, keys and values → f(z)."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(
        self, state: Tensor, injection: Tensor, canvas_mask: Tensor, memory_mask: Tensor, *rest: Tensor
    ) -> Tensor:
        core = self.core
        count = 2 * len(core.transition.layers)
        memory = list(zip(rest[:count:2], rest[1:count:2], strict=True))
        context = Context(
            injection,
            canvas_mask,
            memory,
            memory_mask,
            None,
            None,
            *prediction_fields(core, rest[count:]),
            links=core.link_head,
        )
        evaluate = core.transition if core.transition.state_is_features else core.transition.features
        return evaluate(state, context)


def prediction_fields(core: DeqNarModel, words: tuple[Tensor, ...]) -> tuple[Tensor, float, Words | None]:
    """Prediction fields of a context: the embedding of the vocabulary or shortlist, its scale, the shortlist."""
    if not words:
        return core.shared.weight, core.embedding_scale, None
    return functional.embedding(words[0], core.shared.weight), core.embedding_scale, Words(*words)


class FeedbackGraph(nn.Module):
    """features → E[emb]: the next state of an `explicit` model."""

    def __init__(self, core: DeqNarModel) -> None:
        super().__init__()
        self.core = core

    def forward(self, features: Tensor, *words: Tensor) -> Tensor:
        core = self.core
        context = Context(features, None, [], None, None, None, *prediction_fields(core, words))
        return core.transition.next_state(features, context)


class HeadGraph(ReadingGraph):
    """features → tokens, their log-probabilities, log-probabilities of the vocabulary or shortlist.

    The runtime returns the last only if it is requested.
    """

    def forward(
        self, features: Tensor, words: Tensor | None = None, outside: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(features, words, outside)
        log_probabilities, best = logits.log_softmax(dim=-1), logits.argmax(dim=-1)
        return best if words is None else words[best], log_probabilities.amax(dim=-1), log_probabilities


class Positional(nn.Module):
    """A module with positional inputs, because torch.export needs dynamic shapes nested like the parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.module(*inputs)


@dataclass
class Graph:
    """Description of one ONNX file: a module, its inputs by name (example and dynamic axes), its output names."""

    module: nn.Module
    inputs: dict[str, tuple[Tensor, dict[int, str]]]
    outputs: list[str]


def check_exportable(config: Any) -> None:
    """Raise ValueError if a model cannot be exported."""
    if not is_deqnar(config):
        raise ValueError(f"Only deqnar models can be exported, not one of type {config.model_type}.")
    if config.is_recurrent:
        raise ValueError(
            f"architecture='{config.architecture}' cannot be exported: packed sequences are not supported by ONNX; "
            "export a model with architecture='transformer'."
        )


def frozen_copy(model: DeqNarForConditionalGeneration) -> DeqNarForConditionalGeneration:
    """The model in fp32 with exportable operations: no weight norm, tables of positions, eager attention."""
    weights, config = model.state_dict(), copy.deepcopy(model.config)
    with torch.random.fork_rng(devices=[]):  # a deep copy of rescaled layers would share their class with the original
        model = type(model)(config).float().eval()
    model.load_state_dict(weights)
    model.config._attn_implementation = "eager"  # fewer nodes than SDPA: 137 instead of 194 for 3 layers
    remove_rescaling(model.model.transition)
    for part in model.modules():
        if isinstance(part, Positions) and part.table is None:
            size = (model.config.max_position_embeddings, model.config.d_model)
            part.table = nn.Embedding.from_pretrained(sinusoidal_positions(*size, torch.device("cpu"), torch.float32))
    return model


def graphs_of(model: DeqNarForConditionalGeneration) -> dict[str, Graph]:
    """The graphs of a frozen copy, by name. Example sizes differ, so that torch.export identifies no axes."""
    core, config = model.model, model.config
    rows, source, canvas, width, heads = 2, 5, 7, config.d_model, config.decoder_attention_heads
    on_source, on_canvas = {0: "rows", 1: "source"}, {0: "rows", 1: "canvas"}
    tokens = torch.full((rows, source), config.mask_token_id)
    source_mask = (torch.ones(rows, source, dtype=torch.bool), on_source)
    hidden = (torch.zeros(rows, canvas, width), on_canvas)
    projection = (torch.zeros(rows, heads, source, width // heads), {0: "rows", 2: "source"})
    projected = {
        f"{kind}_{layer}": projection for layer in range(len(core.transition.layers)) for kind in ("key", "value")
    }
    read = [] if core.length_head is None else ["length_logits"]
    copied = {}
    if config.copies_source:
        read.append("memory")
        copied = {
            "canvas_mask": (torch.ones(rows, canvas, dtype=torch.bool), on_canvas),
            "memory": (torch.zeros(rows, source, width), on_source),
            "source_mask": source_mask,
        }
    masks = {
        "canvas_mask": (torch.zeros(rows, 1, 1, canvas), {0: "rows", 3: "canvas"}),
        "memory_mask": (torch.zeros(rows, 1, 1, source), {0: "rows", 3: "source"}),
    }
    words = {}
    if core.shortlist is not None:
        listed = torch.arange(11)  # example
        words = {
            "words": (listed, {0: "words"}),
            "outside": (torch.zeros(rows, 1, len(listed), dtype=torch.bool), {0: "rows", 2: "words"}),
        }
    predicting = words if core.transition.predicts_tokens and core.transition.state_is_features else {}
    scored = ["tokens", "scores", "log_probabilities"]
    blank = torch.full((rows, canvas), config.mask_token_id)
    graphs = {
        "source": Graph(
            SourceGraph(core), {"input_ids": (tokens, on_source), "source_mask": source_mask}, [*read, *projected]
        ),
        "canvas": Graph(CanvasGraph(core), {"canvas": (blank, on_canvas), **copied}, ["injection"]),
        "transition": Graph(
            TransitionGraph(core),
            {"state": hidden, "injection": hidden, **masks, **projected, **predicting},
            ["value"],
        ),
        "head": Graph(HeadGraph(model), {"features": hidden, **words}, scored),
    }
    if not core.transition.state_is_features:
        graphs["feedback"] = Graph(FeedbackGraph(core), {"features": hidden, **words}, ["value"])
    if core.input_head is not None:
        graphs["input_head"] = Graph(core.input_head, {"features": hidden}, ["odds"])
    if core.link_head is not None:
        positions = (torch.ones(rows, canvas, dtype=torch.bool), on_canvas)
        graphs["links"] = Graph(core.link_head, {"features": hidden, "canvas_mask": positions}, ["log_links"])
    return graphs | sentence_parts(model)


def sentence_parts(model: DeqNarForConditionalGeneration) -> dict[str, Graph]:
    """The graphs that `join_parts` joins, for sentences of one length; empty if the model has no sentence graph."""
    core, config = model.model, model.config
    if not has_sentence_graph(config):
        return {}
    rows, source, width, heads = 2, 5, config.d_model, config.decoder_attention_heads
    tokens = (torch.full((rows, source), config.mask_token_id), {0: "rows", 1: "source"})
    hidden = (torch.zeros(rows, 7, width), {0: "rows", 1: "canvas"})
    projection = (torch.zeros(rows, heads, source, width // heads), {0: "rows", 2: "source"})
    projected = {
        f"{kind}_{layer}": projection for layer in range(len(core.transition.layers)) for kind in ("key", "value")
    }
    words = {}
    if core.shortlist is not None:
        listed = torch.arange(2 * CANDIDATES)
        words = {
            "words": (listed, {0: "words"}),
            "outside": (torch.zeros(rows, 1, len(listed), dtype=torch.bool), {0: "rows", 2: "words"}),
        }
    predicting = words if core.transition.predicts_tokens and core.transition.state_is_features else {}
    if config.seeks_equilibrium:
        figures = {
            "residual": (torch.zeros(rows), {0: "rows"}),
            "residual_before": (torch.zeros(rows), {0: "rows"}),
            "nfe": (torch.zeros(rows, dtype=torch.long), {0: "rows"}),
            "active": (torch.ones(rows, dtype=torch.bool), {0: "rows"}),
        }
        step = Graph(
            StepGraph(core),
            {
                "state": hidden,
                **figures,
                "tol": (torch.tensor(0.0), {}),
                "injection": hidden,
                **projected,
                **predicting,
            },
            [f"next_{name}" for name in CARRIED] + ["again"],
        )
    else:
        inputs = {"start": hidden, "injection": hidden, **projected, **predicting}
        step = Graph(SingleStepGraph(core), inputs, ["features"])
    reading, outputs = reading_graph(model)
    return {
        "opening": Graph(OpeningGraph(core), {"input_ids": tokens}, [*STARTS, "injection", *projected]),
        "step": step,
        "reading": Graph(reading, {"features": hidden, **words}, outputs),
    }


def write_graph(graph: Graph, path: Path) -> None:
    """Write one ONNX file that includes its weights."""
    import onnx

    examples = tuple(
        example.clone() for example, _ in graph.inputs.values()
    )  # torch.export merges inputs that are the same tensor
    names = {name for _, axes in graph.inputs.values() for name in axes.values()}
    sizes = {name: torch.export.Dim(name) for name in names}
    shapes = tuple({axis: sizes[name] for axis, name in axes.items()} for _, axes in graph.inputs.values())
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            Positional(graph.module).eval(),
            examples,
            dynamic_shapes=(shapes,),
            input_names=list(graph.inputs),
            output_names=graph.outputs,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    proto = program.model_proto
    remove_metadata(proto.graph)
    onnx.save(proto, path)


def remove_metadata(graph: Any) -> None:
    """Remove metadata about the origin of nodes, 80 % of a graph without weights."""
    for part in (graph, *graph.node, *graph.initializer, *graph.input, *graph.output, *graph.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")


def check_packages() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        if find_spec(name) is None:
            raise ImportError(f"Exporting needs the package {name}: pip install 'hf_deqnar[onnx]'.")


def export_model(
    model: DeqNarForConditionalGeneration,
    tokenizer: Any,
    output: str | Path,
    precisions: tuple[str, ...] = PRECISIONS,
    eight_bits: bool = False,
    sentences: Sequence[str] = SENTENCES,
) -> dict[str, Path]:
    """Write `output/fp32` and `output/int8`, each complete: graphs, configuration, tokenizer, manifest.

    Args:
        sentences: of the source language; the ranges of activations in int8 graphs are measured on them.
        eight_bits: use all 8 bits of int8 weights; only for processors with VNNI instructions. Others add pairs of
            8-bit products in 16 bits, which can overflow and corrupt a translation; by default weights have 7 bits.

    Returns:
        The folder of each precision.
    """
    check_packages()
    check_exportable(model.config)
    output = Path(output)
    for precision in precisions:
        target = output / precision
        if target.exists() and not (target.is_dir() and (is_export(target) or not any(target.iterdir()))):
            raise FileExistsError(f"{target} exists and is not an export; name another folder.")
    output.mkdir(parents=True, exist_ok=True)
    with try_lock(output / "unfinished.lock") as acquired:
        if not acquired:
            raise ValueError(f"Another run is writing to {output}; wait for it, or name another folder.")
        return _export_locked(model, tokenizer, output, precisions, eight_bits, sentences)


def _export_locked(
    model: DeqNarForConditionalGeneration,
    tokenizer: Any,
    output: Path,
    precisions: tuple[str, ...],
    eight_bits: bool,
    sentences: Sequence[str],
) -> dict[str, Path]:
    working = output / "unfinished"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        for name, graph in graphs_of(frozen_copy(model)).items():
            write_graph(graph, working / f"{name}.onnx")
        ranges: dict[str, Ranges] = {}
        if "int8" in precisions:
            samples = record_inputs(model, tokenizer, working, limits_of(model), list(sentences))
            paths = [path for path in working.glob("*.onnx") if path.stem in QUANTISED]
            ranges = {path.stem: activation_ranges(path, samples[path.stem]) for path in paths}
        return {
            precision: _finish(working, output, precision, model, tokenizer, ranges, eight_bits)
            for precision in precisions
        }
    finally:
        shutil.rmtree(working, ignore_errors=True)


def limits_of(model: DeqNarForConditionalGeneration) -> dict[str, int]:
    """Most positions of a source and of a canvas."""
    return {"source": longest_source(model.config), "canvas": model.config.max_position_embeddings}


def _finish(
    working: Path,
    output: Path,
    precision: str,
    model: Any,
    tokenizer: Any,
    ranges: dict[str, Ranges],
    eight_bits: bool,
) -> Path:
    """Write the complete folder of one precision atomically."""
    folder = working / precision
    folder.mkdir()
    for path in working.glob("*.onnx"):
        if precision == "int8" and path.stem in QUANTISED:
            quantise(path, folder / path.name, ranges[path.stem], eight_bits)
        else:
            shutil.copy(path, folder)
        if precision == "int8" and path.stem in EMBEDDING_TOKENS:
            quantise_embedding(folder / path.name, folder / path.name)
    if has_sentence_graph(model.config):
        join_parts(folder, folder / "sentence.onnx", repeats=model.config.seeks_equilibrium)
        for part in PARTS:
            (folder / f"{part}.onnx").unlink()
    share_weights(folder)
    # Not save_pretrained, which would add the code of the model; an export has no weights for it.
    model.config.to_json_file(folder / "config.json", use_diff=False)
    options = copy.deepcopy(model.generation_config)
    if precision == "int8" and model.config.seeks_equilibrium:
        options.tol = max(INT8_TOL, model.config.tol if options.tol is None else options.tol)
    options.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if model.model.shortlist is not None:
        save_file(model.model.shortlist.state_dict(), folder / SHORTLIST)
    if model.model.ngrams is not None:
        save_file(model.model.ngrams.state_dict(), folder / NGRAMS)
    write_manifest(folder, precision, OPSET, limits_of(model))
    target = output / precision
    shutil.rmtree(target, ignore_errors=True)
    os.replace(folder, target)
    return target

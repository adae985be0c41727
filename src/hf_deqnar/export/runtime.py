"""Runtime of exports: `DeqNarOnnxModel` has the `generate` of the exported model.

`DeqNarGenerationMixin` and `RefinementMixin` are the same as in torch. This module replaces what they call:
encoding a source, injecting a canvas, evaluating f(z) and projecting to the vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..models.deqnar.configuration_deqnar import DeqNarConfig
from ..models.deqnar.ctc_beam_search import NUMPY_ROWS, prefix_beams_by_batch, prefix_beams_by_sentence
from ..models.deqnar.fixed_point import FixedPoint
from ..models.deqnar.generation_deqnar import DeqNarGenerationConfig, DeqNarGenerationMixin
from ..models.deqnar.layers_deqnar import dense_additive_mask
from ..models.deqnar.ngrams import MIN_PROB, Ngrams
from ..models.deqnar.refinement_deqnar import Canvas, RefinementMixin, Source
from ..models.deqnar.shortlist import Shortlist, Words
from ..models.deqnar.transition_deqnar import BoundTransition, Context, Observer, transition_class
from .manifest import NGRAMS, SHORTLIST, read_manifest
from .sentence import CANDIDATES, WIDEST_BEAM

OLDEST_ONNXRUNTIME = (1, 20)


def import_onnxruntime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError("An ONNX export needs onnxruntime: pip install 'hf_deqnar[onnx]'.") from error
    version = tuple(map(int, re.findall(r"\d+", onnxruntime.__version__)[:2]))
    if version < OLDEST_ONNXRUNTIME:
        raise ImportError(
            f"onnxruntime {onnxruntime.__version__} is too old, at least "
            f"{'.'.join(map(str, OLDEST_ONNXRUNTIME))} is needed: pip install --upgrade 'hf_deqnar[onnx]'."
        )
    return onnxruntime


class Session:
    """One graph, called with tensors by name; returns the requested outputs in order.

    Graphs are loaded when they are first used: translation with the sentence graph does not need the others.
    """

    def __init__(self, path: Path, threads: int | None) -> None:
        self.path, self.threads = path, threads

    @cached_property
    def session(self) -> Any:
        onnxruntime = import_onnxruntime()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.threads or 0  # 0: one per core
        options.log_severity_level = 3
        try:
            return onnxruntime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the exceptions of onnxruntime have no common base class
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"onnxruntime {onnxruntime.__version__} cannot load {self.path}: {reason}") from error

    @property
    def inputs(self) -> list[str]:
        return [one.name for one in self.session.get_inputs()]

    @property
    def outputs(self) -> list[str]:
        return [one.name for one in self.session.get_outputs()]

    @cached_property
    def run_options(self) -> Any:
        """Run only the nodes that requested outputs depend on."""
        options = import_onnxruntime().RunOptions()
        options.only_execute_path_to_fetches = True
        return options

    def __call__(self, inputs: dict[str, Tensor], outputs: list[str] | None = None) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in inputs.items()}
        found = self.session.run(outputs, given, self.run_options)
        return [torch.from_numpy(array) for array in found]


class OnnxTransition(nn.Module):
    """f(z) as a graph, with the interface of the transitions in `transition_deqnar`."""

    def __init__(self, config: DeqNarConfig, graph: Session, feedback: Session | None) -> None:
        super().__init__()
        self.graph, self.feedback = graph, feedback
        self.solve = transition_class(config).solve

    @cached_property
    def takes_shortlist(self) -> bool:
        """Whether the transition predicts tokens of a shortlist: a mixed model with a shortlist."""
        return "words" in self.graph.inputs

    @property
    def predicts_listed_tokens(self) -> bool:
        """Whether states depend on probabilities that are normalised over a shortlist."""
        return self.takes_shortlist or (self.feedback is not None and "words" in self.feedback.inputs)

    def features(self, state: Tensor, context: Context) -> Tensor:
        """F(z + u, x) of an explicit model; f(z) of all others, which predict tokens from the state."""
        inputs = {"state": state, "injection": context.injection}
        inputs |= {"canvas_mask": context.canvas_mask, "memory_mask": context.source_mask}
        for layer, (key, value) in enumerate(context.keys_values):
            inputs |= {f"key_{layer}": key, f"value_{layer}": value}
        if self.takes_shortlist:
            inputs |= named(context.words)
        return self.graph(inputs)[0]

    def next_state(self, features: Tensor, context: Context) -> Tensor:
        if self.feedback is None:
            return features
        return self.feedback({"features": features, **named(context.words)})[0]

    def forward(self, state: Tensor, context: Context) -> Tensor:
        return self.next_state(self.features(state, context), context)


class OnnxCore(nn.Module, RefinementMixin):
    """Replaces `DeqNarModel` in `generate`.

    Args:
        by_length: process sentences of equal length together, without padding. Rounding differences of a padded
            attention could change values that are rounded to integers in quantised graphs. So could probabilities
            over the joint shortlist of several sentences, so that models which feed them back have groups of one.
    """

    is_gradient_checkpointing = False

    def __init__(
        self,
        config: DeqNarConfig,
        sessions: dict[str, Session],
        limits: dict[str, int],
        by_length: bool,
        shortlist: Shortlist | None,
        ngrams: Ngrams | None,
    ) -> None:
        super().__init__()
        self.shortlist, self.ngrams = shortlist, ngrams
        self.config, self.limits, self.by_length = config, limits, by_length
        self.source, self.canvas = sessions["source"], sessions["canvas"]
        self.transition = OnnxTransition(config, sessions["transition"], sessions.get("feedback"))
        self.predictor = sessions.get("input_head")
        self.input_head = None if self.predictor is None else self.predict_input
        self.linker = sessions.get("links")
        self.train(False)

    def predict_input(self, features: Tensor) -> Tensor:
        return self.predictor({"features": features})[0]

    def link_head(self, features: Tensor, mask: Tensor) -> Tensor:
        """log E of a graph; not quantised, so that rows are independent of each other."""
        assert self.linker is not None  # called for graphs only
        return self.linker({"features": features, "canvas_mask": mask})[0]

    def check_source(self, input_ids: Tensor | None, attention_mask: Tensor | None, encoder_outputs: None) -> Tensor:
        """Additionally check the length limit of the exported position tables."""
        mask = super().check_source(input_ids, attention_mask, encoder_outputs)
        longest = int(mask.sum(dim=1).max())
        if longest > self.limits["source"]:
            raise ValueError(
                f"A source of {longest} tokens is longer than the {self.limits['source']} tokens that this export "
                "supports; split it into sentences."
            )
        return mask

    def prepare(self, input_ids: Tensor, attention_mask: Tensor | None = None, *, shortlist: bool = False) -> Source:
        """Encode the source; sentences of equal length together if the graphs are quantised."""
        source_mask = self.check_source(input_ids, attention_mask, None)
        groups = self.groups(source_mask)
        parts = [
            self.source({"input_ids": input_ids[rows, :length], "source_mask": source_mask[rows, :length]})
            for rows, (length,) in groups
        ]
        stacked = (stack_padded(several, groups) for several in zip(*parts, strict=True))
        outputs = dict(zip(self.source.outputs, stacked, strict=True))
        layers = sum(name.startswith("key_") for name in outputs)
        keys_values = [(outputs[f"key_{layer}"], outputs[f"value_{layer}"]) for layer in range(layers)]
        words = self._words(input_ids, source_mask, shortlist)
        source_mask = source_mask[:, : keys_values[0][0].shape[2]]
        return Source(source_mask, outputs.get("memory"), keys_values, outputs.get("length_logits"), words=words)

    def groups(self, *masks: Tensor) -> list["Group"]:
        """Rows that are processed together, and the length of each mask for them."""
        lengths = [mask.sum(dim=1) for mask in masks]
        if not self.by_length:
            return [(torch.arange(len(masks[0])), tuple(int(length.max()) for length in lengths))]
        return self.groups_of_equal_length(*lengths)

    def groups_of_equal_length(self, *lengths: Tensor) -> list["Group"]:
        """The rows of every combination of lengths."""
        groups = groups_of_equal_length(*lengths)
        if not self.by_length or self.shortlist is None or not self.transition.predicts_listed_tokens:
            return groups
        return [(row[None], key) for rows, key in groups for row in rows]

    def _words(self, input_ids: Tensor, source_mask: Tensor, shortlist: bool) -> Words | None:
        """The shortlist. Graphs of a model with a shortlist always need one, so it can be the full vocabulary."""
        if self.shortlist is None:
            return None
        words = self.shortlist(input_ids, source_mask) if shortlist else self.shortlist.full_vocabulary()
        if words.outside is None:
            words.outside = torch.zeros(len(input_ids), 1, len(words.tokens), dtype=torch.bool)
        return words

    def bind(self, source: Source, canvas: Canvas) -> BoundTransition:
        """The transition as a function of the state."""
        inputs = {"canvas": canvas.tokens}
        if source.encoder_states is not None:
            inputs |= {"canvas_mask": canvas.mask, "memory": source.encoder_states, "source_mask": source.mask}
        context = Context(
            injection=self.canvas(inputs)[0],
            canvas_mask=dense_additive_mask(canvas.mask, torch.float32),
            keys_values=source.keys_values,
            source_mask=dense_additive_mask(source.mask, torch.float32),
            source_lengths=source.lengths,
            dropout_masks=None,
            embedding=None,
            scale=1.0,
            words=source.words,
        )
        return BoundTransition(self.transition, context)

    def solve(
        self, source: Source, canvas: Canvas, *, observe_features: Observer | None = None, **options: Any
    ) -> FixedPoint:
        """Solve z = f(z); sentences of equal length together if the graphs are quantised."""
        groups = self.groups(source.mask, canvas.mask)
        if not self.by_length or len(groups) == 1:
            return super().solve(source, canvas, observe_features=observe_features, **options)
        found = []
        for rows, (length, positions) in groups:
            part = Canvas(canvas.tokens[rows, :positions], canvas.mask[rows, :positions])
            observer = None if observe_features is None else partial(observe_rows, observe_features, rows)
            found.append(super().solve(source.rows(rows, length), part, observe_features=observer, **options))
        return join(found, groups)


Group = tuple[Tensor, tuple[int, ...]]  # rows, and the length of their source or of their source and canvas


def groups_of_equal_length(*lengths: Tensor) -> list[Group]:
    """The rows of every combination of lengths.

    >>> groups_of_equal_length(torch.tensor([3, 5, 3]))
    [(tensor([0, 2]), (3,)), (tensor([1]), (5,))]
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, key in enumerate(zip(*(length.tolist() for length in lengths), strict=True)):
        rows_of.setdefault(key, []).append(row)
    return [(torch.tensor(rows), key) for key, rows in rows_of.items()]


def observe_rows(
    observe: Callable, members: Tensor, rows: Tensor, value: Tensor, residual: Tensor | None
) -> Tensor | None:
    """Call an observer of the batch for some rows of a group."""
    return observe(members[rows], value, residual)


def join(found: list[FixedPoint], groups: list[Group]) -> FixedPoint:
    """The results of groups of rows as the result of a batch."""
    solved = found[0].residual is not None
    return FixedPoint(
        state=stack_padded([one.state for one in found], groups),
        value=stack_padded([one.value for one in found], groups),
        residual=stack_padded([one.residual for one in found], groups) if solved else None,
        nfe=stack_padded([one.nfe for one in found], groups),
        converged=stack_padded([one.converged for one in found], groups) if solved else None,
    )


def named(words: Words | None) -> dict[str, Tensor]:
    """Words as inputs of a graph; none for the graphs of a model without a shortlist."""
    return {} if words is None else {"words": words.tokens, "outside": words.outside}


def stack_padded(parts: Sequence[Tensor], groups: list[Group]) -> Tensor:
    """The rows of all groups in the order of the batch; shorter ones are padded with zeros."""
    if len(parts) == 1:
        return parts[0]
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    stacked = parts[0].new_zeros(sum(map(len, parts)), *shape)
    for part, (rows, _) in zip(parts, groups, strict=True):
        stacked[(rows, *(slice(size) for size in part.shape[1:]))] = part
    return stacked


class DeqNarOnnxModel(nn.Module, DeqNarGenerationMixin):
    """An exported model: `generate` with every option, on the CPU, without the weights in torch.

    >>> model = DeqNarOnnxModel.from_pretrained("exported/int8", threads=1)                 # doctest: +SKIP
    >>> model.generate(**tokenizer("A man is riding a horse.", return_tensors="pt"))        # doctest: +SKIP
    """

    main_input_name = "input_ids"
    input_modalities = ("text",)
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(
        self,
        config: DeqNarConfig,
        generation_config: DeqNarGenerationConfig,
        sessions: dict[str, Session],
        manifest: dict[str, Any],
        shortlist: Shortlist | None,
        ngrams: Ngrams | None,
    ) -> None:
        super().__init__()
        self.config, self.generation_config = config, generation_config
        self.precision = manifest["precision"]
        self.model = OnnxCore(config, sessions, manifest["limits"], self.precision == "int8", shortlist, ngrams)
        self.head, self.sentence = sessions["head"], sessions.get("sentence")
        self.train(False)

    @classmethod
    def from_pretrained(cls, folder: str | Path, threads: int | None = None) -> "DeqNarOnnxModel":
        """Load a folder written by `hf-deqnar export`.

        Args:
            folder: such as `exported/fp32`; it is refused if a file is missing, damaged or of another model.
            threads: number of threads of every graph; default: one per core.
        """
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}.")
        import_onnxruntime()
        manifest = read_manifest(folder)
        folder = Path(folder)
        sessions = {
            name.removesuffix(".onnx"): Session(folder / name, threads)
            for name in manifest["files"]
            if name.endswith(".onnx")
        }
        config, shortlist, ngrams = DeqNarConfig.from_pretrained(folder), None, None
        if config.shortlist_size:
            shortlist = Shortlist(config)
            shortlist.load_state_dict(load_file(folder / SHORTLIST))
        if config.ngram_order:
            ngrams = Ngrams(config.vocab_size, config.ngram_order, config.ngram_entries)
            ngrams.load_state_dict(load_file(folder / NGRAMS))
        return cls(config, DeqNarGenerationConfig.from_pretrained(folder), sessions, manifest, shortlist, ngrams)

    def can_generate(self) -> bool:
        return True

    def to(self, device: str | torch.device) -> "DeqNarOnnxModel":
        """No-op: exports run on the CPU."""
        if torch.device(device).type != "cpu":
            raise ValueError(f"An ONNX export runs on the CPU, not on {device}; use the model in torch instead.")
        return self

    def _translate(
        self, input_ids: Tensor, source_mask: Tensor, settings: DeqNarGenerationConfig, streamer: Any
    ) -> dict[str, Any]:
        """As in torch, but sentences of equal length use the sentence graph if it supports the options."""
        options = None if streamer is not None else self._sentence_options(settings)
        if options is None:
            return super()._translate(input_ids, source_mask, settings, streamer)
        texts: list[list[int]] = [[]] * len(input_ids)
        for rows, (length,) in self.model.groups_of_equal_length(source_mask.sum(dim=1)):
            source, mask = input_ids[rows, :length], source_mask[rows, :length]
            found = self._translate_sentences(source, mask, settings, options)
            for number, text in enumerate(found):
                if text is None:  # not converged in the sentence graph
                    one = slice(number, number + 1)
                    text = super()._translate(source[one], mask[one], settings, None)["sequences"][0].tolist()
                texts[int(rows[number])] = text
        longest, padding = max(1, *map(len, texts)), self.config.pad_token_id
        return {"sequences": torch.tensor([text + [padding] * (longest - len(text)) for text in texts])}

    def _sentence_options(self, settings: DeqNarGenerationConfig) -> dict[str, Tensor] | None:
        """Solver inputs of the sentence graph; None if it does not support the options."""
        unsupported = self.length_model.sentence_outputs(settings) is None
        unsupported = unsupported or settings.refinement_passes > 1 or settings.input_sampling
        unsupported = unsupported or settings.ctc_beam_size > WIDEST_BEAM or settings.num_return_sequences > 1
        observed = settings.return_dict_in_generate or settings.stop_on_stable_tokens is not None
        if self.sentence is None or unsupported or observed or settings.reranker is not None:
            return None
        solve = self.model.solver_options(settings.max_nfe, settings.tol, settings.solver)
        if not self.config.seeks_equilibrium:
            return {}
        if solve["damping"] != 1 or not (solve["solver"] == "picard" or solve["max_nfe"] <= 2):
            return None
        most, least = (
            torch.tensor(solve["max_nfe"], dtype=torch.long),
            torch.tensor(solve["tol"], dtype=torch.float32),
        )
        return {"max_nfe": most, "tol": least}

    def _translate_sentences(
        self, source: Tensor, mask: Tensor, settings: DeqNarGenerationConfig, options: dict[str, Tensor]
    ) -> list[list[int] | None]:
        """Tokens of the translations of sentences of one length; None if the residual has not decreased and the general
        solver must be used.
        """
        inputs, words = {"input_ids": source, **options}, None
        if self.model.shortlist is not None:
            words = self.model._words(source, mask, settings.shortlist is not False)
            inputs |= named(words)
        searched = settings.ctc_beam_size > 1
        if searched and words is not None and int((~words.outside).sum(dim=2).min()) < CANDIDATES:
            return [None] * len(source)
        names = ["log_probabilities", "candidates"] if searched else self.length_model.sentence_outputs(settings)
        found = self.sentence(inputs, [*names, *(["residual", "residual_before"] if options else [])])
        read = [output.numpy() for output in found[: len(names)]]
        decreased = (found[-2] < found[-1]).tolist() if options else [True] * len(source)
        texts: list[list[int] | None] = [None] * len(source)
        solved = [row for row, successful in enumerate(decreased) if successful]
        if searched and solved:
            chosen = (output if len(solved) == len(source) else output[solved] for output in read)
            for row, text in zip(solved, self._search(*chosen, words, settings), strict=True):
                texts[row] = text
            return texts
        for row in solved:
            outputs = {name: output[row] for name, output in zip(names, read, strict=True)}
            texts[row] = self.length_model.sentence_text(outputs, settings)
        return texts

    def _search(
        self,
        log_probabilities: numpy.ndarray,
        candidates: numpy.ndarray,
        words: Words | None,
        settings: DeqNarGenerationConfig,
    ) -> list[list[int] | None]:
        """Of every row the text with the best mean log-probability, or the best score with n-grams; None if a text of
        its beam is longer than max_length.
        """
        rows, canvas, _ = log_probabilities.shape
        fluency = self._fluency(settings)
        blank, names = self.config.blank_token_id, None
        if words is not None:
            blank, names = words.places([blank])[0], words.tokens.numpy()
        search = prefix_beams_by_sentence if rows < NUMPY_ROWS else prefix_beams_by_batch
        texts, counts, scores = search(
            log_probabilities,
            candidates,
            numpy.full(rows, canvas),
            blank,
            settings.ctc_beam_size,
            fluency,
            0.0 if fluency is None else MIN_PROB,
            names,
        )
        texts = texts if names is None else names[texts]
        if fluency is None:
            scores = scores / numpy.maximum(counts, 1)
        else:
            scores = scores + fluency.of_end(torch.from_numpy(texts), torch.from_numpy(counts)).numpy()
        best = scores.argmax(axis=1).tolist()
        fits = (counts.max(axis=1) <= settings.max_length).tolist()
        return [
            texts[row, place, : counts[row, place]].tolist() if fits[row] else None for row, place in enumerate(best)
        ]

    def read_tokens(self, features: Tensor, words: Words | None = None) -> Tensor:
        if not features.sum().isfinite():
            raise FloatingPointError("The features are not finite; check the weights for NaN or infinity.")
        return self._read(features, words, ["tokens"])[0]

    def read_scored(
        self, features: Tensor, keep_all: bool, words: Words | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        found = self._read(features, words, ["tokens", "scores", "log_probabilities"][: 3 if keep_all else 2])
        if not keep_all:
            return found[0], found[1], None
        return found[0], found[1], found[2] if words is None else words.spread(found[2], self.config)

    def _read(self, features: Tensor, words: Words | None, outputs: list[str]) -> list[Tensor]:
        """Call the head; no position depends on another one."""
        return self.head({"features": features, **named(words)}, outputs)


__all__ = ["DeqNarOnnxModel"]

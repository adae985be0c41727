"""`pipeline("translation")`, which transformers 5 has removed, for these and all other seq2seq models."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.pipelines.base import ChunkPipeline
from transformers.utils import logging

from .configuration_deqnar import is_deqnar
from .quality import Familiarity, words_of
from .reranking import check_same_tokens
from .sentence_splitting import Segment, is_copied, split_long, split_sentences
from .text import check_length, longest_source, replace_controls, source_prefix

logger = logging.get_logger(__name__)

TASK = "translation"
TASK_WITH_LANGUAGES = re.compile(r"translation_(?P<source>\w+?)_to_(?P<target>\w+)")
SENTENCES_OF_A_TEXT = 16  # batch size for the sentences of one string


@dataclass(frozen=True)
class Piece:
    """A segment of a text on its way through the model.

    Attributes:
        text: all of the text, with control characters replaced by spaces, except white space.
        segment: offsets of the segment.
        copied: the translation of a segment without letters, which is the segment itself; None if it is translated.
    """

    text: str
    segment: Segment
    copied: str | None = None


class DeqNarTranslationPipeline(ChunkPipeline):
    """Translates texts to `{'translation_text': …}`.

    Takes a string, a list, a generator or a `datasets` column, one by one or in batches. Options of `generate` can be
    given to the constructor or to each call. A text is split into sentences, which are translated separately and joined
    by the white space between them; sentences that are too long for the model are split into clauses. Text that is
    empty or only spaces translates to the empty text, and sentences without letters, such as numbers, emoji and URLs,
    are copied.

    >>> translate = pipeline("translation", model="path-or-hub-id")                         # doctest: +SKIP
    >>> translate("A man is riding a horse.", length_beams=5)                               # doctest: +SKIP
    [{'translation_text': 'Ein Mann reitet auf einem Pferd.'}]
    """

    _pipeline_calls_generate = True
    _load_processor = False
    _load_image_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def _sanitize_parameters(
        self,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        split_sentences: bool | None = None,
        return_segments: bool | None = None,
        return_figures: bool | None = None,
        return_quality: bool | None = None,
        return_tensors: bool | None = None,
        warn_unfamiliar: bool | None = None,
        truncation: bool | str | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_options: Any,
    ) -> tuple[dict, dict, dict]:
        """Sort options into those of preprocessing, of `generate` and of postprocessing.

        Args:
            src_lang, tgt_lang: for multilingual models; also taken from task names such as `translation_en_to_de`.
            split_sentences: translate the sentences of a text separately; by default True. With False a text that is
                too long for the model raises an error.
            return_segments: add `segments` to every translation: the offsets of every sentence in the source and in the
                translation, and with return_figures its figures.
            return_figures: add `nfe`, `residual`, `converged` and `score` to every translation.
            return_quality: add `quality`, an estimate from 0 to 1, to every translation (the chrF / 100 that is
                expected of it; 0 if nothing is translated), and `words` with the offsets and the quality of each word
                (the probability that a reference has it). For models on which `hf-deqnar calibrate` was run.
            warn_unfamiliar: log a warning if a text does not look like the source language; by default True. For models
                on which `hf-deqnar calibrate` was run.
            return_tensors: return `translation_token_ids` instead of `translation_text`.
            truncation: truncate a sentence that is too long instead of splitting it or raising an error.
        """
        named = TASK_WITH_LANGUAGES.fullmatch(self.task or "")
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        if named is not None:
            languages = {"src_lang": src_lang or named["source"], "tgt_lang": tgt_lang or named["target"]}
        preprocessing: dict[str, Any] = {name: language for name, language in languages.items() if language is not None}
        if truncation is not None:
            preprocessing["truncation"] = truncation
        if split_sentences is not None:
            preprocessing["split"] = split_sentences
        if warn_unfamiliar is not None:
            preprocessing["warn"] = warn_unfamiliar
        given = {
            "return_segments": return_segments,
            "return_tensors": return_tensors,
            "clean_up_tokenization_spaces": clean_up_tokenization_spaces,
        }
        postprocessing = {name: value for name, value in given.items() if value is not None}
        for name, value in (("return_figures", return_figures), ("return_quality", return_quality)):
            if value is not None:
                generate_options[name] = value
        if return_quality is not None:
            postprocessing["return_quality"] = return_quality
        return preprocessing, generate_options, postprocessing

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Translate. One string gives a list with one translation; a list gives one for each of its strings.

        With `num_return_sequences` above 1 there is a list of translations for each string. The sentences of one string
        are translated in batches of 16, unless `batch_size` is given or a streamer is used. With a `batch_size`, the
        strings of a list are translated in the order of their lengths.
        """
        if not isinstance(inputs, (str, list, dict)) and isinstance(inputs, Sequence):
            inputs = list(inputs)  # a tuple, or a column of a data set
        if isinstance(inputs, list) and not inputs:
            return []
        streamed = options.get("streamer", self._forward_params.get("streamer")) is not None
        if isinstance(inputs, str) and self._batch_size is None and not streamed:
            options.setdefault("batch_size", SENTENCES_OF_A_TEXT)
        together = options.get("batch_size") or self._batch_size or 1
        if isinstance(inputs, list) and together > 1 and all(isinstance(text, str) for text in inputs):
            order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))  # less padding in a batch
            ordered = super().__call__([inputs[index] for index in order], *arguments, **options)
            places = sorted(range(len(order)), key=order.__getitem__)
            results = [ordered[place] for place in places]
        else:
            results = super().__call__(inputs, *arguments, **options)
        if isinstance(inputs, list) and all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def preprocess(
        self,
        text: str,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: bool | str = False,
        split: bool = True,
        warn: bool = True,
    ) -> Iterator[dict[str, Any]]:
        """Model inputs of every segment of a text."""
        if not isinstance(text, str):
            raise ValueError(f"Only text can be translated, but an input is of type {type(text).__name__}.")
        cleaned = replace_controls(text)
        text = "".join(own if own.isspace() else other for own, other in zip(text, cleaned, strict=True))
        segments = split_sentences(text) if split else [Segment(0, len(text))]
        prefix = source_prefix(self.model.config, src_lang, tgt_lang)
        cut = {"truncation": truncation, "max_length": longest_source(self.model.config)} if truncation else {}
        multilingual = getattr(self.tokenizer, "_build_translation_inputs", None)

        def encode(part: str) -> dict[str, Any]:
            if multilingual is not None and src_lang is not None and tgt_lang is not None:
                return multilingual(prefix + part, return_tensors="pt", src_lang=src_lang, tgt_lang=tgt_lang, **cut)
            return self.tokenizer(prefix + part, return_tensors="pt", verbose=False, **cut)

        def fits(part: str) -> bool:
            longest = longest_source(self.model.config)
            return longest is None or encode(part)["input_ids"].shape[1] <= longest

        if split:
            segments = [part for segment in segments for part in split_long(cleaned, segment, fits)]
        segments = segments or [Segment(0, len(text))]
        for index, segment in enumerate(segments):
            part = cleaned[segment.start : segment.end].strip()
            copied = part if is_copied(part) else None
            encoded = encode(part if copied is None else ".")  # a placeholder, whose output is ignored
            encoded = {name: value for name, value in encoded.items() if name != "token_type_ids"}
            check_length(encoded["input_ids"].shape[1], self.model.config)
            piece = Piece(text, segment, copied)
            if warn and self.is_unfamiliar(encoded["input_ids"][0], piece):
                logger.warning(f"A text does not look like the source language of this model: {shortened(part)!r}.")
                warn = False  # once for a text
            yield {**encoded, "piece": piece, "is_last": index == len(segments) - 1}

    def is_unfamiliar(self, tokens: torch.Tensor, piece: Piece) -> bool:
        """Whether a segment does not look like the source language, if the model knows what that looks like."""
        quality = getattr(self.model.generation_config, "quality", None)
        if quality is None or piece.copied is not None:
            return False
        familiarity = Familiarity(quality)
        if not familiarity.is_unfamiliar(tokens):
            return False
        text = piece.text[piece.segment.start : piece.segment.end]
        if not text.isupper():
            return True
        return familiarity.is_unfamiliar(self.tokenizer(text.capitalize(), return_tensors="pt")["input_ids"][0])

    def _forward(
        self, model_inputs: dict[str, Any], return_figures: bool = False, return_quality: bool = False, **options: Any
    ) -> dict[str, Any]:
        inputs = dict(model_inputs)
        passed = {name: inputs.pop(name) for name in ("piece", "is_last")}
        pieces = passed["piece"] if isinstance(passed["piece"], list) else [passed["piece"]]
        if isinstance(inputs.get("forced_bos_token_id"), list):  # one for each row of a batch
            inputs["forced_bos_token_id"] = inputs["forced_bos_token_id"][0]
        deqnar = is_deqnar(self.model.config)
        for name, requested in (("return_figures", return_figures), ("return_quality", return_quality)):
            if requested and not deqnar:
                raise ValueError(f"{name} needs a deqnar model, not {self.model.config.model_type}.")
        settings = self._prepare_generate_kwargs(options) if not deqnar else {**self._generate_kwargs, **options}
        if deqnar:
            check_named_reranker(self.tokenizer, self.model, settings)
        if return_quality and requested_option("quality", self.model, settings) is None:
            raise ValueError("return_quality: this model has no quality estimate; fit one with hf-deqnar calibrate.")
        if return_figures or return_quality:
            settings["return_dict_in_generate"] = True
        rows, count = len(pieces), requested_option("num_return_sequences", self.model, settings) or 1
        counts = torch.full((rows,), count)
        if all(piece.copied is not None for piece in pieces):
            nothing = torch.full((rows, count, 1), self.tokenizer.pad_token_id)
            return {"sequences": nothing, "count": counts, **passed}
        if deqnar and count > 1:  # different tokens can decode to the same text, so more candidates are needed
            settings["num_return_sequences"] = max(count, candidates_of(self.model, settings))
        result = self.model.generate(**inputs, **settings)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        output = {"sequences": sequences.reshape(rows, -1, sequences.shape[-1]), "count": counts}
        names = [*(FIGURES if return_figures else ()), *(("quality",) if return_quality else ())]
        for name in names:
            if getattr(result, name) is not None:
                output[name] = getattr(result, name).reshape(rows, -1)
        if return_quality:
            output["token_quality"] = result.token_quality.reshape(output["sequences"].shape)
        return {**output, **passed}

    def postprocess(
        self,
        outputs: list[dict[str, Any]],
        return_segments: bool = False,
        return_quality: bool = False,
        return_tensors: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> list[dict[str, Any]]:
        """Decode and join. Returns at most `num_return_sequences` different texts.

        The n-th translation of a text consists of the n-th of each sentence, or of the last if it has fewer.
        """
        count = int(outputs[0]["count"][0])
        pieces = [output["piece"] for output in outputs]
        translations = [self._translations(output, count, clean_up_tokenization_spaces) for output in outputs]
        records: list[dict[str, Any]] = []
        texts: set[str] = set()
        for rank in range(max(map(len, translations))):
            selected = [several[min(rank, len(several) - 1)] for several in translations]
            text, segments, words = join(pieces, selected)
            if text in texts and text:  # an empty text has as many translations as others
                continue
            texts.add(text)
            if return_tensors:
                parts = [one["tokens"] for one in selected]
                records.append({"translation_token_ids": parts[0] if len(parts) == 1 else torch.cat(parts)})
                continue
            record = {"translation_text": text, **joined_figures(selected)}
            if return_quality:
                record = {**record, "quality": record.get("quality", 0.0), "words": words}
            records.append({**record, "segments": segments} if return_segments else record)
        return records

    def _translations(self, output: dict[str, Any], count: int, clean_up: bool) -> list[dict[str, Any]]:
        """The different translations of one segment: text, tokens, number of tokens and figures."""
        piece, padding = output["piece"], self.tokenizer.pad_token_id
        if piece.copied is not None:
            tokens = torch.tensor(self.tokenizer(piece.copied, add_special_tokens=False)["input_ids"] or [padding])
            copy = {"text": piece.copied, "tokens": tokens, "size": 0, "figures": {}, "words": []}
            return [copy] * (1 if piece.copied else count)
        found: list[dict[str, Any]] = []
        texts: set[str] = set()
        for index, tokens in enumerate(output["sequences"][0]):
            text = self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up
            ).strip()
            if text in texts or len(texts) == count:
                continue
            texts.add(text)
            figures = {name: output[name][0][index].item() for name in JOINED if name in output}
            size = int((tokens != padding).sum())
            words = []
            if "token_quality" in output:
                words = word_qualities(self.tokenizer, text, tokens[:size], output["token_quality"][0][index][:size])
            found.append({"text": text, "tokens": tokens, "size": size, "figures": figures, "words": words})
        return found


def join(
    pieces: list[Piece], translations: list[dict[str, Any]]
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """The text of all translations with the white space between the sources, and segments and words with offsets."""
    text, segments, words = "", [], []
    for index, (piece, translation) in enumerate(zip(pieces, translations, strict=True)):
        if index:
            before = pieces[index - 1].segment.end
            text += white_space_between(piece.text, before, piece.segment.start)
        record = {
            "source_start": piece.segment.start,
            "source_end": piece.segment.end,
            "target_start": len(text),
            "target_end": len(text) + len(translation["text"]),
            **joined_figures([translation]),
        }
        for start, end, quality in translation["words"]:
            words.append({"start": len(text) + start, "end": len(text) + end, "quality": quality})
        text += translation["text"]
        segments.append(record)
    return text, segments, words


def word_qualities(
    tokenizer: Any, text: str, tokens: torch.Tensor, token_quality: torch.Tensor
) -> list[tuple[int, int, float]]:
    """Start, end and quality of every word of a text: the smallest quality of its tokens."""
    _, words = words_of(tokenizer, tokens.tolist())
    own = [positions for _, _, positions in words]
    spans = [match.span() for match in re.finditer(r"\S+", text)]
    if len(own) != len(spans):  # cleaning the text has joined words
        own = [list(range(len(tokens)))] * len(spans)
    return [
        (start, end, float(token_quality[positions].min()) if positions else 0.0)
        for (start, end), positions in zip(spans, own, strict=True)
    ]


def shortened(text: str, longest: int = 60) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def white_space_between(text: str, end: int, start: int) -> str:
    """The white space between two segments; a space after a full stop of languages that need none."""
    return text[end:start] or (" " if text[end - 1] in "。！？" else "")


def joined_figures(translations: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a text from those of its segments: the sum of the NFE, the largest residual, whether all have
    converged, the mean score per token, and the mean quality, weighted by tokens.
    """
    scored = [one for one in translations if one["figures"]]
    figures = {}
    for name in JOINED:
        values = [one["figures"][name] for one in scored if name in one["figures"]]
        if values:
            sizes = [max(1, one["size"]) for one in scored]
            figures["score" if name == "sequences_scores" else name] = JOINED[name](values, sizes)
    return figures


def mean_by_size(values: list[float], sizes: list[int]) -> float:
    """The mean, weighted by number of tokens; the value itself if there is one."""
    if len(values) == 1:
        return values[0]
    return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)


FIGURES = ("nfe", "residual", "converged", "sequences_scores")
JOINED = {
    "nfe": lambda values, sizes: sum(values),
    "residual": lambda values, sizes: max(values),
    "converged": lambda values, sizes: all(values),
    "sequences_scores": mean_by_size,
    "quality": mean_by_size,
}


@lru_cache(maxsize=1)
def reranker_tokenizer(name: str) -> Any:
    """The tokenizer of a reranker; the last one is cached."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, TypeError, ValueError) as error:  # TypeError: a tokenizer of SentencePiece without its file
        raise ValueError(f"{name} has no tokenizer to compare with the model's; save it in this folder.") from error


def check_named_reranker(tokenizer: Any, model: Any, settings: dict[str, Any]) -> None:
    """Check that a reranker given by name has the same tokenizer as the model."""
    reranker = requested_option("reranker", model, settings)
    if isinstance(reranker, str):
        check_same_tokens(tokenizer, reranker_tokenizer(reranker), reranker)


def requested_option(option: str, model: Any, settings: dict[str, Any]) -> Any:
    """An option of `generate`: from the call, its configuration, or that of the model."""
    configuration = settings.get("generation_config") or model.generation_config
    return settings.get(option, getattr(configuration, option, None))  # a GenerationConfig has not all of these options


def candidates_of(model: Any, settings: dict[str, Any]) -> int:
    """Number of candidates per sentence."""
    option = model.length_model.beam_option
    return settings.get("num_beams") or requested_option(option, model, settings) or 1


class TaskAliases(dict):
    """Task aliases of the registry, including every `translation_xx_to_yy`."""

    def __contains__(self, task: object) -> bool:
        return super().__contains__(task) or bool(TASK_WITH_LANGUAGES.fullmatch(str(task)))

    def __getitem__(self, task: str) -> str:
        return super().__getitem__(task) if super().__contains__(task) else TASK


def register_translation_pipeline() -> None:
    """Register `pipeline("translation")`.

    transformers 5 refuses the task because it is in its list of removed tasks, so the entry is deleted from that list;
    then the task is registered as a custom one, for every seq2seq model.
    """
    from transformers import AutoModelForSeq2SeqLM, pipelines

    pipelines.REMOVED_TASKS.pop(TASK, None)
    registry = pipelines.PIPELINE_REGISTRY
    if not isinstance(registry.task_aliases, TaskAliases):
        registry.task_aliases = TaskAliases(registry.task_aliases)
    if TASK not in registry.supported_tasks:
        registry.register_pipeline(
            TASK, pipeline_class=DeqNarTranslationPipeline, pt_model=AutoModelForSeq2SeqLM, type="text"
        )


__all__ = ["DeqNarTranslationPipeline", "register_translation_pipeline"]

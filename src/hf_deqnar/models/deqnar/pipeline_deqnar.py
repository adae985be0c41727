"""`pipeline("translation")`, which transformers 5 has removed, for these and all other seq2seq models."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import AutoTokenizer, Pipeline
from transformers.pipelines.base import GenericTensor
from transformers.tokenization_utils_base import BatchEncoding

from .configuration_deqnar import is_deqnar
from .reranking import check_same_tokens
from .text import check_length, clean_text, longest_source, source_prefix

TASK = "translation"
TASK_WITH_LANGUAGES = re.compile(r"translation_(?P<source>\w+?)_to_(?P<target>\w+)")
FIGURES = ("nfe", "residual", "converged", "sequences_scores")


class DeqNarTranslationPipeline(Pipeline):
    """Translates texts to `{'translation_text': …}`.

    Takes a string, a list, a generator or a `datasets` column, one by one or in batches. Options of `generate` can be
    given to the constructor or to each call. Text that is empty or only spaces translates to the empty text.

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
        return_figures: bool | None = None,
        return_tensors: bool | None = None,
        truncation: bool | str | None = None,
        clean_up_tokenization_spaces: bool | None = None,
        **generate_options: Any,
    ) -> tuple[dict, dict, dict]:
        """Sort options into those of preprocessing, of `generate` and of postprocessing.

        Args:
            src_lang, tgt_lang: for multilingual models; also taken from task names such as `translation_en_to_de`.
            return_figures: add `nfe`, `residual`, `converged` and `score` to every translation.
            return_tensors: return `translation_token_ids` instead of `translation_text`.
            truncation: truncate a text that is too long instead of raising an error.
        """
        named = TASK_WITH_LANGUAGES.fullmatch(self.task or "")
        languages = {"src_lang": src_lang, "tgt_lang": tgt_lang}
        if named is not None:
            languages = {"src_lang": src_lang or named["source"], "tgt_lang": tgt_lang or named["target"]}
        preprocessing: dict[str, Any] = {name: language for name, language in languages.items() if language is not None}
        if truncation is not None:
            preprocessing["truncation"] = truncation
        postprocessing = {}
        if return_tensors is not None:
            postprocessing["return_tensors"] = return_tensors
        if clean_up_tokenization_spaces is not None:
            postprocessing["clean_up_tokenization_spaces"] = clean_up_tokenization_spaces
        if return_figures is not None:
            generate_options["return_figures"] = return_figures
        return preprocessing, generate_options, postprocessing

    def __call__(self, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Translate. One string gives a list with one translation; a list gives one for each of its strings.

        With `num_return_sequences` above 1 there is a list of translations for each string.
        """
        if not isinstance(inputs, (str, list, dict)) and isinstance(inputs, Sequence):
            inputs = list(inputs)  # a tuple, or a column of a data set
        if isinstance(inputs, list) and not inputs:
            return []
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
    ) -> dict[str, GenericTensor]:
        if not isinstance(text, str):
            raise ValueError(f"Only text can be translated, but an input is of type {type(text).__name__}.")
        text = clean_text(text)
        empty = not text
        text = text or "."  # placeholder for an empty text; its output is ignored
        text = source_prefix(self.model.config, src_lang, tgt_lang) + text
        cut = {"truncation": truncation, "max_length": longest_source(self.model.config)} if truncation else {}
        multilingual = getattr(self.tokenizer, "_build_translation_inputs", None)
        if multilingual is not None and src_lang is not None and tgt_lang is not None:
            encoded = multilingual(text, return_tensors="pt", src_lang=src_lang, tgt_lang=tgt_lang, **cut)
        else:
            encoded = self.tokenizer(text, return_tensors="pt", **cut)
        encoded = {name: value for name, value in encoded.items() if name != "token_type_ids"}
        check_length(encoded["input_ids"].shape[1], self.model.config)
        return BatchEncoding({**encoded, "is_empty": torch.tensor([[empty]])})

    def _forward(self, model_inputs: dict[str, GenericTensor], return_figures: bool = False, **options: Any) -> dict:
        empty = model_inputs.pop("is_empty")[:, 0]
        deqnar = is_deqnar(self.model.config)
        if return_figures and not deqnar:
            raise ValueError(f"return_figures needs a deqnar model, not {self.model.config.model_type}.")
        forced = {name: model_inputs.pop(name) for name in ("forced_bos_token_id",) if name in model_inputs}
        settings = self._prepare_generate_kwargs(options) if not deqnar else {**self._generate_kwargs, **options}
        if deqnar:
            check_named_reranker(self.tokenizer, self.model, settings)
        if deqnar and return_figures:
            settings["return_dict_in_generate"] = True
        rows, count = empty.shape[0], requested_option("num_return_sequences", self.model, settings) or 1
        output = {"is_empty": empty, "count": torch.full((rows,), count)}
        if empty.all():
            nothing = torch.full((rows, count, 1), self.tokenizer.pad_token_id)
            return {"sequences": nothing, **output}
        if deqnar and count > 1:  # different tokens can decode to the same text, so more candidates are needed
            settings["num_return_sequences"] = max(count, candidates_of(self.model, settings))
        result = self.model.generate(**model_inputs, **forced, **settings)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        output["sequences"] = sequences.reshape(rows, -1, sequences.shape[-1])
        if return_figures:
            for name in FIGURES:
                if getattr(result, name) is not None:
                    output[name] = getattr(result, name).reshape(rows, -1)
        return output

    def postprocess(
        self, output: dict, return_tensors: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> list[dict[str, Any]]:
        """Decode. Returns at most `num_return_sequences` different texts."""
        count = int(output["count"][0])
        if bool(output["is_empty"][0]):  # the translation of the placeholder is ignored
            nothing = {"translation_token_ids": torch.tensor([self.tokenizer.pad_token_id])}
            return [nothing if return_tensors else {"translation_text": ""} for _ in range(count)]
        records: list[dict[str, Any]] = []
        texts: set[str] = set()
        for index, tokens in enumerate(output["sequences"][0]):
            text = self.tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=clean_up_tokenization_spaces
            ).strip()
            if text in texts or len(texts) == count:
                continue
            texts.add(text)
            if return_tensors:
                records.append({"translation_token_ids": tokens})
                continue
            record = {"translation_text": text}
            for name in FIGURES:
                if name in output:
                    record["score" if name == "sequences_scores" else name] = output[name][0][index].item()
            records.append(record)
        return records


@lru_cache(maxsize=1)
def reranker_tokenizer(name: str) -> Any:
    """The tokenizer of a reranker; the last one is cached."""
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
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

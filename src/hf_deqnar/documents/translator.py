"""Translating requests with a model: encoding, batches of similar length, decoding."""

from collections.abc import Callable
from string import punctuation
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.constraints import MAX_TERMS
from ..models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline
from ..models.deqnar.text import clean_text
from .translation import Request


class Translator:
    """A model that translates requests.

    Args:
        model: any seq2seq model, or an ONNX export of a deqnar model.
        tokenizer: of the model.
        batch_size: texts translated together.
        options: of `generate`; `src_lang` and `tgt_lang` for multilingual models.

    >>> Translator(model, tokenizer)([Request("I like tea.")])                             # doctest: +SKIP
    ['Ich mag Tee.']
    """

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerBase, batch_size: int = 16, **options: Any) -> None:
        languages = {name: options.pop(name) for name in ("src_lang", "tgt_lang") if options.get(name) is not None}
        self.model, self.tokenizer, self.batch_size, self.options = model, tokenizer, batch_size, options
        self.pipeline = DeqNarTranslationPipeline(
            model=model, tokenizer=tokenizer, task="translation", device=model.device, **languages
        )
        self.languages = languages
        self.word_starts = word_starts(tokenizer, model.config.vocab_size) if can_force(model) else None

    def __call__(self, requests: list[Request], done: Callable[[int], Any] = lambda count: None) -> list[str]:
        """Translations in the order of the requests. A text that cannot be translated raises ValueError.

        Required texts are forced where the model can; whether a translation contains them is for the caller to check.

        Args:
            done: called with the number of texts of every batch that is translated.
        """
        encoded = [self.encode(request.text) for request in requests]
        texts = [row.pop("piece").copied or "" for row in encoded]  # of texts without letters
        order = sorted(range(len(requests)), key=lambda index: encoded[index]["input_ids"].shape[1])
        order = [index for index in order if clean_text(requests[index].text) and not texts[index]]
        for first in range(0, len(order), self.batch_size):
            chosen = order[first : first + self.batch_size]
            terms = [self.terms(requests[index]) for index in chosen]
            found = self.generate([encoded[index] for index in chosen], terms)
            for index, text in zip(chosen, found, strict=True):
                texts[index] = text
            done(len(chosen))
        return texts

    def encode(self, text: str) -> dict[str, Any]:
        """Inputs of `generate`; ValueError for a text that is too long or not valid Unicode."""
        (inputs,) = self.pipeline.preprocess(text, **self.languages, split=False, warn=False)
        return inputs

    def fits(self, text: str) -> bool:
        """Whether the model accepts a text of this length."""
        try:
            self.encode(text)
        except ValueError:
            return False
        return True

    def terms(self, request: Request) -> list[list[int]]:
        """Token ids of the required texts; none if the model cannot force them all."""
        if self.word_starts is None or len(request.required) > MAX_TERMS:
            return []
        terms = []
        for text in request.required:
            ids = self.tokenizer(text_target=text, add_special_tokens=False)["input_ids"]
            if self.tokenizer.decode(ids, skip_special_tokens=True).strip() != text:
                return []
            terms.append(ids)
        return terms

    def generate(self, encoded: list[dict[str, Any]], terms: list[list[list[int]]]) -> list[str]:
        """Translate one batch, with the terms of each text if they fit."""
        if any(terms):
            try:
                return self.generate_batch(encoded, forced_tokens=terms, word_starts=self.word_starts)
            except ValueError:  # the terms of a text do not fit
                if len(encoded) > 1:
                    both = zip(encoded, terms, strict=True)
                    return [text for row, wanted in both for text in self.generate([row], [wanted])]
        return self.generate_batch(encoded)

    def generate_batch(self, encoded: list[dict[str, Any]], **forced: Any) -> list[str]:
        padding = self.tokenizer.pad_token_id
        ids = [row["input_ids"][0] for row in encoded]
        inputs = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(inputs.shape[1])[None] < lengths[:, None]).long()
        options = {**self.options, **forced}
        if "forced_bos_token_id" in encoded[0]:
            options["forced_bos_token_id"] = encoded[0]["forced_bos_token_id"]
        if not is_deqnar(self.model.config):
            options = self.pipeline._prepare_generate_kwargs(options)
        device = self.model.device
        sequences = self.model.generate(input_ids=inputs.to(device), attention_mask=mask.to(device), **options)
        return [text.strip() for text in self.tokenizer.batch_decode(sequences, skip_special_tokens=True)]


def can_force(model: Any) -> bool:
    """Whether `generate` takes `forced_tokens`: deqnar models that torch runs."""
    return is_deqnar(model.config) and getattr(model, "lm_head", None) is not None


def word_starts(tokenizer: PreTrainedTokenizerBase, size: int) -> torch.Tensor:
    """Which tokens begin a word, or are punctuation, so that the word before is complete."""
    starts = torch.zeros(size, dtype=torch.bool)
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))):
        starts[index] = token.startswith(("\u0120", "\u2581")) or all(letter in punctuation for letter in token)
    return starts

"""Translating requests with a model: encoding, batches of similar length, decoding."""

from collections.abc import Callable
from itertools import groupby
from string import punctuation
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.constraints import MAX_TERMS
from ..models.deqnar.generation_deqnar import DeqNarGenerateOutput
from ..models.deqnar.pipeline_deqnar import DeqNarTranslationPipeline, candidates_of
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
        return [texts[0] for texts in self.n_best(requests, done)]

    def n_best(self, requests: list[Request], done: Callable[[int], Any] = lambda count: None) -> list[list[str]]:
        """The translation of every request and its alternatives, the best first. There may be fewer than wanted.

        Only texts with the same number of alternatives share a batch, because the number determines the beam size.
        """
        encoded = [self.encode(request.text) for request in requests]
        texts = [[row.pop("piece").copied or ""] for row in encoded]  # of texts without letters
        order = [index for index, request in enumerate(requests) if clean_text(request.text) and not texts[index][0]]
        order.sort(key=lambda index: (requests[index].alternatives, encoded[index]["input_ids"].shape[1]))
        for alternatives, group in groupby(order, key=lambda index: requests[index].alternatives):
            indices = list(group)
            for first in range(0, len(indices), self.batch_size):
                chosen = indices[first : first + self.batch_size]
                terms = [self.terms(requests[index]) for index in chosen]
                found = self.generate([encoded[index] for index in chosen], terms, alternatives + 1)
                for index, several in zip(chosen, found, strict=True):
                    texts[index] = several
                done(len(chosen))
        return texts

    def stream(self, request: Request, streamer: Any) -> tuple[str, DeqNarGenerateOutput | None]:
        """The translation of a request, whose drafts are sent to a streamer, and the output of `generate`; None if the
        text is copied, not translated.
        """
        encoded = self.encode(request.text)
        copied = encoded.pop("piece").copied
        if copied is not None:
            return copied, None
        terms, options = self.terms(request), {"streamer": streamer, "return_dict_in_generate": True}
        try:
            output = self.run([encoded], **options, **(self.forced([terms]) if terms else {}))
        except ValueError:
            if not terms:
                raise
            output = self.run([encoded], **options)  # the terms do not fit
        return self.decode(output.sequences)[0], output

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

    def forced(self, terms: list[list[list[int]]]) -> dict[str, Any]:
        """Options of `generate` that force the terms of every text of a batch."""
        return {"forced_tokens": terms, "word_starts": self.word_starts}

    def generate(self, encoded: list[dict[str, Any]], terms: list[list[list[int]]], count: int = 1) -> list[list[str]]:
        """Up to `count` translations of each text of a batch, with its terms if they fit."""
        if any(terms):
            try:
                return self.generate_batch(encoded, count, **self.forced(terms))
            except ValueError:  # the terms of a text do not fit
                if len(encoded) > 1:
                    both = zip(encoded, terms, strict=True)
                    return [texts for row, wanted in both for texts in self.generate([row], [wanted], count)]
        return self.generate_batch(encoded, count)

    def generate_batch(self, encoded: list[dict[str, Any]], count: int, **forced: Any) -> list[list[str]]:
        texts = self.decode(self.run(encoded, count, **forced))
        size = len(texts) // len(encoded)
        return [distinct(texts[first : first + size])[:count] for first in range(0, len(texts), size)]

    def decode(self, sequences: torch.Tensor) -> list[str]:
        return [text.strip() for text in self.tokenizer.batch_decode(sequences, skip_special_tokens=True)]

    def run(self, encoded: list[dict[str, Any]], count: int = 1, **further: Any) -> Any:
        """The output of `generate` for a batch, with at least `count` sequences of each text."""
        padding = self.tokenizer.pad_token_id
        ids = [row["input_ids"][0] for row in encoded]
        inputs = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
        lengths = torch.tensor([len(row) for row in ids])
        mask = (torch.arange(inputs.shape[1])[None] < lengths[:, None]).long()
        options = {**self.options, **self.search_options(count), **further}
        if "forced_bos_token_id" in encoded[0]:
            options["forced_bos_token_id"] = encoded[0]["forced_bos_token_id"]
        if not is_deqnar(self.model.config):
            options = self.pipeline._prepare_generate_kwargs(options)
        device = self.model.device
        return self.model.generate(input_ids=inputs.to(device), attention_mask=mask.to(device), **options)

    def search_options(self, count: int) -> dict[str, Any]:
        """Options of `generate` for at least this many translations of a text: a beam that has as many."""
        if count == 1:
            return {"num_return_sequences": 1}
        if is_deqnar(self.model.config):
            own = candidates_of(self.model, self.options)
        else:
            own = self.options.get("num_beams") or self.model.generation_config.num_beams or 1
        beam = max(own, count)
        return {"num_beams": beam, "num_return_sequences": beam}  # all, because different tokens can be the same text


def distinct(texts: list[str]) -> list[str]:
    """The first text, and the others without repetitions and empty ones."""
    return list(dict.fromkeys([texts[0], *filter(None, texts)]))


def can_force(model: Any) -> bool:
    """Whether `generate` takes `forced_tokens`: deqnar models that torch runs."""
    return is_deqnar(model.config) and getattr(model, "lm_head", None) is not None


def word_starts(tokenizer: PreTrainedTokenizerBase, size: int) -> torch.Tensor:
    """Which tokens begin a word, or are punctuation, so that the word before is complete."""
    starts = torch.zeros(size, dtype=torch.bool)
    for index, token in enumerate(tokenizer.convert_ids_to_tokens(range(min(size, len(tokenizer))))):
        starts[index] = token.startswith(("\u0120", "\u2581")) or all(letter in punctuation for letter in token)
    return starts

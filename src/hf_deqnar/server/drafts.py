"""Sending the drafts of a translation while it converges."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from torch import Tensor

from ..documents.plain_text import parse_text
from ..documents.sentences import shorten, split
from ..export.runtime import DeqNarOnnxModel
from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.text import clean_text
from .batching import Batcher

Event = tuple[str, dict[str, Any]]


class ClientLeft(Exception):
    """Ends the translation of a sentence whose client has left."""


def can_stream(model: Any) -> bool:
    """Whether a model has drafts: deqnar models that torch runs."""
    return is_deqnar(model.config) and not isinstance(model, DeqNarOnnxModel)


class DraftSender:
    """Translates a text sentence by sentence; every evaluation that changes the draft is an event.

    Events: `draft` (sentence, evaluation, text), `translation` (sentence, source, text, nfe, residual, converged,
    score), `done` (translatedText), `error` (error). The model runs in the thread of the batches.
    """

    def __init__(self, translator: Any, batcher: Batcher, text: str) -> None:
        self.translator, self.batcher = translator, batcher
        self.sentences = [
            part
            for paragraph in parse_text(text)
            if not isinstance(paragraph, str)
            for sentence, _ in split(paragraph.write(paragraph.text))
            for part, _ in shorten(sentence, translator.fits)
            if clean_text(part)
        ]
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.left = False

    async def events(self) -> AsyncIterator[Event]:
        """All events in order."""
        self.loop = asyncio.get_running_loop()
        texts = []
        for number, sentence in enumerate(self.sentences):
            work = asyncio.ensure_future(self.batcher.in_thread(self.translate, number, sentence))
            work.add_done_callback(self.sentence_ended)
            while (event := await self.queue.get()) is not None:
                yield event
            try:
                figures = work.result()
            except (ValueError, FloatingPointError) as error:
                yield "error", {"sentence": number, "error": str(error)}
                return
            texts.append(figures["text"])
            yield "translation", {"sentence": number, "source": sentence, **figures}
        yield "done", {"translatedText": " ".join(texts)}

    def sentence_ended(self, work: asyncio.Future) -> None:
        if not work.cancelled():
            work.exception()  # retrieved here, because a client that has left does not
        self.queue.put_nowait(None)

    def stop(self) -> None:
        """Called when the response has ended: the sentence in work is given up."""
        self.left = True

    def translate(self, number: int, sentence: str) -> dict[str, Any]:
        """Translate one sentence in the thread."""
        translator = self.translator
        encoded = translator.encode(sentence)
        streamer = Streamer(self, number)
        found = translator.model.generate(
            input_ids=encoded["input_ids"].to(translator.model.device),
            attention_mask=encoded["attention_mask"].to(translator.model.device),
            streamer=streamer,
            return_dict_in_generate=True,
            **translator.options,
        )
        text = translator.tokenizer.decode(found.sequences[0], skip_special_tokens=True).strip()
        figures: dict[str, Any] = {"text": text, "nfe": int(found.nfe[0]), "score": float(found.sequences_scores[0])}
        if found.residual is not None:
            figures |= {"residual": float(found.residual[0]), "converged": bool(found.converged[0])}
        return figures

    def send(self, event: Event) -> None:
        """Called in the thread."""
        if self.left:
            raise ClientLeft
        self.loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Streamer:
    """Receives the drafts of `generate`."""

    def __init__(self, sender: DraftSender, sentence: int) -> None:
        self.sender, self.sentence = sender, sentence
        self.evaluation, self.previous = 0, None

    def put_draft(self, value: Tensor, **rest) -> None:
        self.evaluation += 1
        text = self.sender.translator.tokenizer.decode(value.reshape(-1), skip_special_tokens=True).strip()
        if text != self.previous:
            self.sender.send(("draft", {"sentence": self.sentence, "evaluation": self.evaluation, "text": text}))
        self.previous = text

    def put(self, value: Tensor) -> None:
        """The translation is sent with its figures."""

    def end(self) -> None:
        pass

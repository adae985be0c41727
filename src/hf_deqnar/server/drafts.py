"""Sending the drafts of a translation while it converges."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from torch import Tensor

from ..documents.glossary import NO_GLOSSARY, Glossary
from ..documents.marks import MarkedText
from ..documents.plain_text import parse_text
from ..documents.translation import Request, choose_stand_ins, sentences_of, translate_sentence, with_placeholders
from ..export.runtime import DeqNarOnnxModel
from ..models.deqnar.configuration_deqnar import is_deqnar
from .batching import Batcher, Overloaded

Event = tuple[str, dict[str, Any]]


class ClientLeft(Exception):
    """Ends the translation of a sentence whose client has left."""


def can_stream(model: Any) -> bool:
    """Whether a model has drafts: deqnar models that torch runs."""
    return is_deqnar(model.config) and not isinstance(model, DeqNarOnnxModel)


class DraftSender:
    """Translates a text sentence by sentence; every evaluation that changes the draft is an event.

    Events: `draft` (sentence, evaluation, text), `translation` (sentence, source, text, nfe, residual, converged,
    score), `done` (translatedText), `error` (error). The requests of a sentence are those of `/translate`. The first
    one, the sentence as a whole, has the drafts and the figures; the others are translated in shared batches.
    """

    def __init__(self, translator: Any, batcher: Batcher, text: str, glossary: Glossary = NO_GLOSSARY) -> None:
        self.translator, self.batcher, self.glossary = translator, batcher, glossary
        self.document = parse_text(text)
        self.sentences = 0  # that have begun
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.left = False
        self.work: asyncio.Future | None = None

    async def events(self) -> AsyncIterator[Event]:
        """All events in order."""
        self.loop = asyncio.get_running_loop()
        self.work = asyncio.ensure_future(self.translate())
        self.work.add_done_callback(self.ended)
        while (event := await self.queue.get()) is not None:
            yield event
        self.work.result()  # raises an error of the server

    def ended(self, work: asyncio.Future) -> None:
        if not work.cancelled():
            work.exception()  # retrieved here, because a client that has left does not
        self.queue.put_nowait(None)

    def stop(self) -> None:
        """Called when the response has ended: the sentence in work is given up."""
        self.left = True
        if self.work is not None:
            self.work.cancel()

    async def translate(self) -> None:
        """Translate the document, as `/translate` does."""
        parts = []
        try:
            for part in self.document:
                parts.append(part if isinstance(part, str) else part.write(await self.translate_paragraph(part)))
        except (ValueError, FloatingPointError) as error:
            self.queue.put_nowait(("error", {"sentence": self.sentences - 1, "error": str(error)}))
        except Overloaded:
            message = "Too many sentences are waiting; try again later."
            self.queue.put_nowait(("error", {"sentence": self.sentences - 1, "error": message}))
        else:
            self.queue.put_nowait(("done", {"translatedText": "".join(parts)}))

    async def translate_paragraph(self, paragraph: MarkedText) -> str:
        """The translation of marked text, with marks."""
        texts = []
        for sentence, space in sentences_of(paragraph, self.translator.fits):
            text = await self.translate_sentence(sentence, paragraph) if sentence.strip() else sentence
            texts.append(text + space)
        return "".join(texts)

    async def translate_sentence(self, sentence: str, paragraph: MarkedText) -> str:
        """The translation of a sentence with marks."""
        number, figures = self.sentences, {"nfe": 0}
        self.sentences += 1
        rounds = translate_sentence(sentence, paragraph.marks, self.glossary)
        stand_ins = choose_stand_ins(sentence, paragraph.marks)
        streamer = Streamer(self, number, lambda text: paragraph.fill(with_placeholders(text, stand_ins)))
        try:
            whole, *others = next(rounds)
            text, figures = await self.batcher.in_thread(self.translate_whole, whole, streamer)
            requests = rounds.send([text, *await self.translate_others(others)])
            while True:
                requests = rounds.send(await self.translate_others(requests))
        except StopIteration as finished:
            text = finished.value
        source = paragraph.fill(sentence)
        translation = {"sentence": number, "source": source, "text": paragraph.fill(text), **figures}
        self.queue.put_nowait(("translation", translation))
        return text

    async def translate_others(self, requests: list[Request]) -> list[str]:
        return [texts[0] for texts in await self.batcher.submit(requests)] if requests else []

    def translate_whole(self, request: Request, streamer: "Streamer") -> tuple[str, dict[str, Any]]:
        """Translate a sentence in the thread; returns its figures too."""
        text, found = self.translator.stream(request, streamer)
        if found is None:
            return text, {"nfe": 0}
        figures: dict[str, Any] = {"nfe": int(found.nfe[0]), "score": float(found.sequences_scores[0])}
        if found.residual is not None:
            figures |= {"residual": float(found.residual[0]), "converged": bool(found.converged[0])}
        return text, figures

    def send(self, event: Event) -> None:
        """Called in the thread."""
        if self.left:
            raise ClientLeft
        self.loop.call_soon_threadsafe(self.queue.put_nowait, event)


class Streamer:
    """Receives the drafts of `generate`.

    Args:
        sender: of the events.
        sentence: its number.
        restore: puts back the placeholders of a draft.
    """

    def __init__(self, sender: DraftSender, sentence: int, restore: Callable[[str], str]) -> None:
        self.sender, self.sentence, self.restore = sender, sentence, restore
        self.evaluation = 0
        self.previous: str | None = None

    def put_draft(self, value: Tensor, **rest) -> None:
        self.evaluation += 1
        text = self.restore(self.sender.translator.decode(value.reshape(1, -1))[0])
        if text != self.previous:
            self.sender.send(("draft", {"sentence": self.sentence, "evaluation": self.evaluation, "text": text}))
        self.previous = text

    def put(self, value: Tensor) -> None:
        """The translation is sent with its figures."""

    def end(self) -> None:
        pass

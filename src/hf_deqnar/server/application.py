"""The FastAPI application of `hf-deqnar serve`."""

import asyncio
import hmac
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import hf_deqnar

from ..documents.formats import PARSERS
from ..documents.glossary import NO_GLOSSARY, Glossary
from ..documents.translation import RoundsOfSeveral, translate_alternatives
from ..models.deqnar.text import clean_text
from .batching import Batcher, Overloaded
from .drafts import DraftSender, can_stream
from .metrics import Metrics
from .schemas import ErrorResponse, Health, Language, TranslateRequest, TranslateResponse

Result = TypeVar("Result")


@dataclass(frozen=True)
class ServerOptions:
    """Languages and limits of a server.

    Attributes:
        source, target: codes of the languages, as clients write them.
        glossary: terms with the translation that they must have.
        api_keys: keys, one of which a translation request must contain; none are required if empty.
        batch_size: most sentences of a batch.
        batch_delay: seconds that an idle server waits for further sentences.
        max_body: most bytes of a body.
        max_characters: most characters of a request.
        max_texts: most texts of a request.
        max_requests: most translation requests in progress.
        max_waiting: most sentences that wait.
        body_seconds: time in which a body must arrive.
    """

    source: str
    target: str
    glossary: Glossary = NO_GLOSSARY
    api_keys: frozenset[str] = field(default_factory=frozenset)
    batch_size: int = 16
    batch_delay: float = 0.002
    max_body: int = 1_000_000
    max_characters: int = 100_000
    max_texts: int = 1000
    max_requests: int = 256
    max_waiting: int = 10_000
    body_seconds: float = 30.0


class Refused(HTTPException):
    """A request that gets an error with a message."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})


def errors_with(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a path, for the OpenAPI description."""
    return {status: {"model": ErrorResponse} for status in statuses}


def create_application(translator: Any, options: ServerOptions, model_name: str) -> FastAPI:
    """The application.

    Args:
        translator: a `documents.translator.Translator`.
        options: languages and limits.
        model_name: reported by `/health`.
    """
    metrics = Metrics()
    batcher = Batcher(
        translator.n_best, options.batch_size, options.max_waiting, options.batch_delay, metrics.batch_size.observe
    )
    metrics.waiting.set_function(lambda: batcher.waiting)
    active = 0

    @asynccontextmanager
    async def lifespan(application: FastAPI) -> AsyncIterator[None]:
        batcher.start()
        yield
        await batcher.stop()

    application = FastAPI(
        title="hf_deqnar",
        version=hf_deqnar.__version__,
        description="Translation, with the requests and responses of LibreTranslate.",
        lifespan=lifespan,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
    )

    application.add_middleware(CountingMiddleware, metrics=metrics)

    @application.exception_handler(StarletteHTTPException)
    async def as_error(request: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)

    @application.exception_handler(Exception)
    async def as_failure(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": "The server failed; its log has the reason."}, 500)

    @contextmanager
    def place() -> Iterator[None]:
        """A place among the requests in progress."""
        nonlocal active
        if active >= options.max_requests:
            raise Refused(503, f"{options.max_requests} requests are in progress; try again later.", Retry_After="1")
        active += 1
        metrics.active.set(active)
        try:
            yield
        finally:
            active -= 1
            metrics.active.set(active)

    async def read(request: Request) -> TranslateRequest:
        """The checked body of a translation request."""
        try:
            async with asyncio.timeout(options.body_seconds):
                body = await read_body(request, options.max_body)
        except TimeoutError as error:
            raise Refused(408, f"The body did not arrive within {options.body_seconds:g} seconds.") from error
        asked = parse_body(body, request.headers.get("content-type", "application/json"))
        check_request(asked, options)
        metrics.characters.inc(sum(map(len, as_list(asked.q))))
        return asked

    async def rounds_of(rounds: RoundsOfSeveral) -> list[str]:
        """The result of rounds whose requests are translated in shared batches."""
        try:
            requests = next(rounds)
            while True:
                requests = rounds.send(await batcher.submit(requests))
        except StopIteration as finished:
            return finished.value

    async def translate_all(asked: TranslateRequest) -> list[list[str]]:
        """The translation of every text, followed by its alternatives."""
        documents = [PARSERS[asked.format](text) for text in as_list(asked.q)]
        found = (
            rounds_of(translate_alternatives(part, asked.alternatives, options.glossary, translator.fits))
            for part in documents
        )
        tasks = [asyncio.ensure_future(translation) for translation in found]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    @application.post(
        "/translate",
        response_model=TranslateResponse,
        responses=errors_with(400, 403, 408, 413, 415, 500, 503),
        openapi_extra=request_body(options),
        summary="Translate a text or a list of texts",
    )
    async def translate(request: Request) -> Response:
        with place():
            asked = await read(request)
            try:
                found = await unless_disconnected(request, translate_all(asked))
            except ValueError as error:
                raise Refused(400, str(error)) from error
            except Overloaded as error:
                message = f"More than {options.max_waiting} sentences are waiting; try again later."
                raise Refused(503, message, Retry_After="1") from error
            if found is None:
                metrics.disconnected.inc()
                return Response(status_code=499)  # the connection is closed
        answer: dict[str, Any] = {"translatedText": [texts[0] for texts in found]}
        if asked.alternatives:
            answer["alternatives"] = [texts[1:] for texts in found]
        return JSONResponse({name: texts[0] if isinstance(asked.q, str) else texts for name, texts in answer.items()})

    if can_stream(translator.model):

        @application.post(
            "/translate/stream",
            response_class=StreamingResponse,
            responses={
                200: {"content": {"text/event-stream": {}}, "description": "Events: draft, translation, done, error."},
                **errors_with(400, 403, 408, 413, 415, 500, 503),
            },
            openapi_extra=request_body(options, streamed=True),
            summary="Translate a text and send every draft as a server-sent event",
        )
        async def stream(request: Request) -> StreamingResponse:
            opened = place()
            opened.__enter__()
            try:
                asked = await read(request)
                if not isinstance(asked.q, str) or asked.format != "text" or asked.alternatives:
                    raise Refused(400, "A stream translates one text of format 'text', without alternatives.")
            except BaseException:
                opened.__exit__(None, None, None)
                raise
            sender = DraftSender(translator, batcher, asked.q, options.glossary)

            async def events() -> AsyncIterator[str]:
                finished = False
                try:
                    async for name, data in sender.events():
                        yield f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"
                    finished = True
                finally:
                    sender.stop()
                    opened.__exit__(None, None, None)
                    if not finished:
                        metrics.disconnected.inc()

            return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @application.get("/languages", summary="Languages that can be translated")
    async def languages() -> list[Language]:
        return [Language(code=options.source, name=language_name(options.source), targets=[options.target])]

    @application.get("/health", summary="Whether the server is ready")
    async def health() -> Health:
        return Health(status="ok", model=model_name, version=hf_deqnar.__version__)

    @application.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}, "description": "Metrics for Prometheus."}},
        summary="Metrics for Prometheus",
    )
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    return application


class CountingMiddleware:
    """Counts and times responses, up to the last byte of a stream."""

    def __init__(self, application: ASGIApp, metrics: Metrics) -> None:
        self.application, self.metrics = application, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.application(scope, receive, send)
            return
        start, status = time.perf_counter(), 500

        async def send_counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.application(scope, receive, send_counted)
        finally:
            name = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(name, status).inc()
            self.metrics.seconds.labels(name).observe(time.perf_counter() - start)


def request_body(options: ServerOptions, *, streamed: bool = False) -> dict[str, Any]:
    """The OpenAPI description of a translation request, with the languages and limits of this server."""
    schema = TranslateRequest.model_json_schema()
    text, texts = schema["properties"]["q"]["anyOf"]
    text["maxLength"] = options.max_characters
    texts["maxItems"] = options.max_texts
    if streamed:
        schema["properties"]["q"] = {**text, "description": "A text."}
        schema["properties"]["format"] = {"const": "text", "description": "Only text has drafts."}
        schema["properties"]["alternatives"] = {"const": 0, "description": "A stream has no alternatives."}
    schema["properties"]["source"]["enum"] = [options.source, "auto"]
    schema["properties"]["target"]["enum"] = [options.target]
    if options.api_keys:
        schema["required"] = [*schema["required"], "api_key"]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def read_body(request: Request, most: int) -> bytes:
    """The body; refused as soon as it is known to be too large."""
    too_large = Refused(413, f"The body is larger than {most:,} bytes; send the text in parts.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > most:
        raise too_large
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise too_large
    return bytes(body)


def parse_body(body: bytes, content_type: str) -> TranslateRequest:
    """A request from JSON or from form fields."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in ("application/json", "application/x-www-form-urlencoded"):
        raise Refused(415, "The body must be application/json or application/x-www-form-urlencoded.")
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(400, f"The body is not valid UTF-8 at byte {error.start + 1}.") from error
    try:
        if kind == "application/json":
            values = json.loads(text)
        else:
            fields = parse_qs(text, keep_blank_values=True, errors="strict")
            values = {name: found if name == "q" and len(found) > 1 else found[-1] for name, found in fields.items()}
            if re.fullmatch("[0-9]{1,9}", values.get("alternatives", "")):
                values["alternatives"] = int(values["alternatives"])
    except UnicodeDecodeError as error:
        raise Refused(400, "A form field is not valid UTF-8.") from error
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"The body is not valid JSON: {error}") from error
    try:
        return TranslateRequest.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part.islower())
        raise Refused(400, f"{place or 'The body'}: {problem['msg']}") from error


def check_request(asked: TranslateRequest, options: ServerOptions) -> None:
    """Refuse a request without key, for other languages, or of too much or invalid text."""
    known = [
        hmac.compare_digest(key.encode(), (asked.api_key or "").encode("utf-8", "replace")) for key in options.api_keys
    ]
    if options.api_keys and not any(known):
        raise Refused(403, "The api_key is missing or not valid.")
    if asked.source not in (options.source, "auto"):
        raise Refused(400, f"{asked.source} is not supported as source; this server translates from {options.source}.")
    if asked.target != options.target:
        raise Refused(400, f"{asked.target} is not supported as target; this server translates to {options.target}.")
    texts = as_list(asked.q)
    if len(texts) > options.max_texts:
        raise Refused(400, f"A request may have {options.max_texts:,} texts, not {len(texts):,}.")
    characters = sum(map(len, texts))
    if characters > options.max_characters:
        raise Refused(400, f"A request may have {options.max_characters:,} characters, not {characters:,}.")
    for text in texts:
        try:
            clean_text(text)
        except ValueError as error:
            raise Refused(400, str(error)) from error


def as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result of some work; None, and the work is cancelled, if the client leaves before."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for pending in (task, left):
            pending.cancel()
        with suppress(asyncio.CancelledError):
            await left


async def wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def language_name(code: str) -> str:
    """The English name of a language code; the code itself if it is not known here."""
    return NAMES.get(code.partition("-")[0].partition("_")[0].lower(), code)


NAMES = {
    "ar": "Arabic", "bg": "Bulgarian", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "et": "Estonian", "fi": "Finnish", "fr": "French", "he": "Hebrew", "hi": "Hindi",
    "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese", "ko": "Korean", "lt": "Lithuanian",
    "lv": "Latvian", "nb": "Norwegian", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian",
    "ru": "Russian", "sk": "Slovak", "sl": "Slovenian", "sv": "Swedish", "tr": "Turkish", "uk": "Ukrainian",
    "vi": "Vietnamese", "zh": "Chinese",
}  # fmt: skip

__all__ = ["ServerOptions", "create_application"]

"""Serve translations over HTTP, with the requests and responses of LibreTranslate.

    hf-deqnar serve
    hf-deqnar serve --model my-model --source en --target de --port 8080 --api_keys keys.txt

POST /translate translates texts or HTML, POST /translate/stream sends every draft, and GET /languages, /health,
/metrics and /openapi.json describe the server. SIGTERM or Ctrl-C ends it when the requests in progress are answered.
"""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from .extras import requires_extra


@dataclass
class ServeArguments:
    """Model, address, limits and keys."""

    model: str | None = field(default=None, metadata={"help": "Directory or hub id. Default: the bundled model."})
    source: str | None = field(
        default=None, metadata={"help": "Code of the source language for clients, such as en. Default: the bundled's."}
    )
    target: str | None = field(default=None, metadata={"help": "Code of the target language, such as de."})
    src_lang: str | None = field(
        default=None, metadata={"help": "Source language as a multilingual model names it, such as eng_Latn."}
    )
    tgt_lang: str | None = field(default=None, metadata={"help": "Target language as a multilingual model names it."})
    host: str = field(default="127.0.0.1", metadata={"help": "Address to listen on; 0.0.0.0 for all networks."})
    port: int = field(default=5000, metadata={"help": "Port to listen on; 0 for a free one."})
    device: str | None = field(
        default=None, metadata={"help": "Device, such as cpu or cuda:0. Default: cuda if available, else cpu."}
    )
    threads: int | None = field(
        default=None, metadata={"help": "Maximum number of threads. Default: one per processor core."}
    )
    glossary: Path | None = field(
        default=None, metadata={"metavar": "FILE", "help": "Lines of source term, tab and required translation."}
    )
    api_keys: Path | None = field(
        default=None, metadata={"metavar": "FILE", "help": "Accepted API keys, one a line. Default: none required."}
    )
    batch_size: int = field(default=16, metadata={"help": "Most sentences translated together."})
    batch_delay: float = field(
        default=0.002, metadata={"help": "Seconds that an idle server waits for further sentences of a batch."}
    )
    max_body: int = field(default=1_000_000, metadata={"help": "Most bytes of a request."})
    max_characters: int = field(default=100_000, metadata={"help": "Most characters of a request."})
    max_texts: int = field(default=1000, metadata={"help": "Most texts of a request."})
    max_requests: int = field(default=256, metadata={"help": "Most translation requests in progress."})
    max_waiting: int = field(default=10_000, metadata={"help": "Most sentences that wait to be translated."})
    shutdown_seconds: int = field(
        default=60, metadata={"help": "Time that requests in progress have after SIGTERM or Ctrl-C."}
    )

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_body", "max_characters", "max_texts", "max_requests", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, not {getattr(self, name)}.")
        for name in ("batch_delay", "shutdown_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"--{name} must be at least 0, not {getattr(self, name)}.")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port must be from 0 to 65535, not {self.port}.")
        if self.model is not None and (self.source is None or self.target is None):
            raise ValueError("Name the languages of the model, such as --source en --target de.")


ARGUMENTS = (ServeArguments,)
BUNDLED_LANGUAGES = ("en", "de")


def run(arguments: ServeArguments) -> None:
    with requires_extra("serve", "hf-deqnar serve"):
        import uvicorn

        from ..server.application import ServerOptions, create_application
    from ..documents.glossary import NO_GLOSSARY, read_glossary
    from ..documents.translation import Request
    from ..documents.translator import Translator
    from .addresses import listen
    from .loading import bundled_model, load_model

    source, target = arguments.source or BUNDLED_LANGUAGES[0], arguments.target or BUNDLED_LANGUAGES[1]
    options = ServerOptions(
        source=source,
        target=target,
        glossary=NO_GLOSSARY if arguments.glossary is None else read_glossary(arguments.glossary),
        api_keys=frozenset() if arguments.api_keys is None else read_keys(arguments.api_keys),
        **{
            name: getattr(arguments, name)
            for name in (
                "batch_size", "batch_delay", "max_body", "max_characters", "max_texts", "max_requests", "max_waiting",
            )
        },
    )  # fmt: skip
    listening = listen(arguments.host, arguments.port)  # before the model is loaded, to report a port in use at once
    name = arguments.model or bundled_model()
    model, tokenizer = load_model(name, arguments.device, threads=arguments.threads)
    languages = {"src_lang": arguments.src_lang, "tgt_lang": arguments.tgt_lang}
    translator = Translator(model, tokenizer, arguments.batch_size, **languages)
    translator([Request("A test.")])  # errors of the model, and first-time costs, before the first request
    application = create_application(translator, options, arguments.model or "bundled")
    settings = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=arguments.shutdown_seconds,
    )
    server = uvicorn.Server(settings)

    def end(*_: object) -> None:  # until uvicorn has its own handlers, and when it raises the signal again at its end
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    host, port = listening.getsockname()[:2]
    print(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    server.run(sockets=[listening])


def read_keys(path: Path) -> frozenset[str]:
    """The keys of a file."""
    keys = frozenset(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    if not keys:
        raise ValueError(f"{path} contains no key; write one key a line.")
    return keys

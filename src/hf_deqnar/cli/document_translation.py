"""Translating documents, whose markup is kept, and printing them."""

import sys
from collections.abc import Callable, Iterator

from tqdm import tqdm

from ..documents.formats import PARSERS
from ..documents.glossary import NO_GLOSSARY, read_glossary
from ..documents.marks import Document
from ..documents.translation import Request, translate_document
from ..documents.translator import Translator
from ..utils.files import write_text
from .line_translation import generate_settings
from .loading import bundled_model, load_model
from .translate import TranslationArguments


def translate_documents(options: TranslationArguments) -> int:
    """Translate --input, standard input or every argument as a document; returns the exit status."""
    glossary = NO_GLOSSARY if options.glossary is None else read_glossary(options.glossary)
    documents = [parse(name, text, options.document_format) for name, text in read_documents(options)]
    sys.stdout.reconfigure(encoding="utf-8", errors="replace", newline="")
    if options.model is None:
        options.model = bundled_model()
    model, tokenizer = load_model(options.model, options.device, options.runtime, options.threads)
    translator = Translator(model, tokenizer, options.batch_size, **generate_settings(options, model))
    for document in documents:
        text = translate_document(document, with_progress(translator), glossary, translator.fits)
        if options.output is not None:
            write_text(options.output, text)
            continue
        print(text, end="", flush=True)
        if options.text:
            print()
    return 0


def read_documents(options: TranslationArguments) -> Iterator[tuple[str, str]]:
    """Names and texts of all documents. Line ends are kept as they are."""
    if options.text:
        yield from ((f"argument {number}", text) for number, text in enumerate(options.text, start=1))
        return
    name = "stdin" if options.input is None else str(options.input)
    raw = sys.stdin.buffer.read() if options.input is None else options.input.read_bytes()
    try:
        yield name, raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{name}, line {line}: not valid UTF-8 at byte {error.start + 1}; save it as UTF-8."
        ) from error


def parse(name: str, text: str, format: str) -> Document:
    try:
        return PARSERS[format](text)
    except ValueError as error:
        raise ValueError(f"{name}, {error}") from error


def with_progress(translator: Translator) -> Callable[[list[Request]], list[str]]:
    """The translator with a progress bar, on a terminal and after two seconds."""

    def translate(requests: list[Request]) -> list[str]:
        with tqdm(total=len(requests), unit="sentence", delay=2, disable=None, file=sys.stderr) as progress:
            return translator(requests, progress.update)

    return translate

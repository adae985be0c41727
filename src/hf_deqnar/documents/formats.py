"""The document formats by name and by file ending."""

from collections.abc import Callable
from pathlib import Path

from .html_text import parse_html
from .markdown import parse_markdown
from .marks import Document, MarkedText
from .plain_text import parse_text
from .subtitles import parse_srt


def parse_lines(text: str) -> Document:
    """Every line is a sentence or a few.

    >>> [part if isinstance(part, str) else part.text for part in parse_lines("One.\\n\\nTwo.")]
    ['One.', '\\n', '\\n', 'Two.']
    """
    document: Document = []
    for line in text.splitlines(keepends=True):
        body = line.rstrip("\r\n")
        if body:
            document.append(MarkedText())
            document[-1].add_text(body)  # type: ignore[union-attr]  # it was appended here
        if len(line) > len(body):
            document.append(line[len(body) :])
    return document


PARSERS: dict[str, Callable[[str], Document]] = {
    "lines": parse_lines,
    "text": parse_text,
    "srt": parse_srt,
    "markdown": parse_markdown,
    "html": parse_html,
}
ENDINGS = {".srt": "srt", ".md": "markdown", ".markdown": "markdown", ".html": "html", ".htm": "html"}


def format_of(path: Path) -> str:
    """The format of a file by its ending; `lines` for all others.

    >>> format_of(Path("film.SRT")), format_of(Path("corpus.en"))
    ('srt', 'lines')
    """
    return ENDINGS.get(path.suffix.lower(), "lines")

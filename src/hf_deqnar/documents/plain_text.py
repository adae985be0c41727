"""Plain text: paragraphs between blank lines, and list items."""

import re
import textwrap
from functools import partial

from .marks import Document, MarkedText

ITEM = re.compile(r"^[^\S\n]*(?:[-*•–]|\d+[.)])[^\S\n]+", re.MULTILINE)
SEPARATOR = re.compile(r"(?<!\s)(\s*\n[^\S\n]*\n\s*|\A\s+|\s+\Z)")


def parse_text(text: str) -> Document:
    """Paragraphs and what separates them. A paragraph of several lines is wrapped again to their width.

    >>> [part if isinstance(part, str) else part.text for part in parse_text("One two\\nthree.\\n\\n- Four\\n- five")]
    ['One two three.', '\\n\\n', '- ', 'Four', '\\n', '- ', 'five']
    """
    document: Document = []
    for part in SEPARATOR.split(text):
        if not part.strip():
            document.append(part)
            continue
        start = 0
        for item in ITEM.finditer(part):
            add_paragraph(document, part[start : item.start()])
            document.append(item[0])
            start = item.end()
        add_paragraph(document, part[start:])
    return [part for part in document if part != ""]


def add_paragraph(document: Document, text: str) -> None:
    """Append a paragraph or list item, which may have several lines, and the line break after it."""
    if not text.strip():
        document.append(text)
        return
    lines = text.strip().splitlines()
    width = max(map(len, lines)) if len(lines) > 1 else None
    paragraph = MarkedText(arrange=partial(wrap_lines, width=width))
    paragraph.add_text(" ".join(line.strip() for line in lines))
    document += [paragraph, text[len(text.rstrip()) :]]


def wrap_lines(text: str, width: int | None) -> str:
    """Text in lines of at most this width; words and markup are not broken."""
    if width is None:
        return text
    return "\n".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)) or text

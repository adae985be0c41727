"""Simple HTML: tags are kept as they are written, the text between them is translated."""

import html
import re

from .marks import Document, MarkedText

# Tags inside a sentence; every other tag ends it.
INLINE = frozenset(
    [
        "a",
        "abbr",
        "acronym",
        "b",
        "bdi",
        "bdo",
        "big",
        "cite",
        "data",
        "del",
        "dfn",
        "em",
        "font",
        "i",
        "img",
        "input",
        "ins",
        "kbd",
        "label",
        "mark",
        "q",
        "s",
        "small",
        "span",
        "strike",
        "strong",
        "sub",
        "sup",
        "time",
        "tt",
        "u",
        "var",
        "wbr",
    ]
)
VOID = frozenset(["br", "hr", "img", "input", "wbr", "meta", "link", "area", "base", "col", "embed", "source", "track"])
# Elements whose contents are not text to translate.
VERBATIM = frozenset(["script", "style", "pre", "code", "kbd", "samp", "var", "textarea", "svg", "math", "template"])
TOKEN = re.compile(
    r"<!--.*?(?:-->|\Z)|<![a-zA-Z\[].*?(?:>|\Z)|<\?.*?(?:>|\Z)"
    r"|<(?P<closing>/?)(?P<name>[a-zA-Z][\w:-]*)(?:\"[^\"]*\"|'[^']*'|[^'\">])*>",
    re.DOTALL,
)


def escape(text: str) -> str:
    return html.escape(text, quote=False)


def parse_html(text: str) -> Document:
    """The tags and sentences of HTML. Tags need not be closed; `<` that begins no tag is text, as in browsers.

    >>> document = parse_html("<p>Tea &amp; <b>milk</b></p><script>a < b</script>")
    >>> [part if isinstance(part, str) else len(part.marks) for part in document]
    ['<p>', 2, '</p>', '<script>a < b</script>']
    """
    document: Document = []
    paragraph = MarkedText(escape=escape)
    open_tags: list[tuple[str, str]] = []  # inline elements of the paragraph: name, mark
    position = 0

    def end_paragraph() -> None:
        nonlocal paragraph
        if paragraph.text:
            document.append(paragraph)
        paragraph = MarkedText(escape=escape)
        open_tags.clear()

    while (match := TOKEN.search(text, position)) is not None:
        paragraph.add_text(html.unescape(text[position : match.start()]))
        position = match.end()
        name, closing = (match["name"] or "").lower(), bool(match["closing"])
        verbatim = name in VERBATIM or re.search(r"""\stranslate\s*=\s*["']?no\b""", match[0], re.IGNORECASE)
        if verbatim and not closing and name not in VOID and not match[0].endswith("/>"):
            position = end_of_element(text, position, name)
            kept = text[match.start() : position]
            if name in INLINE or name in ("code", "samp"):
                add_kept(paragraph, kept)
            else:
                end_paragraph()
                document.append(kept)
        elif name not in INLINE and name:
            end_paragraph()
            document.append(match[0])
        elif closing:
            mark = paragraph.add_mark(match[0], "closing")
            opened = next((index for index in reversed(range(len(open_tags))) if open_tags[index][0] == name), None)
            if opened is not None:
                paragraph.pair(open_tags[opened][1], mark)
                del open_tags[opened:]
        elif not name or name in VOID or match[0].endswith("/>"):
            paragraph.add_mark(match[0], "single")
        else:
            open_tags.append((name, paragraph.add_mark(match[0], "opening")))
    paragraph.add_text(html.unescape(text[position:]))
    end_paragraph()
    return document


def add_kept(paragraph: MarkedText, kept: str) -> None:
    """Append an element that is part of the sentence but not translated."""
    write, paragraph.escape = paragraph.escape, str  # it is written as it is
    paragraph.add_mark(kept, "placeholder")
    paragraph.escape = write


def end_of_element(text: str, position: int, name: str) -> int:
    """Where an element ends whose tag ends at a position; the end of the text if it is not closed."""
    depth = 1
    for match in re.finditer(rf"<(/?){re.escape(name)}\b[^>]*>", text[position:], re.IGNORECASE):
        depth += -1 if match[1] else 0 if match[0].endswith("/>") else 1
        if depth == 0:
            return position + match.end()
    return len(text)

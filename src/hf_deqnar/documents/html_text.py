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
# A comment, a declaration, or the beginning of a tag.
START = re.compile(
    r"<!--.*?(?:-->|\Z)|<![a-zA-Z\[].*?(?:>|\Z)|<\?.*?(?:>|\Z)|<(?P<closing>/?)(?P<name>[a-zA-Z][\w:-]*)", re.DOTALL
)
UNQUOTED = re.compile(r"[^'\">]*")


class Markup:
    """Finds the tags and comments of a text, from its beginning to its end, in linear time.

    >>> markup = Markup("a < b <i title='>'>c</i> <b")
    >>> [(match["name"], end) for match, end in (markup.find(0), markup.find(19))], markup.find(24)
    ([('i', 19), ('i', 24)], None)
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.unfinished: set[int] = set()  # places outside of quotes from which no tag ends
        self.unfinished_until = 0

    def find(self, position: int) -> tuple[re.Match, int] | None:
        """The next tag or comment and where it ends; None if there is no other."""
        for match in START.finditer(self.text, position):
            end = match.end() if match["name"] is None else self.end_of_tag(match.end())
            if end is not None:
                return match, end
        return None

    def end_of_tag(self, position: int) -> int | None:
        """Where a tag ends, of which a place outside of quotes is given; None if it does not end.

        What was read in vain for one tag is not read again for the next one, or many tags that do not end would take
        quadratic time.
        """
        if position < self.unfinished_until:
            return None
        first, places = 0, []
        while position > 0:
            match = UNQUOTED.match(self.text, position)
            assert match is not None  # it matches the empty text
            place = match.end()
            first = first or place
            if self.text[place : place + 1] == ">":
                return place + 1
            places.append(place)
            if place in self.unfinished or place == len(self.text):
                break
            position = self.text.find(self.text[place], place + 1) + 1  # 0 if the quote is not closed
        self.unfinished.update(places)
        self.unfinished_until = first
        return None


def escape(text: str) -> str:
    return html.escape(text, quote=False)


def unescape(text: str) -> str:
    """The text of HTML. A reference to a character with too many digits is that of no character."""
    text = re.sub(r"(&#[xX]?)0{9,}", r"\g<1>0", text)
    return html.unescape(re.sub(r"&#(?:[0-9]{20,}|[xX][0-9a-fA-F]{20,});?", "\ufffd", text))


def parse_html(text: str) -> Document:
    """The tags and sentences of HTML. Tags need not be closed; `<` that begins no tag is text, as in browsers.

    >>> document = parse_html("<p>Tea &amp; <b>milk</b></p><script>a < b</script>")
    >>> [part if isinstance(part, str) else len(part.marks) for part in document]
    ['<p>', 2, '</p>', '<script>a < b</script>']
    """
    document: Document = []
    paragraph = MarkedText(escape=escape)
    open_tags: list[tuple[str, str]] = []  # inline elements of the paragraph: name, mark
    markup, position = Markup(text), 0

    def end_paragraph() -> None:
        nonlocal paragraph
        if paragraph.text:
            document.append(paragraph)
        paragraph = MarkedText(escape=escape)
        open_tags.clear()

    while (found := markup.find(position)) is not None:
        match, end = found
        paragraph.add_text(unescape(text[position : match.start()]))
        position, tag = end, text[match.start() : end]
        name, closing = (match["name"] or "").lower(), bool(match["closing"])
        verbatim = name in VERBATIM or re.search(r"""\stranslate\s*=\s*["']?no\b""", tag, re.IGNORECASE)
        if verbatim and not closing and name not in VOID and not tag.endswith("/>"):
            position = end_of_element(text, position, name)
            kept = text[match.start() : position]
            if name in INLINE or name in ("code", "samp"):
                add_kept(paragraph, kept)
            else:
                end_paragraph()
                document.append(kept)
        elif name not in INLINE and name:
            end_paragraph()
            document.append(tag)
        elif closing:
            mark = paragraph.add_mark(tag, "closing")
            opened = next((index for index in reversed(range(len(open_tags))) if open_tags[index][0] == name), None)
            if opened is not None:
                paragraph.pair(open_tags[opened][1], mark)
                del open_tags[opened:]
        elif not name or name in VOID or tag.endswith("/>"):
            paragraph.add_mark(tag, "single")
        else:
            open_tags.append((name, paragraph.add_mark(tag, "opening")))
    paragraph.add_text(unescape(text[position:]))
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
    last = text.rfind(">") + 1  # without which the pattern would search the rest of the text for every tag
    for match in re.compile(rf"<(/?){re.escape(name)}\b[^>]*>", re.IGNORECASE).finditer(text, position, last):
        depth += -1 if match[1] else 0 if match[0].endswith("/>") else 1
        if depth == 0:
            return match.end()
    return len(text)

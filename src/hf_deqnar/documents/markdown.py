"""Markdown: code, links, tables and lists keep their markup."""

import re

from .html_text import Markup
from .marks import Document, MarkedText
from .subtitles import join_literals

FENCE = re.compile(r"\s*(`{3,}|~{3,})")
# What stands before the text of a line: quotes, list items, task boxes, headings.
PREFIX = re.compile(r"\s*(?:>\s?|[-*+]\s+(?:\[[ xX]\]\s+)?|\d+[.)]\s+|#{1,6}\s+)*")
STARTS_BLOCK = re.compile(r"\s*(?:>|[-*+]\s|\d+[.)]\s|#{1,6}\s)")
ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s")
RULE = re.compile(r"\s*+(?:(?:\*\s*+){3,}+|(?:-\s*+){3,}+|(?:_\s*+){3,}+|=++\s*+)$")
REFERENCE = re.compile(r"\s*\[[^\]]+\]:\s*\S+")
TABLE_RULE = re.compile(r"\s*+\|?\s*+:?-++:?\s*+(?:\|\s*+:?-++:?\s*+)*+\|?\s*+$")
INLINE = re.compile(
    r"(?P<code>(?:(?<!`)|(?<=\\`))(?P<ticks>`++).+?(?<!`)(?P=ticks)(?!`))"
    r"|(?P<image>!\[[^\[\]]*\](?:\([^()\s]*(?:\s+\"[^\"]*\")?\)|\[[^\]]*\]))"
    r"|(?P<link>\[(?=[^\[\]]+\](?:\([^()\s]*(?:\s+\"[^\"]*\")?\)|\[[^\]]*\])))"
    r"|(?P<target>\](?:\([^()\s]*(?:\s+\"[^\"]*\")?\)|\[[^\]]*\]))"
    r"|(?P<autolink><[a-zA-Z][\w+.-]*:[^<>\s]*>|<[\w.+-]+@[\w.-]+>)"
    r"|(?P<html></?[a-zA-Z][^<>]*>|<!--.{0,2000}?-->)"
    r"|(?P<footnote>\[\^[^\[\]]+\])"
    r"|(?P<math>\$[^$\s](?:[^$\n]*[^$\s])?\$(?!\d))"
    r"|(?P<emphasis>\*\*\*|\*\*|\*|~~|__|(?<!\w)_|_(?!\w))"
    r"|(?P<escape>\\[\\`*_{}\[\]()#+\-.!|<>~])",
    re.DOTALL,
)


def parse_markdown(text: str) -> Document:
    """Blocks of Markdown; the lines of a paragraph are joined.

    >>> [part if isinstance(part, str) else part.text for part in parse_markdown("# Title\\n\\n- one\\n  two\\n")]
    ['# ', 'Title', '\\n\\n- ', 'one two', '\\n']
    """
    document: Document = []
    lines = text.splitlines(keepends=True)
    number, first_item = 0, next((index for index, line in enumerate(lines) if ITEM.match(line)), len(lines))
    if lines and lines[0].strip() == "---":  # front matter
        end = next((index for index in range(1, len(lines)) if lines[index].strip() in ("---", "...")), 0)
        document += lines[: end + 1] if end else []
        number = end + 1 if end else 0
    while number < len(lines):
        line = lines[number]
        end = end_of_verbatim(lines, number, first_item)
        if end > number:
            document += lines[number:end]
            number = end
        elif "|" in line and number + 1 < len(lines) and TABLE_RULE.match(lines[number + 1]):
            while number < len(lines) and "|" in lines[number]:
                add_row(document, lines[number])
                number += 1
        else:
            number = add_paragraph(document, lines, number, first_item)
    return join_literals(document)


def end_of_verbatim(lines: list[str], number: int, first_item: int) -> int:
    """The line after a block that is not translated and begins at a line; the line itself if there is none.

    Args:
        first_item: the first line of a list.
    """
    line = lines[number]
    fence = FENCE.match(PREFIX.sub("", line, count=1)) or FENCE.match(line)
    if fence:
        closing = re.compile(rf"[\s>]*{re.escape(fence[1][0])}{{{len(fence[1])},}}\s*$")
        after = (index for index in range(number + 1, len(lines)) if closing.match(lines[index]))
        return next(after, len(lines) - 1) + 1
    if not line.strip() or RULE.match(line) or REFERENCE.match(line):
        return number + 1
    if line.startswith(("    ", "\t")) and (number == 0 or not lines[number - 1].strip()):
        return number if first_item < number else number + 1
    if re.match(r"\s{0,3}<(?:script|style|pre|!--)", line, re.IGNORECASE):
        name = re.match(r"\s*<(!--|\w+)", line)[1].lower()  # type: ignore[index]  # matched above
        ending = "-->" if name == "!--" else f"</{name}"
        after = (index for index in range(number, len(lines)) if ending in lines[index].lower())
        return next(after, len(lines) - 1) + 1
    if is_tag(line.strip()):
        return number + 1
    return number


def is_tag(text: str) -> bool:
    """Whether a text is one tag or comment of HTML."""
    found = Markup(text).find(0) if text.startswith("<") else None
    return found is not None and found[0].start() == 0 and found[1] == len(text)


def add_paragraph(document: Document, lines: list[str], number: int, first_item: int) -> int:
    """Append the paragraph, heading or list item that begins at a line; returns the line after it."""
    prefix = PREFIX.match(lines[number])
    assert prefix is not None  # it matches the empty text
    document.append(prefix[0])
    parts = [lines[number][prefix.end() :]]
    heading = "#" in prefix[0]
    number += 1
    while (
        not heading
        and number < len(lines)
        and not parts[-1].endswith(("  \n", "\\\n"))  # a line break that is shown
        and end_of_verbatim(lines, number, first_item) == number
        and (not STARTS_BLOCK.match(lines[number]) or is_same_quote(prefix[0], lines[number]))
    ):
        parts.append(re.sub(r"^[\s>]+", "", lines[number]))
        number += 1
    last = parts[-1]
    body = last.rstrip("\r\n")
    stripped = re.sub(r"(\\|(?<!\s)\s++(?:#++\s*+)?)$", "", body)
    parts[-1] = stripped
    add_inline(document, " ".join(part.strip() for part in parts))
    document.append(body[len(stripped) :] + last[len(body) :])
    return number


def is_same_quote(prefix: str, line: str) -> bool:
    """Whether a line continues the paragraph of a quotation."""
    return prefix.strip(" ") == ">" and bool(re.match(r"\s*>\s?(?![\s>#*+-]|\d+[.)]|\n)", line))


def add_row(document: Document, line: str) -> None:
    """Append a row of a table, cell by cell."""
    if TABLE_RULE.match(line):
        document.append(line)
        return
    for cell in re.split(r"((?<!\\)\|)", line):
        if not cell.strip() or cell == "|":
            document.append(cell)
            continue
        start, end = len(cell) - len(cell.lstrip()), len(cell.rstrip())
        document.append(cell[:start])
        add_inline(document, cell[start:end])
        document.append(cell[end:])


def add_inline(document: Document, text: str) -> None:
    """Append text with emphasis, links, code and other inline markup."""
    paragraph = MarkedText()
    opened: list[tuple[str, str]] = []  # kind of markup, mark
    start = 0
    for match in INLINE.finditer(text):
        paragraph.add_text(text[start : match.start()])
        start = match.end()
        kind = match.lastgroup if match.lastgroup != "ticks" else "code"
        if kind == "emphasis" and not flanks(text, match, opening=all(name != match[0] for name, _ in opened)):
            paragraph.add_text(match[0])
        elif kind in ("code", "image", "autolink", "footnote", "math", "escape"):
            paragraph.add_mark(match[0], "placeholder")
        elif kind == "link" or (kind == "emphasis" and not any(name == match[0] for name, _ in opened)):
            name = "link" if kind == "link" else match[0]
            opened.append((name, paragraph.add_mark(match[0], "opening")))
        elif kind == "html":
            paragraph.add_mark(match[0], "single")
        else:
            name = "link" if kind == "target" else match[0]
            mark = paragraph.add_mark(match[0], "closing")
            place = next((index for index in reversed(range(len(opened))) if opened[index][0] == name), None)
            if place is not None:
                paragraph.pair(opened[place][1], mark)
                del opened[place:]
    paragraph.add_text(text[start:])
    document.append(paragraph)


def flanks(text: str, match: re.Match, *, opening: bool) -> bool:
    """Whether a run of `*`, `_` or `~` is emphasis: an opening one is followed by a word, a closing one follows one."""
    before, after = text[max(0, match.start() - 1) : match.start()] or " ", text[match.end() : match.end() + 1] or " "
    if not opening:
        before, after = after, before
    return not after.isspace() and (after.isalnum() or not before.isalnum())

"""SubRip subtitles (.srt): numbers and times are kept."""

import re
from bisect import bisect_left
from functools import partial

from .html_text import VOID
from .marks import Document, MarkedText
from .plain_text import wrap_lines

TIME = r"\d+:\d\d:\d\d[,.]\d{1,3}"
TIMING = re.compile(rf"\s*{TIME}\s*-->\s*{TIME}(?:\s.*)?")
TAG = re.compile(r"</?[a-zA-Z][^<>]*>|\{\\[^{}]*\}")
DASH = re.compile(r"\s*[-–—]\s*")


def parse_srt(text: str) -> Document:
    """The cues of subtitles. A cue without its timing line is an error that names the line.

    >>> [part if isinstance(part, str) else part.text for part in parse_srt("1\\n0:00:01,0 --> 0:00:02,0\\nHi.\\n")]
    ['1\\n0:00:01,0 --> 0:00:02,0\\n', 'Hi.', '\\n']
    """
    document: Document = []
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        if not lines[number].strip("\ufeff \t\r\n"):
            document.append(lines[number])
            number += 1
            continue
        if re.fullmatch(r"\ufeff?\s*\d+\s*", lines[number]):
            document.append(lines[number])
            number += 1
        if number == len(lines) or not TIMING.fullmatch(lines[number].lstrip("\ufeff").rstrip("\r\n")):
            found = "the end of the file" if number == len(lines) else repr(lines[number].strip()[:40])
            raise ValueError(
                f"line {number + 1}: expected a time such as 00:00:01,000 --> 00:00:02,000, but found {found}."
            )
        document.append(lines[number])
        number += 1
        first = number
        while number < len(lines) and lines[number].strip():
            number += 1
        add_cue(document, lines[first:number])
    return join_literals(document)


def add_cue(document: Document, lines: list[str]) -> None:
    """Append the text of a cue. Lines that begin with a dash are of different speakers and translated separately."""
    speakers: list[list[str]] = []
    for line in lines:
        if not speakers or DASH.match(line):
            speakers.append([])
        speakers[-1].append(line)
    for spoken in speakers:
        dash = DASH.match(spoken[0])
        if dash:
            document.append(dash[0])
            spoken[0] = spoken[0][dash.end() :]
        last = spoken[-1]
        ending = last[len(last.rstrip("\r\n")) :]
        width = max(len(line.strip()) for line in spoken) if len(spoken) > 1 else None
        newline = "\r\n" if spoken[0].endswith("\r\n") else "\n"
        cue = MarkedText(arrange=partial(arrange_cue, lines=len(spoken), width=width, newline=newline))
        add_tagged(cue, " ".join(line.strip() for line in spoken))
        document += [cue, ending]


def add_tagged(cue: MarkedText, text: str) -> None:
    """Append text with tags such as `<i>` and `{\\an8}`."""
    start = 0
    opened: list[tuple[str, str]] = []  # name of the tag, mark
    for match in TAG.finditer(text):
        cue.add_text(text[start : match.start()])
        start = match.end()
        name = match[0].strip("</>").split()[0].lower() if match[0].startswith("<") else ""
        if match[0].startswith("</"):
            mark = cue.add_mark(match[0], "closing")
            if opened and opened[-1][0] == name:
                cue.pair(opened.pop()[1], mark)
        elif name and name not in VOID:
            opened.append((name, cue.add_mark(match[0], "opening")))
        else:
            cue.add_mark(match[0], "single")
    cue.add_text(text[start:])


def arrange_cue(text: str, lines: int, width: int | None, newline: str) -> str:
    """The text in at most as many lines as its source had, no longer than necessary."""
    if width is None:
        return text
    widths = range(width, max(width, len(text)) + 1)
    room = bisect_left(widths, True, key=lambda room: wrap_lines(text, room).count("\n") < lines)
    return newline.join(wrap_lines(text, widths[min(room, len(widths) - 1)]).split("\n"))


def join_literals(document: Document) -> Document:
    """Neighbouring literal parts as one."""
    joined: Document = []
    for part in document:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return joined

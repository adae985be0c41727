"""Text with markup inside: every tag or placeholder is one character of Unicode's private use area.

A sentence can so be split and searched as a string. `MarkedText.write` puts back what the characters stand for.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

FIRST, LAST = 0xE000, 0xF8FF  # the private use area
MARK = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")

# Text that must not be translated, wherever it stands.
PLACEHOLDERS = re.compile(
    r"""https?://[^\s<>"']*[^\s<>"'.,;:!?)\]}]     # URLs
      | www\.[^\s<>"']*[^\s<>"'.,;:!?)\]}]
      | (?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+  # e-mail addresses
      | \$\{[^{}\s]+\} | \{\{[^{}]+\}\} | \{[^{}\s]*\} | <%[^%]*%>   # ${name}, {{ name }}, {name}, {0}, {}
      | %\([^()\s]+\)[-\#0+ ]?\d*(?:\.\d+)?[a-zA-Z]                  # %(name)s
      | %(?:\d+\$)?[-\#0+]?\d*(?:\.\d+)?l?[sdifuxXeEgGc@](?![a-zA-Z])   # %s, %d, %1$s, %.2f
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Mark:
    """What a private-use character stands for.

    Attributes:
        text: written in its place.
        kind: `placeholder`, which is part of the sentence, or `opening`, `closing` or `single` markup.
        partner: the character of the other tag of a pair.
    """

    text: str
    kind: str
    partner: str | None = None


@dataclass
class MarkedText:
    """A translatable part of a document.

    Attributes:
        text: with marks.
        marks: character → mark.
        escape: how text is written in the format.
        arrange: the line breaks of the written text.
    """

    text: str = ""
    marks: dict[str, Mark] = field(default_factory=dict)
    escape: Callable[[str], str] = str
    arrange: Callable[[str], str] = str

    def add_text(self, text: str) -> None:
        """Append text; placeholders in it, and characters of the private use area, become marks."""
        start = 0
        for match in re.finditer(f"{PLACEHOLDERS.pattern} | {MARK.pattern}", text, re.VERBOSE):
            self.text += text[start : match.start()]
            self.add_mark(match[0], "placeholder")
            start = match.end()
        self.text += text[start:]

    def add_mark(self, text: str, kind: str) -> str:
        """Append a mark; the text of a placeholder is escaped, markup is written as it is. Returns its character."""
        if len(self.marks) > LAST - FIRST:
            raise ValueError(f"A paragraph has more than {LAST - FIRST + 1} tags and placeholders; divide it.")
        character = chr(FIRST + len(self.marks))
        self.marks[character] = Mark(self.escape(text) if kind == "placeholder" else text, kind)
        self.text += character
        return character

    def pair(self, opening: str, closing: str) -> None:
        """Make two marks the tags of one pair."""
        self.marks[opening] = replace(self.marks[opening], partner=closing)
        self.marks[closing] = replace(self.marks[closing], partner=opening)

    def write(self, text: str) -> str:
        """A translation with marks, in the format of the document."""
        return self.arrange(self.fill(text))

    def fill(self, text: str) -> str:
        """Part of a translation with marks, in the format of the document but without its line breaks."""
        parts = (self.marks[part].text if part in self.marks else self.escape(part) for part in split_at_marks(text))
        return "".join(parts)

    def has_words(self) -> bool:
        """Whether there is anything to translate."""
        return any(character.isalpha() for character in MARK.sub("", self.text))


# A document is literal text and translatable text in turn; translated, its parts are joined.
Document = list[str | MarkedText]


def split_at_marks(text: str) -> list[str]:
    """Marks and the texts between them; together they are the text."""
    return [part for part in re.split(f"({MARK.pattern})", text) if part]

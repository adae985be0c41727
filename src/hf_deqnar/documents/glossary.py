"""Glossaries: terms with the translation that they must have."""

import re
from dataclasses import dataclass
from pathlib import Path

from .marks import MARK


@dataclass(frozen=True)
class Glossary:
    """Source terms and their targets, read from lines of source, tab, target.

    A term in small letters matches any capitalisation; another term matches as it is written. Only whole words match,
    and of overlapping terms the longest.

    >>> Glossary({"train": "Zug", "train station": "Bahnhof"}).occurrences("Trains leave the Train station.")
    [(17, 30, 'Bahnhof')]
    """

    terms: dict[str, str]

    def occurrences(self, text: str) -> list[tuple[int, int, str]]:
        """Start, end and target of every term in a text."""
        found: list[tuple[int, int, str]] = []
        for term in sorted(self.terms, key=len, reverse=True):
            words = r"\s+".join(re.escape(word) for word in term.split())
            flags = re.IGNORECASE if term == term.lower() else 0
            for match in re.finditer(rf"(?<!\w){words}(?!\w)", text, flags):
                if all(match.end() <= first or match.start() >= last for first, last, _ in found):
                    found.append((match.start(), match.end(), self.terms[term]))
        return sorted(found)


NO_GLOSSARY = Glossary({})


def read_glossary(path: Path) -> Glossary:
    """A glossary from a file; empty lines and lines that begin with # are skipped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8 at byte {error.start + 1}; save it as UTF-8.") from error
    terms: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        columns = [column.strip() for column in line.rstrip("\r").split("\t")]
        if len(columns) != 2 or not all(columns):
            raise ValueError(f"{path}, line {number}: expected a source term, a tab and its translation.")
        source, target = columns
        if MARK.search(target):
            raise ValueError(f"{path}, line {number}: a private-use character cannot be part of a translation.")
        if terms.get(source, target) != target:
            raise ValueError(f"{path}, line {number}: '{source}' already has the translation '{terms[source]}'.")
        terms[source] = target
    return Glossary(terms)

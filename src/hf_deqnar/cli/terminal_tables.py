"""Printing results: Markdown, whose tables are drawn on a terminal."""

import sys
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_results(text: str) -> None:
    """Print text with tables of `markdown_table`. On a terminal, rich draws the tables."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console

    console = Console(file=sys.stdout)
    for is_table, lines in groupby(text.split("\n"), key=lambda line: line.startswith("|")):
        if is_table:
            console.print(drawn_table(list(lines)))
        else:
            print(*lines, sep="\n")


def drawn_table(lines: list[str]) -> "Table":
    """A table of rich from the lines of a Markdown table; columns of numbers are aligned on the right."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    headers, *rows = read_cells(lines)
    table = Table(box=SIMPLE_HEAD, show_edge=False)
    for header, *cells in zip(headers, *rows, strict=True):
        numbers = all(cell[:1].isdigit() or cell[:1] in "+-−" for cell in cells)
        table.add_column(Text(header), justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as it is, without rich's own markup
    return table


def read_cells(lines: list[str]) -> list[list[str]]:
    """The cells of a Markdown table with padded columns: headers, then rows.

    >>> read_cells(["| way | ms |", "|-----|----|", "| a|b | 10 |"])
    [['way', 'ms'], ['a|b', '10']]
    """
    headers, line, *rows = lines
    ends = [index for index, character in enumerate(line) if character == "|"]
    return [[row[first + 1 : last].strip() for first, last in pairwise(ends)] for row in (headers, *rows)]

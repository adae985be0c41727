"""Hook of mkdocs: equations become MathML while the site is built, so that a page needs no script and no network."""

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **unused: Any) -> str:
    """Replace the equations that pymdownx.arithmatex marked."""
    return EQUATION.sub(to_mathml, html)


def to_mathml(match: re.Match) -> str:
    _, bracket, latex = match.groups()
    return convert(unescape(latex), display="block" if bracket == "[" else "inline")

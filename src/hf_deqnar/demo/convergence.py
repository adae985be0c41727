"""How a translation converged, as HTML: words by the evaluation in which they became final, and the residual curve."""

import difflib
import html
import math

STYLE = """
.deqnar-draft { font-size: 1.15rem; line-height: 2; overflow-wrap: anywhere; }
.deqnar-word { border-bottom: 3px solid hsl(var(--hue) 65% 50%); margin-right: .3em; white-space: nowrap; }
.deqnar-word sub { opacity: .75; font-size: .65em; }
.deqnar-curve { width: 100%; max-width: 560px; height: auto; color: inherit; }
.deqnar-curve text { font: 12px system-ui, sans-serif; fill: currentColor; }
.deqnar-figures { border-collapse: collapse; width: 100%; }
.deqnar-figures td, .deqnar-figures th { padding: .2em .6em; text-align: left; overflow-wrap: anywhere; }
"""


def final_since(drafts: list[list[str]]) -> list[int]:
    """For every word of the last draft, the evaluation since which it did not change, from 1.

    >>> final_since([["Ein", "Hund", "Hund"], ["Ein", "Mann", "reitet"], ["Ein", "Mann", "reitet"]])
    [1, 2, 2]
    """
    if not drafts:
        return []
    since = [len(drafts)] * len(drafts[-1])
    tracked = {place: place for place in range(len(drafts[-1]))}  # place in the last draft: place in a later draft
    for evaluation in range(len(drafts) - 1, 0, -1):
        later, earlier = drafts[evaluation], drafts[evaluation - 1]
        blocks = difflib.SequenceMatcher(None, earlier, later, autojunk=False).get_matching_blocks()
        origin = {block.b + offset: block.a + offset for block in blocks for offset in range(block.size)}
        tracked = {last: origin[place] for last, place in tracked.items() if place in origin}
        for last in tracked:
            since[last] = evaluation
    return since


def draft_html(drafts: list[list[str]], evaluations: int) -> str:
    """The last of these drafts, coloured and numbered by the evaluation since which each word did not change.

    Args:
        drafts: words of every draft until now.
        evaluations: evaluations of the whole solve, for the scale of colours.
    """
    words = []
    for word, since in zip(drafts[-1], final_since(drafts), strict=True):
        hue = round(140 - 140 * (since - 1) / max(1, evaluations - 1))
        title, shown = f"unchanged since evaluation {since}", html.escape(word)
        words.append(f'<span class="deqnar-word" style="--hue: {hue}" title="{title}">{shown}<sub>{since}</sub></span>')
    return " ".join(words)


def curve_svg(residuals: list[float], evaluations: int, tol: float, title: str = "Relative residual") -> str:
    """The relative residual against the number of evaluations, on a logarithmic scale, with the tolerance."""
    width, height, left, bottom, above = 420, 200, 46, 44, 28
    known = [max(value, 1e-12) for value in residuals]
    top = math.ceil(max(map(math.log10, [*known, tol, 1e-12]))) if known else 0
    low = min(math.floor(min(map(math.log10, [*known, tol]))), top - 1)

    def across(evaluation: float) -> float:
        return left + (width - left - 10) * (evaluation - 1) / max(1, evaluations - 1)

    def down(value: float) -> float:
        return above + (height - bottom - above) * (top - math.log10(value)) / (top - low)

    parts = [
        f'<svg class="deqnar-curve" viewBox="0 0 {width} {height}" role="img" aria-label="Relative residual '
        f'after each of {len(known)} evaluations, on a logarithmic scale">',
        f'<text x="{left}" y="14">{html.escape(title)}</text>',
        f'<text x="{width - 10}" y="{height - 6}" text-anchor="end">evaluations of the decoder</text>',
    ]
    for power in range(low, top + 1):
        y = down(10.0**power)
        parts.append(
            f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".2"/>'
        )
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    y = down(tol)
    parts.append(
        f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" stroke-dasharray="6 4"/>'
        f'<text x="{width - 12}" y="{y - 5:.1f}" text-anchor="end">tolerance</text>'
    )
    points = [(across(number), down(value)) for number, value in enumerate(known, start=1)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="hsl(210 80% 50%)" stroke-width="2.5"/>')
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="hsl(210 80% 50%)"/>' for x, y in points]
    step = max(1, evaluations // 10)
    for number in range(1, evaluations + 1, step):
        parts.append(f'<text x="{across(number):.1f}" y="{height - bottom + 18}" text-anchor="middle">{number}</text>')
    return "".join([*parts, "</svg>"])


def figures_html(rows: list[tuple[str, str]]) -> str:
    """A table of names and values."""
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(value)}</td></tr>' for name, value in rows
    )
    return f'<table class="deqnar-figures">{cells}</table>'


def list_html(texts: list[tuple[float, str]]) -> str:
    """An n-best list with scores."""
    rows = "".join(
        f"<tr><td>{rank}</td><td>{score:.2f}</td><td>{html.escape(text)}</td></tr>"
        for rank, (score, text) in enumerate(texts, start=1)
    )
    head = '<tr><th scope="col">rank</th><th scope="col">log-probability per token</th><th scope="col">text</th></tr>'
    return f'<table class="deqnar-figures">{head}{rows}</table>'

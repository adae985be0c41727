"""Tables and plots of the results of an experiment."""

from pathlib import Path
from statistics import fmean
from typing import Any

from experiment import Experiment

from hf_deqnar.benchmarks.common import markdown_table
from hf_deqnar.cli.extras import load_figure

COLUMNS = {  # figure: title of its column, format
    "bleu": ("BLEU", "{:.1f}"),
    "chrf": ("chrF", "{:.1f}"),
    "length_ratio": ("length ratio", "{:.3f}"),
    "mean_nfe": ("evaluations", "{:.1f}"),
    "share_converged": ("converged", "{:.0%}"),
}


def table(experiment: Experiment, names: list[str]) -> str:
    """A Markdown table with one row for each run and decoding; the seeds of a run share its rows."""
    headers = ["run", *(title for title, _ in COLUMNS.values()), "parameters", "updates", "CPU minutes"]
    rows, signatures = [], set()
    for title, runs in by_title(experiment, names).items():
        trained = [figures for figures in map(experiment.figures, runs) if figures is not None]
        for decoding, options in experiment.runs[runs[0]].decode.items():
            label = f"{title}, {decoding}" if decoding else title
            done = [one for one in trained if one["decodings"].get(decoding, {}).get("options") == options]
            if not done:
                rows.append([label, "not run", *[""] * (len(headers) - 2)])
                continue
            if len(done) < len(runs):
                label += f" ({len(done)} of {len(runs)} seeds)"
            decoded = [figures["decodings"][decoding] for figures in done]
            signatures |= {figures["bleu_signature"] for figures in decoded}
            rows.append([label, *(cell(decoded, key, form) for key, (_, form) in COLUMNS.items()), *cost(done)])
    return "\n\n".join([markdown_table(headers, rows), *(f"BLEU {one}" for one in sorted(signatures))])


def by_title(experiment: Experiment, names: list[str]) -> dict[str, list[str]]:
    """Names of the runs that make models, by title; runs that differ only in the seed have the same title."""
    titles: dict[str, list[str]] = {}
    for name in names:
        run = experiment.runs[name]
        if run.verb != "distill":
            titles.setdefault(run.title, []).append(name)
    return titles


def cell(figures: list[dict[str, Any]], key: str, form: str) -> str:
    """The mean over the seeds, and for BLEU the value of each seed."""
    values = [one[key] for one in figures if key in one]
    if not values:
        return ""
    mean = form.format(fmean(values))
    return mean if len(values) == 1 or key != "bleu" else f"{mean} ({', '.join(map(form.format, values))})"


def cost(figures: list[dict[str, Any]]) -> list[str]:
    """Parameters, updates and processor time of training."""
    mean = {key: fmean(one[key] for one in figures) for key in ("parameters", "updates", "cpu_seconds")}
    minutes = f"{mean['cpu_seconds'] / 60:.0f}" if mean["cpu_seconds"] else ""  # not recorded on a GPU
    updates = f"{mean['updates']:,.0f}" if mean["updates"] else ""  # n-grams and shortlists are not trained
    return [f"{mean['parameters'] / 1e6:.2f} M", updates, minutes]


def plot(experiment: Experiment, names: list[str], path: Path) -> None:
    """Draw BLEU and residual against the number of evaluations, for every finished run that has a curve."""
    shown = [name for name in names if experiment.runs[name].curve and experiment.done(name)]
    if not shown:
        raise ValueError("No finished run has a curve, so there is nothing to plot.")
    drawing = load_figure()(figsize=(7, 7), layout="constrained")
    upper, lower = drawing.subplots(2, 1, sharex=True)
    groups = by_title(experiment, shown)
    for name in shown:
        title = experiment.runs[name].title
        position = list(groups).index(title)
        style = {"marker": "o", "color": f"C{position % 10}", "linestyle": "-" if position < 10 else "--"}
        style["label"] = title if groups[title][0] == name else None  # seeds share a colour and a legend entry
        decoded = experiment.figures(name)["decodings"]
        points = [decoded[f"max_nfe={count}"] for count in experiment.runs[name].curve]
        evaluations = [point["mean_nfe"] for point in points]
        upper.plot(evaluations, [point["bleu"] for point in points], **style)
        lower.plot(evaluations, [point["mean_residual"] for point in points], **{**style, "label": None})
    upper.set(ylabel="BLEU")
    lower.set(ylabel="mean relative residual", xlabel="evaluations of the transition", yscale="log")
    drawing.legend(loc="outside lower left", fontsize="small")
    drawing.savefig(path, dpi=150)

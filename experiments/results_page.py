"""Print docs/results.md from the result files in experiments/.

    python experiments/results_page.py > docs/results.md

The text is experiments/results_page.md. In it, a line `{table EXPERIMENT [RUN …]}` is replaced by the table of these
runs, with the command that prints it. `{EXPERIMENT/RUN FIGURE DECODING}` is replaced by one figure, the mean over the
seeds of the run; without a decoding by that of the run's first one.
"""

import re
import sys
from pathlib import Path
from statistics import fmean

from experiment import Experiment, read_experiment
from results import COLUMNS, by_title, table

FOLDER = Path(__file__).parent
TEXT = FOLDER / "results_page.md"
NOTE = f"<!-- Printed by experiments/{Path(__file__).name}; edit experiments/{TEXT.name} instead. -->\n"


def page() -> str:
    """The Markdown of docs/results.md."""
    text = TEXT.read_text(encoding="utf-8")
    experiments = {
        name: read_experiment(FOLDER / f"{name}.yaml", FOLDER / name, FOLDER / name)
        for name in sorted(set(re.findall(r"\{(?:table )?(\w+)[/ }]", text)))
    }
    text = re.sub(r"^\{table (\w+)(.*)\}$", lambda match: section(experiments, *match.groups()), text, flags=re.M)
    text = re.sub(r"\{(\w+)/(\S+) (\w+)(?: ([^}]+))?\}", lambda match: figure(experiments, *match.groups()), text)
    return NOTE + text


def section(experiments: dict[str, Experiment], name: str, runs: str) -> str:
    """The table of the runs, all if none is named, below the command that prints it."""
    experiment, only = experiments[name], runs.split()
    data = f"data/{experiment.about['dataset'].lower()}"
    command = f"python experiments/run.py experiments/{name}.yaml --data {data} --output experiments/{name}"
    command += f" --table --only {' '.join(only)}" if only else " --table"
    shown = [run for run in experiment.runs if not only or run in only]
    return f"```bash\n{command}\n```\n\n{table(experiment, shown)}"


def figure(experiments: dict[str, Experiment], name: str, run: str, key: str, decoding: str | None) -> str:
    """One figure of a run, as the table formats it."""
    experiment = experiments[name]
    if decoding is None:
        decoding = next(iter(experiment.runs[run].decode))
    (seeds,) = (names for names in by_title(experiment, list(experiment.runs)).values() if run in names)
    found = [experiment.figures(seed)["decodings"][decoding][key] for seed in seeds]
    return COLUMNS[key][1].format(fmean(found))


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")
    print(page(), end="")

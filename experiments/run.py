"""Run an experiment: train the models that are missing, resume interrupted runs, evaluate, and tabulate.

    python experiments/run.py experiments/multi30k.yaml --data data/multi30k --output runs/multi30k
    python experiments/run.py experiments/multi30k.yaml --data data/multi30k --output runs/multi30k --only cmlm energy
    python experiments/run.py experiments/multi30k.yaml --data data/multi30k --output runs/multi30k --table

Several processes of this script with the same output folder share the runs; with `--processes 2`, two processes execute
each run together. The output folder contains, for a run called `name`, the model `name/` (or the corpus `name.jsonl.gz`
if the run distils), the settings `name.yaml` (for `hf-deqnar train name.yaml` and so on), `name.log`, and the figures
`name.json`. The figures are enough for tables. If a model was removed and another run needs it, its run is repeated and
its figures are replaced.

The format of the YAML file is described in experiments/experiment.py.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from experiment import (
    TABLE_VERBS,
    Experiment,
    ExperimentRun,
    check_recipe,
    fingerprint,
    read_experiment,
    references,
    select,
    settings_file,
    system_text,
)
from results import plot, table

from hf_deqnar.benchmarks.common import machine
from hf_deqnar.cli.extras import requires_extra
from hf_deqnar.cli.main import exit_status
from hf_deqnar.utils.files import write_atomically, write_json
from hf_deqnar.utils.locks import try_lock

POLL_SECONDS = 5.0  # how often a process without work checks the runs of other processes


class CommandError(Exception):
    """A command of a run ended with an error."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="experiments/run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path, help="YAML file of the experiment")
    parser.add_argument("--data", type=Path, required=True, help="folder that replaces {data} in the YAML file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--only", nargs="+", metavar="RUN", help="these runs and those they need; tables and plots show only these"
    )
    parser.add_argument("--processes", type=int, default=1, help="processes that execute one run together (default: 1)")
    parser.add_argument("--table", action="store_true", help="print the results in Markdown; nothing is trained")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (PNG or SVG); nothing is trained")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return exit_status("experiments/run.py", lambda: run(options))


def run(options: argparse.Namespace) -> int:
    if options.processes < 1:
        raise ValueError(f"--processes must be at least 1, not {options.processes}.")
    with requires_extra("train", "Running an experiment"):
        experiment = read_experiment(options.experiment, options.data, options.output)
    experiment.processes = options.processes
    names = select(experiment, options.only)
    for name in names:
        check_recipe(experiment, experiment.runs[name])
    shown = names if options.only is None else [name for name in names if name in options.only]
    if options.plot is not None:
        plot(experiment, shown, options.plot)
    if options.table:
        print(table(experiment, shown))
    if options.table or options.plot is not None:
        return 0
    return execute_all(experiment, names)


def execute_all(experiment: Experiment, names: list[str]) -> int:
    """Execute runs whose requirements are met until none is left; a failed run does not stop independent ones."""
    experiment.output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    while True:
        left = unfinished(experiment, [name for name in names if not is_blocked(experiment, name, failed)])
        ready = [name for name in left if not experiment.runs[name].needs() & set(left)]
        if not left:
            break
        worked = False
        for name in ready:
            with try_lock(experiment.file(name, "lock")) as acquired:
                if acquired and name in unfinished(experiment, names):
                    worked = True
                    try:
                        execute(experiment, experiment.runs[name])
                    except CommandError as error:
                        failed[name] = str(error)
                        print(f"{name} failed: {error}", file=sys.stderr)
            if worked:
                break  # a run that is ready now may be earlier in the recipe
        if not worked:
            time.sleep(POLL_SECONDS)
    for name in names:
        if not experiment.done(name):
            print(f"not run: {name} ({failed.get(name, 'it needs a run that failed')})", file=sys.stderr)
    return 1 if failed else 0


def unfinished(experiment: Experiment, names: list[str]) -> list[str]:
    """Runs without all their figures, and runs whose missing result one of these needs."""
    left = {name for name in names if not experiment.done(name)}
    for name in reversed(names):  # a run only needs runs above it
        if name in left:
            run = experiment.runs[name]
            trained = experiment.has_result(name) and experiment.figures(name) is not None
            needed = references(run.decode) if trained else run.needs()
            left |= {other for other in needed if not experiment.has_result(other)}
    return [name for name in names if name in left]


def is_blocked(experiment: Experiment, name: str, failed: dict[str, str]) -> bool:
    """Whether a run, or one that it needs, has failed."""
    return name in failed or any(is_blocked(experiment, other, failed) for other in experiment.runs[name].needs())


def execute(experiment: Experiment, run: ExperimentRun) -> None:
    """Train or distil, then evaluate. Figures are saved after each decoding, and existing ones are not repeated."""
    known = experiment.figures(run.name) if experiment.has_result(run.name) else None
    if known is None:
        settings = experiment.file(run.name, "yaml")
        write_atomically(settings, [settings_file(experiment, run)])
        if run.verb in TABLE_VERBS:
            shutil.rmtree(experiment.result(run.name), ignore_errors=True)
        command(experiment, run, [run.verb, str(settings)], 1 if run.verb in TABLE_VERBS else experiment.processes)
        known = {"name": run.name, "verb": run.verb, "recipe": fingerprint(experiment, run)}
        known |= {"settings": experiment.settings(run), **training_figures(experiment, run), "decodings": {}}
        known |= {"machine": machine(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1)}
        write_json(experiment.file(run.name, "json"), known)
    for key, decoding in run.decodings().items():
        if known["decodings"].get(key, {}).get("options") != decoding:
            known["decodings"][key] = {"options": decoding, **evaluate(experiment, run, decoding)}
            write_json(experiment.file(run.name, "json"), known)


def evaluate(experiment: Experiment, run: ExperimentRun, decoding: dict[str, Any]) -> dict[str, Any]:
    """Translate the test set with `hf-deqnar evaluate`, and return its figures."""
    system = system_text(experiment.result(run.name), experiment.fill(decoding))
    file = experiment.file(run.name, "evaluation")
    flags = [flag for key, value in experiment.test.items() for flag in (f"--{key}", str(experiment.fill(value)))]
    command(experiment, run, ["evaluate", system, *flags, "--json", str(file)])
    figures = json.loads(file.read_text(encoding="utf-8"))["systems"][system]
    file.unlink()
    return {"system": system, **figures}


def command(experiment: Experiment, run: ExperimentRun, arguments: list[str], processes: int = 1) -> None:
    """Run `hf-deqnar` with these arguments in one or several processes; its output goes to the log of the run."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    log = experiment.file(run.name, "log")
    print(f"{time.strftime('%H:%M:%S')} {run.name}: hf-deqnar {' '.join(arguments)}", file=sys.stderr, flush=True)
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ hf-deqnar {' '.join(arguments)}", file=file, flush=True)
        status = subprocess.run(
            [sys.executable, *(launcher if processes > 1 else []), "-m", "hf_deqnar.cli.main", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        errors = [line for line in lines if line.startswith(f"hf-deqnar {arguments[0]}: ")]  # torchrun prints more
        raise CommandError(f"{(errors or lines)[-1]} (status {status}, see {log})")


def training_figures(experiment: Experiment, run: ExperimentRun) -> dict[str, Any]:
    """Updates, processor time and parameters, read from the result of a run."""
    if run.verb == "distill":
        statistics = Path(f"{experiment.result(run.name)}.statistics.json")
        return {"statistics": json.loads(statistics.read_text(encoding="utf-8"))}
    from safetensors import safe_open

    folder = experiment.result(run.name)
    state = {"global_step": 0, "log_history": []}
    if run.verb not in TABLE_VERBS:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = [key for key in weights.keys() if not re.search(r"\b(ngrams|shortlist)\.", key)]  # noqa: SIM118, no dict
        shapes = [weights.get_slice(name).get_shape() for name in names]
    return {
        "updates": state["global_step"],
        "cpu_seconds": sum(entry.get("cpu_seconds", 0.0) for entry in state["log_history"]),
        "parameters": sum(map(math.prod, shapes)),
    }


if __name__ == "__main__":
    sys.exit(main())

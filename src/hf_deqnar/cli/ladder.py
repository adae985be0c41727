"""Climb a ladder of experiments: train what is missing, go on where it was cut off, evaluate, tabulate.

    hf-deqnar ladder ladders/multi30k.yaml --data data/multi30k --output runs/ladder
    hf-deqnar ladder ladders/multi30k.yaml --data data/multi30k --output runs/ladder --only ctc-glat-stacked energy
    hf-deqnar ladder ladders/multi30k.yaml --data data/multi30k --output runs/ladder --table --plot settling.png

Started several times at once, processes share the rungs that are ready; with `--processes 2`, two share every rung. A
rung called `name` has, in the output folder, `name/` with its model (`name.jsonl.gz` if it distils), `name.yaml` with
its settings, for `hf-deqnar train name.yaml` and so on, `name.log`, and `name.json` with its figures. The figures
stand for themselves: where only they were kept, a rung is made again if another that is still to be run needs it, and
has new figures then.

A ladder is a YAML file:

    test: "{data}/test.jsonl.gz"           # with source and target, what every rung is evaluated on
    source: en
    target: de
    about:                                 # if models of it are released: what their cards say
      title: Everyday English to German
      dataset: Tatoeba
      licence: cc-by-2.0                   # of the models, as the Hub spells it
      attribution: Whose sentences they are, and where they come from.
      limits: What the models cannot do.
    defaults:                              # settings of every rung of a verb
      train: {max_tokens: 2048, seed: 1, …}
    rungs:
      teacher:
        verb: teacher                      # or distill, train, energy, ngrams, shortlist: the settings are its flags
        settings: {train_data: "{data}/train.jsonl.gz", …}
        decode: {greedy: {num_beams: 1}, beam 5: {num_beams: 5}}      # options of generate by a name
      distilled:
        verb: distill
        settings: {teacher: "{teacher}", …}                           # {name} is what the rung of that name made
      stacked:
        verb: train
        settings: {teacher: "{teacher}", train_data: "{distilled}", config: {refinement: stacked}, …}
        seeds: [1, 2]                      # of training; a rung of its own for each, tabulated together
      implicit:
        like: stacked                      # the same but for what is said
        settings: {config: {refinement: implicit}}
        curve: [1, 2, 4, 8, 16]            # also evaluated with so many evaluations at most
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from ..benchmarks.common import machine, markdown_table
from ..configuration_deqnar import DeqNarConfig
from ..corpus.files import read_json, write_json, write_whole
from ..corpus.locks import held
from ..generation_deqnar import DeqNarGenerationConfig
from ..objectives.objective import check_objective
from .evaluate import parse_system
from .loading import train_extra
from .report import load_figure

COUNTED = ("ngrams", "shortlist")  # tables that a model is given in seconds: nothing is trained, or goes on
VERBS = ("teacher", "distill", "train", "energy", *COUNTED)
KEYS = ("test", "source", "target", "about", "defaults", "rungs")
ABOUT = ("title", "dataset", "licence", "attribution", "limits")
RUNG_KEYS = ("verb", "like", "settings", "decode", "seeds", "curve", "title")
CURVE_TOLERANCE = 1e-6  # so that a curve's budgets, not the tolerance, end its solves
PATIENCE = 5.0  # seconds between two looks at what other processes do


@dataclass
class Rung:
    """One recipe: a verb with its settings, and how its result is decoded and shown."""

    name: str
    verb: str
    settings: dict[str, Any]
    decode: dict[str, dict[str, Any]]
    title: str
    curve: list[int] = field(default_factory=list)

    def learns_from(self) -> set[str]:
        """Names of the rungs that its result depends on."""
        return named_in(self.settings)

    def needs(self) -> set[str]:
        """Those, and others that decoding uses."""
        return self.learns_from() | named_in(self.decode)

    def decodings(self) -> dict[str, dict[str, Any]]:
        """All ways in which it is decoded, those of its curve among them; none if it makes a corpus."""
        if self.verb == "distill":
            return {}
        budgets = {f"max_nfe={count}": {"max_nfe": count, "tol": CURVE_TOLERANCE} for count in self.curve}
        return {**self.decode, **budgets}


def named_in(content: Any) -> set[str]:
    """Every {name}, but for {data}."""
    return set(re.findall(r"\{([\w.+-]+)\}", json.dumps(content, ensure_ascii=False))) - {"data"}


@dataclass
class Ladder:
    """All rungs by name, and where their data and results are."""

    rungs: dict[str, Rung]
    test: dict[str, str]
    data: Path
    output: Path
    about: dict[str, str] | None = None
    processes: int = 1  # that share the training or the sentences of a rung

    def result(self, name: str) -> Path:
        """What a rung makes: a folder with a model, or a corpus."""
        return self.output / (f"{name}.jsonl.gz" if self.rungs[name].verb == "distill" else name)

    def file(self, name: str, ending: str) -> Path:
        """`name.yaml` and so on; names may have dots of their own."""
        return self.output / f"{name}.{ending}"

    def figures(self, name: str) -> dict[str, Any] | None:
        """What is known of a rung that was trained; None of others."""
        path = self.file(name, "json")
        if not path.is_file():
            return None
        return read_json(path, "recipe", "settings", "decodings", remedy="remove it, and it is made again")

    def made(self, name: str) -> bool:
        """Whether what it makes is there to be used."""
        result = self.result(name)
        if self.rungs[name].verb == "distill":
            return result.is_file()
        # Written when the model is; a model with a new table is in its place only when it is complete.
        return (result / ("config.json" if self.rungs[name].verb in COUNTED else "trainer_state.json")).is_file()

    def done(self, name: str) -> bool:
        """Whether it is trained and every decoding is evaluated as it is written now."""
        known = self.figures(name)
        return known is not None and all(
            known["decodings"].get(key, {}).get("options") == decoding
            for key, decoding in self.rungs[name].decodings().items()
        )

    def fill(self, value: Any) -> Any:
        """{data} and {name of a rung} replaced by their paths."""
        if isinstance(value, str):
            paths = {"data": self.data, **{name: self.result(name) for name in self.rungs}}
            for name, path in paths.items():
                value = value.replace(f"{{{name}}}", str(path))
            return value
        if isinstance(value, dict):
            return {key: self.fill(entry) for key, entry in value.items()}
        return [self.fill(entry) for entry in value] if isinstance(value, list) else value

    def filled(self, rung: Rung) -> dict[str, Any]:
        """The settings of its verb, with what the ladder knows."""
        place = "output" if rung.verb == "distill" else "output_dir"
        return self.fill({**rung.settings, place: f"{{{rung.name}}}"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ladder", type=Path, help="the YAML file of rungs")
    parser.add_argument("--data", type=Path, required=True, help="what {data} stands for in it")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--only", nargs="+", metavar="RUNG", help="these, and what they need; tables and plots show these alone"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="that train or distil one rung together, one for each core"
    )
    parser.add_argument("--table", action="store_true", help="run nothing; print what there is in Markdown")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="run nothing; draw the curves into a PNG or SVG file")


def run(options: argparse.Namespace) -> int:
    if options.processes < 1:
        raise ValueError(f"--processes {options.processes} leaves nobody to do the work; give 1 or more.")
    with train_extra("Climbing a ladder"):
        ladder = read_ladder(options.ladder, options.data, options.output)
    ladder.processes = options.processes
    names = wanted(ladder, options.only)
    for name in names:
        check_recipe(ladder, ladder.rungs[name])
    shown = names if options.only is None else [name for name in names if name in options.only]
    if options.plot is not None:
        plot(ladder, shown, options.plot)
    if options.table:
        print(table(ladder, shown))
    if options.table or options.plot is not None:
        return 0
    return climb(ladder, names)


# ---- Reading


def read_ladder(path: Path, data: Path, output: Path) -> Ladder:
    """All of it is checked before anything runs: keys, references, and every setting of every rung."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no ladder {path}.")
    if not data.is_dir():
        raise FileNotFoundError(f"There is no folder {data}; --data is where the corpus of the ladder lies.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    check_keys(content, KEYS, str(path), needed=("test", "source", "target", "rungs"))
    check_about(content.get("about"), f"{path}: about")
    defaults = content.get("defaults") or {}
    check_keys(defaults, VERBS, f"{path}: defaults")
    for verb, settings in defaults.items():
        check_mapping(settings or {}, f"{path}: defaults of '{verb}'")
    entries = content["rungs"]
    check_mapping(entries, f"{path}: rungs")
    titles: dict[str, str] = {}
    rungs: dict[str, Rung] = {}
    for name in entries:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name) or name == "data":
            raise ValueError(f"{path}: {name!r} cannot be a rung's name; use letters, digits, '-', '+' and '.'.")
        for rung in make_rungs(name, inherit(entries, name, path), defaults, path):
            if rung.name in rungs:
                raise ValueError(f"{path}: '{rung.name}' is the name of a rung and of another's seed; rename the rung.")
            rungs[rung.name] = rung
        if titles.setdefault(rung.title, name) != name:
            raise ValueError(f"{path}: rungs '{titles[rung.title]}' and '{name}' have the same title; they are two.")
    test = {"data": content["test"], "source": content["source"], "target": content["target"]}
    ladder = Ladder(rungs, test, data, output, content.get("about"))
    above: set[str] = set()
    for rung in rungs.values():
        missing = sorted(rung.needs() - above)
        if missing:
            raise ValueError(f"{path}: rung '{rung.name}' needs {{{missing[0]}}}, but no rung above has that name.")
        above.add(rung.name)
        check_settings(ladder, rung, path)
    return ladder


def check_mapping(content: Any, where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must hold name: value entries.")


def check_keys(content: Any, known: tuple[str, ...], where: str, needed: tuple[str, ...] = ()) -> None:
    check_mapping(content, where)
    for key in content:
        if key not in known:
            raise ValueError(f"{where}: '{key}' is not a key; there are {', '.join(known)}.")
    for key in needed:
        if key not in content:
            raise ValueError(f"{where}: '{key}' is missing.")


def check_about(about: Any, where: str) -> None:
    """All of it or nothing: a card without a licence or an attribution must not be published by oversight."""
    if about is None:
        return
    check_keys(about, ABOUT, where, needed=ABOUT)
    for key, text in about.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: '{key}' must be a text, not {text!r}.")


def inherit(entries: dict[str, Any], name: str, path: Path, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """An entry with what it takes over from the one it is like."""
    if name not in entries:
        raise ValueError(f"{path}: rung '{seen[-1]}' is like '{name}', but there is no such rung.")
    if name in seen:
        raise ValueError(f"{path}: rung '{name}' is like itself ({' → '.join((*seen, name))}).")
    entry = entries[name]
    check_keys(entry, RUNG_KEYS, f"{path}: rung '{name}'")
    check_mapping(entry.get("settings") or {}, f"{path}: settings of rung '{name}'")
    if "like" not in entry:
        return entry
    model = inherit(entries, entry["like"], path, (*seen, name))
    kept = {key: value for key, value in model.items() if key not in ("title", "seeds", "curve")}
    own = {key: value for key, value in entry.items() if key not in ("like", "settings")}
    return {**kept, **own, "settings": merge(model.get("settings") or {}, entry.get("settings") or {})}


def merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` wins; a model's configuration is merged field by field."""
    merged = {**below, **above}
    if isinstance(below.get("config"), dict) and isinstance(above.get("config"), dict):
        merged["config"] = {**below["config"], **above["config"]}
    return merged


def make_rungs(name: str, entry: dict[str, Any], defaults: dict[str, Any], path: Path) -> list[Rung]:
    """The rung, or one for each of its seeds; the first of them has its plain name."""
    where = f"{path}: rung '{name}'"
    check_keys(entry, RUNG_KEYS, where, needed=("verb",))
    if entry["verb"] not in VERBS:
        raise ValueError(f"{where}: verb '{entry['verb']}' is unknown; choose one of {', '.join(VERBS)}.")
    settings = merge(defaults.get(entry["verb"]) or {}, entry.get("settings") or {})
    settings = {key: value for key, value in settings.items() if value is not None}  # null takes a setting away
    decode = entry.get("decode") or {"": {}}
    if not isinstance(decode, dict) or not all(isinstance(options, dict) for options in decode.values()):
        raise ValueError(f"{where}: decode must hold options of generate by a name, such as beam 5: {{num_beams: 5}}.")
    if entry["verb"] == "distill" and ("decode" in entry or "curve" in entry):
        raise ValueError(f"{where}: a corpus is not decoded; remove decode and curve.")
    seeds, curve = entry.get("seeds"), entry.get("curve") or []
    check_numbers([0] if seeds is None else seeds, 0, f"{where}: seeds")
    check_numbers(curve, 1, f"{where}: curve")
    shown = {"decode": decode, "title": entry.get("title", name), "curve": curve}
    if seeds is None:
        return [Rung(name, entry["verb"], settings, **shown)]
    names = [name, *(f"{name}.seed{seed}" for seed in seeds[1:])]
    return [
        Rung(one, entry["verb"], {**settings, "seed": seed}, **shown) for one, seed in zip(names, seeds, strict=True)
    ]


def check_numbers(value: Any, least: int, where: str) -> None:
    whole = isinstance(value, list) and all(type(number) is int and number >= least for number in value)
    if not whole or (not value and least == 0):
        raise ValueError(f"{where} must be a list of whole numbers from {least} on, such as [1, 2], not {value!r}.")


def check_settings(ladder: Ladder, rung: Rung, path: Path) -> None:
    """Parse them as the verb will, so that a mistake in the last rung is known before the first has run."""
    from ..corpus.teachers import TeacherOptions
    from ..training import arguments as known
    from ..training.energy_run import EnergyArguments
    from ..training.energy_trainer import EnergyTrainingArguments
    from ..training.teacher import TeacherArguments
    from ..training.trainer import objective_of
    from .distill import DistillationArguments
    from .ngrams import NgramArguments
    from .shortlist import ShortlistArguments

    kinds = {
        "teacher": (TeacherArguments, known.DataArguments, known.TranslationTrainingArguments),
        "distill": (DistillationArguments, TeacherOptions),
        "train": (known.ModelArguments, known.DataArguments, known.DeqNarTrainingArguments),
        "energy": (EnergyArguments, known.CorpusArguments, EnergyTrainingArguments),
        "ngrams": (NgramArguments,),
        "shortlist": (ShortlistArguments,),
    }[rung.verb]
    try:
        parsed = known.parse_settings(kinds, ladder.filled(rung))
        if rung.verb in ("train", "energy", *COUNTED):
            for decoding in rung.decodings().values():
                DeqNarGenerationConfig(**parse_system(as_system("model", decoding))[1])
        if rung.verb == "train":
            model, _, training = parsed
            # A new model is of a preset's size; that of another, which it starts from, is not known yet.
            config = DeqNarConfig.preset(model.preset or "tiny", **model.settings())
            if model.start is None or "length" in model.settings():  # else what it starts from decides
                check_objective(objective_of(training), config)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{path}: rung '{rung.name}': {' '.join(str(error).split())}") from error


def wanted(ladder: Ladder, only: list[str] | None) -> list[str]:
    """The rungs asked for, and all that they need, in the order of the file."""
    asked = list(ladder.rungs if only is None else only)
    chosen: set[str] = set()
    while asked:
        name = asked.pop()
        if name not in ladder.rungs:
            raise ValueError(f"There is no rung '{name}'; there are {', '.join(ladder.rungs)}.")
        if name not in chosen:
            chosen.add(name)
            asked += ladder.rungs[name].needs()
    return [name for name in ladder.rungs if name in chosen]


# ---- Running


def climb(ladder: Ladder, names: list[str]) -> int:
    """Run what is ready until nothing is left; a rung that fails does not stop those that do not need it."""
    ladder.output.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    while True:
        left = still_to_run(ladder, [name for name in names if not hopeless(ladder, name, failed)])
        ready = [name for name in left if not ladder.rungs[name].needs() & set(left)]
        if not left:
            break
        worked = False
        for name in ready:
            with held(ladder.file(name, "lock")) as ours:
                if ours and name in still_to_run(ladder, names):
                    worked = True
                    try:
                        run_rung(ladder, ladder.rungs[name])
                    except ChildFailed as error:
                        failed[name] = str(error)
                        print(f"{name} failed: {error}", file=sys.stderr)
            if worked:
                break  # what is ready now may come earlier in the file
        if not worked:
            time.sleep(PATIENCE)
    for name in names:
        if not ladder.done(name):
            print(f"not run: {name} ({failed.get(name, 'it needs a rung that failed')})", file=sys.stderr)
    return 1 if failed else 0


def still_to_run(ladder: Ladder, names: list[str]) -> list[str]:
    """Rungs without their figures, and those whose result one of these needs but is not there."""
    left = {name for name in names if not ladder.done(name)}
    for name in reversed(names):  # a rung only needs those above it
        if name in left:
            rung, trained = ladder.rungs[name], ladder.made(name) and ladder.figures(name) is not None
            needed = named_in(rung.decode) if trained else rung.needs()
            left |= {other for other in needed if not ladder.made(other)}
    return [name for name in names if name in left]


def hopeless(ladder: Ladder, name: str, failed: dict[str, str]) -> bool:
    return name in failed or any(hopeless(ladder, needed, failed) for needed in ladder.rungs[name].needs())


class ChildFailed(Exception):
    """A command of a rung ended with an error."""


def run_rung(ladder: Ladder, rung: Rung) -> None:
    """Train or distil, then evaluate; its figures are written down one by one, and none is measured twice."""
    known = ladder.figures(rung.name) if ladder.made(rung.name) else None
    if known is None:
        recipe = ladder.file(rung.name, "yaml")
        write_whole(recipe, [recipe_text(ladder, rung)])
        if rung.verb in COUNTED:
            shutil.rmtree(ladder.result(rung.name), ignore_errors=True)
        command(ladder, rung, [rung.verb, str(recipe)], 1 if rung.verb in COUNTED else ladder.processes)
        known = {"name": rung.name, "verb": rung.verb, "recipe": fingerprint(ladder, rung)}
        known |= {"settings": ladder.filled(rung), **training_figures(ladder, rung), "decodings": {}}
        known |= {"machine": machine(int(os.environ.get("OMP_NUM_THREADS", "0")) or os.cpu_count() or 1)}
        write_json(ladder.file(rung.name, "json"), known)
    for key, decoding in rung.decodings().items():
        if known["decodings"].get(key, {}).get("options") != decoding:
            known["decodings"][key] = {"options": decoding, **evaluate(ladder, rung, decoding)}
            write_json(ladder.file(rung.name, "json"), known)


def evaluate(ladder: Ladder, rung: Rung, decoding: dict[str, Any]) -> dict[str, Any]:
    """Translate the test set by a command of its own; what it found."""
    system = as_system(ladder.result(rung.name), ladder.fill(decoding))
    file = ladder.file(rung.name, "evaluation")
    flags = [flag for key, value in ladder.test.items() for flag in (f"--{key}", str(ladder.fill(value)))]
    command(ladder, rung, ["evaluate", system, *flags, "--json", str(file)])
    figures = json.loads(file.read_text(encoding="utf-8"))["systems"][system]
    file.unlink()
    return {"system": system, **figures}


def as_system(model: Path | str, decoding: dict[str, Any]) -> str:
    """'model,key=value', as `evaluate` takes it."""
    return ",".join([str(model), *(f"{key}={value}" for key, value in decoding.items())])


def command(ladder: Ladder, rung: Rung, arguments: list[str], processes: int = 1) -> None:
    """Run `hf-deqnar` with these arguments, by one or several processes; what it says goes into the rung's log."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    log = ladder.file(rung.name, "log")
    print(f"{time.strftime('%H:%M:%S')} {rung.name}: hf-deqnar {' '.join(arguments)}", file=sys.stderr, flush=True)
    with open(log, "a", encoding="utf-8") as file:
        print(f"$ hf-deqnar {' '.join(arguments)}", file=file, flush=True)
        status = subprocess.run(
            [sys.executable, *(several if processes > 1 else []), "-m", "hf_deqnar.cli.main", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if status:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        ours = [line for line in lines if line.startswith(f"hf-deqnar {arguments[0]}: ")]  # a launcher may say more
        raise ChildFailed(f"{(ours or lines)[-1]} (status {status}, see {log})")


def training_figures(ladder: Ladder, rung: Rung) -> dict[str, Any]:
    """Updates, processor time and size, from what the run has left."""
    if rung.verb == "distill":
        statistics = Path(f"{ladder.result(rung.name)}.statistics.json")
        return {"statistics": json.loads(statistics.read_text(encoding="utf-8"))}
    from safetensors import safe_open

    folder = ladder.result(rung.name)
    state = {"global_step": 0, "log_history": []}  # of what is counted, not trained
    if rung.verb not in COUNTED:
        state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    with safe_open(folder / "model.safetensors", "pt") as weights:
        trained = [key for key in weights.keys() if not re.search(r"\b(ngrams|shortlist)\.", key)]  # noqa: SIM118, no dict
        sizes = [weights.get_slice(key).get_shape() for key in trained]
    return {
        "updates": state["global_step"],
        "cpu_seconds": sum(entry.get("cpu_seconds", 0.0) for entry in state["log_history"]),
        "parameters": sum(map(math.prod, sizes)),
    }


# ---- The recipe under a name


RECIPE = "# recipe "


def recipe_text(ladder: Ladder, rung: Rung) -> str:
    """A file of settings for its verb, which begins with the recipe's fingerprint."""
    settings = yaml.safe_dump(ladder.filled(rung), allow_unicode=True, sort_keys=False)
    return f"{RECIPE}{fingerprint(ladder, rung)}\n{settings}"


def fingerprint(ladder: Ladder, rung: Rung) -> str:
    """Of its recipe and of all recipes below it, wherever data and results lie."""
    content = json.dumps([rung.verb, rung.settings], sort_keys=True)
    below = [fingerprint(ladder, ladder.rungs[name]) for name in sorted(rung.learns_from())]
    return hashlib.sha256("\n".join([content, *below]).encode()).hexdigest()[:16]


def check_recipe(ladder: Ladder, rung: Rung) -> None:
    """What was run, or begun, under this name must be this recipe."""
    known, begun = ladder.figures(rung.name), ladder.file(rung.name, "yaml")
    if known is not None:
        before, settings = known["recipe"], known["settings"]
    elif begun.is_file():
        text = begun.read_text(encoding="utf-8")
        before, settings = text.partition("\n")[0].removeprefix(RECIPE), yaml.safe_load(text)
    else:
        return
    if before != fingerprint(ladder, rung):
        raise ValueError(
            f"Rung '{rung.name}' was run by another recipe ({difference(ladder, rung, settings)}); give it another "
            f"name, or remove {rung.name} and {rung.name}.* from {ladder.output}."
        )


def difference(ladder: Ladder, rung: Rung, old: dict[str, Any]) -> str:
    """The first setting that is not as it was."""
    new = json.loads(json.dumps(ladder.filled(rung)))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"{name} was {old.get(name)} and is {new.get(name)}"
    return "a rung that it needs has changed"


# ---- Showing


def table(ladder: Ladder, names: list[str]) -> str:
    """The ladder in Markdown, a row for every rung and decoding; seeds of a rung share its rows."""
    headers = ["rung", "BLEU", "chrF", "evaluations", "converged", "parameters", "updates", "CPU minutes"]
    rows, signatures = [], set()
    for title, rungs in by_title(ladder, names).items():
        trained = [figures for figures in map(ladder.figures, rungs) if figures is not None]
        for decoding, options in ladder.rungs[rungs[0]].decode.items():
            label = f"{title}, {decoding}" if decoding else title
            done = [one for one in trained if one["decodings"].get(decoding, {}).get("options") == options]
            if not done:
                rows.append([label, "not run", *[""] * (len(headers) - 2)])
                continue
            if len(done) < len(rungs):
                label += f" ({len(done)} of {len(rungs)} seeds)"
            decoded = [figures["decodings"][decoding] for figures in done]
            signatures |= {figures["bleu_signature"] for figures in decoded}
            rows.append([label, *(cell(decoded, key, form) for key, form in COLUMNS.items()), *cost(done)])
    return "\n\n".join([markdown_table(headers, rows), *(f"BLEU {one}" for one in sorted(signatures))])


COLUMNS = {"bleu": "{:.1f}", "chrf": "{:.1f}", "mean_nfe": "{:.1f}", "share_converged": "{:.0%}"}


def by_title(ladder: Ladder, names: list[str]) -> dict[str, list[str]]:
    """Names of the rungs to be shown; those that differ in their seed alone together."""
    titles: dict[str, list[str]] = {}
    for name in names:
        rung = ladder.rungs[name]
        if rung.verb != "distill":
            titles.setdefault(rung.title, []).append(name)
    return titles


def cell(figures: list[dict[str, Any]], key: str, form: str) -> str:
    """The mean over seeds, and each of them if there are several."""
    values = [one[key] for one in figures if key in one]
    if not values:
        return ""
    mean = form.format(fmean(values))
    return mean if len(values) == 1 or key != "bleu" else f"{mean} ({', '.join(map(form.format, values))})"


def cost(found: list[dict[str, Any]]) -> list[str]:
    """Size, updates and processor time of training."""
    mean = {key: fmean(one[key] for one in found) for key in ("parameters", "updates", "cpu_seconds")}
    minutes = f"{mean['cpu_seconds'] / 60:.0f}" if mean["cpu_seconds"] else ""  # nobody counts them on a GPU
    updates = f"{mean['updates']:,.0f}" if mean["updates"] else ""  # n-grams are counted
    return [f"{mean['parameters'] / 1e6:.2f} M", updates, minutes]


def plot(ladder: Ladder, names: list[str], path: Path) -> None:
    """BLEU and residual against evaluations, for every finished rung that has a curve."""
    shown = [name for name in names if ladder.rungs[name].curve and ladder.done(name)]
    if not shown:
        raise ValueError("No finished rung has a curve; nothing can be drawn.")
    drawing = load_figure()(figsize=(7, 7), layout="constrained")
    upper, lower = drawing.subplots(2, 1, sharex=True)
    titles = list(by_title(ladder, shown))
    for name in shown:
        title = ladder.rungs[name].title
        first = by_title(ladder, shown)[title][0] == name  # seeds share a colour and a place in the legend
        place = titles.index(title)  # there are ten colours; after them lines are broken
        style = {"marker": "o", "color": f"C{place % 10}", "linestyle": "-" if place < 10 else "--"}
        style["label"] = title if first else None
        decoded = ladder.figures(name)["decodings"]
        points = [decoded[f"max_nfe={count}"] for count in ladder.rungs[name].curve]
        evaluations = [point["mean_nfe"] for point in points]
        upper.plot(evaluations, [point["bleu"] for point in points], **style)
        lower.plot(evaluations, [point["mean_residual"] for point in points], **{**style, "label": None})
    upper.set(ylabel="BLEU")
    lower.set(ylabel="mean relative residual", xlabel="evaluations of the transition", yscale="log")
    drawing.legend(loc="outside lower left", fontsize="small")
    drawing.savefig(path, dpi=150)

"""Recipes of experiments: reading and checking the YAML file, and recognising the results of a recipe.

An experiment is a YAML file:

    test: "{data}/test.jsonl.gz"           # with source and target: the test set of every run
    source: en
    target: de
    about:                                 # required by release.py: the text of model cards
      title: Everyday English to German
      dataset: Tatoeba
      licence: cc-by-2.0                   # licence of the models, spelled as on the Hub
      attribution: Authors and origin of the training data.
      limits: What the models cannot do.
    defaults:                              # settings of every run of a verb
      train: {max_tokens: 2048, seed: 1, …}
    runs:
      teacher:
        verb: teacher                      # or distill, train, energy, ngrams, shortlist: the settings are its flags
        settings: {train_data: "{data}/train.jsonl.gz", …}
        decode: {greedy: {num_beams: 1}, beam 5: {num_beams: 5}}      # named sets of options of generate
      distilled:
        verb: distill
        settings: {teacher: "{teacher}", …}                           # {name} is the result of the run of that name
      stacked:
        verb: train
        settings: {teacher: "{teacher}", train_data: "{distilled}", config: {refinement: stacked}, …}
        seeds: [1, 2]                      # one run for each seed, tabulated together
      implicit:
        like: stacked                      # inherits from that run; settings given here override
        settings: {config: {refinement: implicit}}
        curve: [1, 2, 4, 8, 16]            # also evaluated with these values of max_nfe
      continued:
        like: stacked
        settings: {teacher: null, model: "{stacked.seed}", …}         # {name.seed}: the run with the same seed
        seeds: [1, 2]
"""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.errors import StrictDataclassError

from hf_deqnar.cli.command import Command
from hf_deqnar.cli.evaluate import parse_system
from hf_deqnar.models.deqnar.configuration_deqnar import DeqNarConfig
from hf_deqnar.models.deqnar.generation_deqnar import DeqNarGenerationConfig
from hf_deqnar.objectives.objective import check_objective
from hf_deqnar.utils.arguments import parse_settings
from hf_deqnar.utils.files import read_json

TABLE_VERBS = ("ngrams", "shortlist")  # they add a table of counts to a model within seconds; nothing is trained
VERBS = ("teacher", "distill", "train", "energy", *TABLE_VERBS)
KEYS = ("test", "source", "target", "about", "defaults", "runs")
ABOUT = ("title", "dataset", "licence", "attribution", "limits")
RUN_KEYS = ("verb", "like", "settings", "decode", "seeds", "curve", "title")
CURVE_TOLERANCE = 1e-6  # so small that max_nfe, not the tolerance, ends the solves of a curve
RECIPE_LINE = "# recipe "  # first line of a settings file, before the fingerprint


@dataclass
class ExperimentRun:
    """One run: a verb with its settings, and how its model is decoded and labelled."""

    name: str
    verb: str
    settings: dict[str, Any]
    decode: dict[str, dict[str, Any]]
    title: str
    curve: list[int] = field(default_factory=list)

    def trained_on(self) -> set[str]:
        """Names of the runs whose results training uses."""
        return references(self.settings)

    def needs(self) -> set[str]:
        """Names of the runs whose results training or decoding uses."""
        return self.trained_on() | references(self.decode)

    def decodings(self) -> dict[str, dict[str, Any]]:
        """All decodings by name, including those of the curve; none for a run that makes a corpus."""
        if self.verb == "distill":
            return {}
        budgets = {f"max_nfe={count}": {"max_nfe": count, "tol": CURVE_TOLERANCE} for count in self.curve}
        return {**self.decode, **budgets}


def references(content: Any) -> set[str]:
    """The names in `{name}` placeholders, except {data}."""
    return set(re.findall(r"\{([\w.+-]+)\}", json.dumps(content, ensure_ascii=False))) - {"data"}


@dataclass
class Experiment:
    """All runs by name, and the folders of the data and the results."""

    runs: dict[str, ExperimentRun]
    test: dict[str, str]
    data: Path
    output: Path
    about: dict[str, str] | None = None
    processes: int = 1  # that execute one run together

    def result(self, name: str) -> Path:
        """What a run makes: a model folder, or a corpus."""
        return self.output / (f"{name}.jsonl.gz" if self.runs[name].verb == "distill" else name)

    def file(self, name: str, ending: str) -> Path:
        """`name.ending` in the output folder; `with_suffix` would cut names that contain dots."""
        return self.output / f"{name}.{ending}"

    def figures(self, name: str) -> dict[str, Any] | None:
        """The result file of a run; None if there is none."""
        path = self.file(name, "json")
        if not path.is_file():
            return None
        return read_json(path, "recipe", "settings", "decodings", remedy="remove it, and the run is repeated")

    def has_result(self, name: str) -> bool:
        """Whether the model or corpus of a run is complete."""
        result = self.result(name)
        if self.runs[name].verb == "distill":
            return result.is_file()
        # trainer_state.json is written after the model; `ngrams` and `shortlist` move a complete folder into place.
        last = "config.json" if self.runs[name].verb in TABLE_VERBS else "trainer_state.json"
        return (result / last).is_file()

    def done(self, name: str) -> bool:
        """Whether a run has figures for all its current decodings."""
        known = self.figures(name)
        return known is not None and all(
            known["decodings"].get(key, {}).get("options") == decoding
            for key, decoding in self.runs[name].decodings().items()
        )

    def fill(self, value: Any) -> Any:
        """Replace {data} and {name} placeholders by paths."""
        if isinstance(value, str):
            paths = {"data": self.data, **{name: self.result(name) for name in self.runs}}
            for name, path in paths.items():
                value = value.replace(f"{{{name}}}", str(path))
            return value
        if isinstance(value, dict):
            return {key: self.fill(entry) for key, entry in value.items()}
        return [self.fill(entry) for entry in value] if isinstance(value, list) else value

    def settings(self, run: ExperimentRun) -> dict[str, Any]:
        """The settings of a run's verb with all placeholders filled, and its output path."""
        output = "output" if run.verb == "distill" else "output_dir"
        return self.fill({**run.settings, output: f"{{{run.name}}}"})


# ---- Reading


def read_experiment(path: Path, data: Path, output: Path) -> Experiment:
    """Read a recipe and check all of it: keys, references between runs, and every setting of every run."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no experiment {path}.")
    if not data.is_dir():
        raise FileNotFoundError(f"There is no folder {data}; --data names the folder of the experiment's corpus.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    check_keys(content, KEYS, str(path), required=("test", "source", "target", "runs"))
    check_about(content.get("about"), f"{path}: about")
    defaults = content.get("defaults") or {}
    check_keys(defaults, VERBS, f"{path}: defaults")
    for verb, settings in defaults.items():
        check_mapping(settings or {}, f"{path}: defaults of '{verb}'")
    entries = content["runs"]
    check_mapping(entries, f"{path}: runs")
    titles: dict[str, str] = {}
    runs: dict[str, ExperimentRun] = {}
    for name in entries:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+-]+", name) or name == "data":
            raise ValueError(f"{path}: {name!r} cannot be the name of a run; use letters, digits, '-', '+' and '.'.")
        for run in make_runs(name, inherit(entries, name, path), defaults, path):
            if run.name in runs:
                raise ValueError(f"{path}: '{run.name}' is both a run and a seed of another run; rename the run.")
            runs[run.name] = run
        if titles.setdefault(run.title, name) != name:
            raise ValueError(f"{path}: runs '{titles[run.title]}' and '{name}' have the same title; change one.")
    test = {"data": content["test"], "source": content["source"], "target": content["target"]}
    experiment = Experiment(runs, test, data, output, content.get("about"))
    above: set[str] = set()
    for run in runs.values():
        missing = sorted(run.needs() - above)
        if missing:
            raise ValueError(f"{path}: run '{run.name}' needs {{{missing[0]}}}, but no run above it has that name.")
        above.add(run.name)
        check_settings(experiment, run, path)
    return experiment


def check_mapping(content: Any, where: str) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"{where} must consist of name: value entries.")


def check_keys(content: Any, known: tuple[str, ...], where: str, required: tuple[str, ...] = ()) -> None:
    check_mapping(content, where)
    for key in content:
        if key not in known:
            raise ValueError(f"{where}: '{key}' is not a key; the keys are {', '.join(known)}.")
    for key in required:
        if key not in content:
            raise ValueError(f"{where}: '{key}' is missing.")


def check_about(about: Any, where: str) -> None:
    """Require all entries or none, so that no card is published without a licence or an attribution."""
    if about is None:
        return
    check_keys(about, ABOUT, where, required=ABOUT)
    for key, text in about.items():
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: '{key}' must be a text, not {text!r}.")


def inherit(entries: dict[str, Any], name: str, path: Path, chain: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entry of a run, merged with that of the run it is `like`."""
    if name not in entries:
        raise ValueError(f"{path}: run '{chain[-1]}' is like '{name}', but there is no such run.")
    if name in chain:
        raise ValueError(f"{path}: run '{name}' is like itself ({' → '.join((*chain, name))}).")
    entry = entries[name]
    check_keys(entry, RUN_KEYS, f"{path}: run '{name}'")
    check_mapping(entry.get("settings") or {}, f"{path}: settings of run '{name}'")
    if "like" not in entry:
        return entry
    parent = inherit(entries, entry["like"], path, (*chain, name))
    inherited = {key: value for key, value in parent.items() if key not in ("title", "seeds", "curve")}
    own = {key: value for key, value in entry.items() if key not in ("like", "settings")}
    return {**inherited, **own, "settings": merge(parent.get("settings") or {}, entry.get("settings") or {})}


def merge(settings: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """`overrides` win; the model configuration is merged field by field."""
    merged = {**settings, **overrides}
    if isinstance(settings.get("config"), dict) and isinstance(overrides.get("config"), dict):
        merged["config"] = {**settings["config"], **overrides["config"]}
    return merged


def with_seed(content: Any, ending: str) -> Any:
    """Settings in which {name.seed} is the run of that name with the same seed.

    >>> with_seed({"model": "{stack.seed}", "teacher": "{teacher}"}, ending=".seed43")
    {'model': '{stack.seed43}', 'teacher': '{teacher}'}
    """
    if isinstance(content, str):
        return re.sub(r"\.seed\}", f"{ending}}}", content)
    if isinstance(content, dict):
        return {key: with_seed(value, ending) for key, value in content.items()}
    return [with_seed(value, ending) for value in content] if isinstance(content, list) else content


def make_runs(name: str, entry: dict[str, Any], defaults: dict[str, Any], path: Path) -> list[ExperimentRun]:
    """The run of an entry, or one for each seed; the first seed has the plain name."""
    where = f"{path}: run '{name}'"
    check_keys(entry, RUN_KEYS, where, required=("verb",))
    if entry["verb"] not in VERBS:
        raise ValueError(f"{where}: verb '{entry['verb']}' is unknown; choose one of {', '.join(VERBS)}.")
    settings = merge(defaults.get(entry["verb"]) or {}, entry.get("settings") or {})
    settings = {key: value for key, value in settings.items() if value is not None}  # null removes a default
    decode = entry.get("decode") or {"": {}}
    if not isinstance(decode, dict) or not all(isinstance(options, dict) for options in decode.values()):
        raise ValueError(f"{where}: decode must map names to options of generate, such as beam 5: {{num_beams: 5}}.")
    if entry["verb"] == "distill" and ("decode" in entry or "curve" in entry):
        raise ValueError(f"{where}: a corpus is not decoded; remove decode and curve.")
    seeds, curve = entry.get("seeds"), entry.get("curve") or []
    check_integers([0] if seeds is None else seeds, 0, f"{where}: seeds")
    check_integers(curve, 1, f"{where}: curve")
    title = entry.get("title", name)
    if seeds is None:
        return [ExperimentRun(name, entry["verb"], settings, decode, title, curve)]
    runs = []
    for number, seed in enumerate(seeds):
        ending = f".seed{seed}" if number else ""
        own, own_decode = with_seed(settings, ending), with_seed(decode, ending)
        runs.append(ExperimentRun(name + ending, entry["verb"], {**own, "seed": seed}, own_decode, title, curve))
    return runs


def check_integers(value: Any, least: int, where: str) -> None:
    valid = isinstance(value, list) and all(type(number) is int and number >= least for number in value)
    if not valid or (not value and least == 0):
        raise ValueError(f"{where} must be a list of integers of at least {least}, such as [1, 2], not {value!r}.")


def check_settings(experiment: Experiment, run: ExperimentRun, path: Path) -> None:
    """Parse the settings as the verb will, so that an error in the last run is reported before the first one starts."""
    from hf_deqnar.cli.main import COMMANDS
    from hf_deqnar.training.trainer import objective_of

    command = COMMANDS[run.verb]
    assert isinstance(command, Command)  # and not the benchmarks
    try:
        parsed = parse_settings(command.dataclasses([]), experiment.settings(run))
        if run.verb in ("train", "energy", *TABLE_VERBS):
            for decoding in run.decodings().values():
                DeqNarGenerationConfig(**parse_system(system_text("model", decoding))[1])
        if run.verb == "train":
            model, _, training = parsed
            # A new model has the size of a preset; the size of a model that training starts from is not known here.
            config = DeqNarConfig.preset(model.preset or "tiny", **model.settings())
            if model.start is None or "length" in model.settings():
                check_objective(objective_of(training), config)
    except (ValueError, StrictDataclassError) as error:
        raise ValueError(f"{path}: run '{run.name}': {' '.join(str(error).split())}") from error


def system_text(model: Path | str, decoding: dict[str, Any]) -> str:
    """'model,key=value', as `hf-deqnar evaluate` expects it."""
    return ",".join([str(model), *(f"{key}={value}" for key, value in decoding.items())])


def select(experiment: Experiment, only: list[str] | None) -> list[str]:
    """The requested runs and all that they need, in the order of the recipe."""
    requested = list(experiment.runs if only is None else only)
    selected: set[str] = set()
    while requested:
        name = requested.pop()
        if name not in experiment.runs:
            raise ValueError(f"There is no run '{name}'; the runs are {', '.join(experiment.runs)}.")
        if name not in selected:
            selected.add(name)
            requested += experiment.runs[name].needs()
    return [name for name in experiment.runs if name in selected]


# ---- Recognising results


def fingerprint(experiment: Experiment, run: ExperimentRun) -> str:
    """A hash of the recipe of a run and of all runs it was trained on; paths of data and results do not matter."""
    content = json.dumps([run.verb, run.settings], sort_keys=True)
    others = [fingerprint(experiment, experiment.runs[name]) for name in sorted(run.trained_on())]
    return hashlib.sha256("\n".join([content, *others]).encode()).hexdigest()[:16]


def settings_file(experiment: Experiment, run: ExperimentRun) -> str:
    """The YAML file that the verb reads; its first line is the fingerprint of the recipe."""
    settings = yaml.safe_dump(experiment.settings(run), allow_unicode=True, sort_keys=False)
    return f"{RECIPE_LINE}{fingerprint(experiment, run)}\n{settings}"


def check_recipe(experiment: Experiment, run: ExperimentRun) -> None:
    """Refuse results, or an unfinished run, of the same name but another recipe."""
    known, started = experiment.figures(run.name), experiment.file(run.name, "yaml")
    if known is not None:
        recipe, settings = known["recipe"], known["settings"]
    elif started.is_file():
        text = started.read_text(encoding="utf-8")
        recipe, settings = text.partition("\n")[0].removeprefix(RECIPE_LINE), yaml.safe_load(text)
    else:
        return
    if recipe != fingerprint(experiment, run):
        raise ValueError(
            f"The results of run '{run.name}' belong to another recipe ({difference(experiment, run, settings)}); "
            f"rename the run, or remove {run.name} and {run.name}.* from {experiment.output}."
        )


def difference(experiment: Experiment, run: ExperimentRun, old: dict[str, Any]) -> str:
    """The first setting that differs."""
    new = json.loads(json.dumps(experiment.settings(run)))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"{name} was {old.get(name)} and is {new.get(name)}"
    return "a run that it needs has changed"

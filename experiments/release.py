"""Make a folder that can be published: the model of a run, its tokenizer and its model card.

    python experiments/release.py experiments/tatoeba.yaml --data data/tatoeba --output runs/tatoeba \\
        --run trigrams-4 --to my-model --half
    python experiments/release.py experiments/tatoeba.yaml --data data/tatoeba --output runs/tatoeba \\
        --run teacher-4 --decoding "beam 5" --to my-teacher
    python experiments/release.py experiments/multi30k.yaml --data data/multi30k --output runs/multi30k \\
        --run cmlm --card model_cards/multi30k-cmlm.md

The options of the decoding become the defaults of `generate`, and its figures those of the card. Data, licence and
limitations on the card come from `about:` in the YAML file. The folder also contains the model's code for
`trust_remote_code`, for the bundled model as links to the package. `--card` writes only the card, for a model that is
described but not distributed. `hf-deqnar push` uploads the folder to the Hub.
"""

import argparse
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from experiment import Experiment, ExperimentRun, check_recipe, read_experiment, references, select
from huggingface_hub import ModelCard
from results import table
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_deqnar
from hf_deqnar.cli.card import CardContent, is_generated, make_card
from hf_deqnar.cli.evaluate import parse_system
from hf_deqnar.cli.extras import requires_extra
from hf_deqnar.cli.loading import load_model
from hf_deqnar.cli.main import exit_status
from hf_deqnar.utils.files import write_json

RELEASE_SUFFIXES = (".json", ".safetensors", ".py")  # files that a release may replace or remove, besides the card


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="experiments/release.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", type=Path, help="YAML file of the experiment")
    parser.add_argument("--data", type=Path, required=True, help="folder that replaces {data} in the YAML file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the experiment's results")
    parser.add_argument("--run", required=True, help="the run whose model is released")
    destination = parser.add_mutually_exclusive_group(required=True)
    destination.add_argument("--to", type=Path, metavar="FOLDER", help="folder of the release")
    destination.add_argument("--card", type=Path, metavar="FILE", help="write only the card, to this file")
    parser.add_argument("--half", action="store_true", help="store half-precision weights; they are loaded as float32")
    parser.add_argument("--decoding", metavar="NAME", help="decoding of the run (default: its first)")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier release")
    return parser


def main(arguments: list[str] | None = None) -> int:
    options = make_parser().parse_args(arguments)
    return exit_status("experiments/release.py", lambda: release(options))


def release(options: argparse.Namespace) -> None:
    with requires_extra("train", "Releasing a model"):
        experiment = read_experiment(options.experiment, options.data, options.output)
    run = select_run(experiment, options.run, options.experiment)
    decoding = select_decoding(experiment, run, options.decoding)
    if options.card is not None:
        write_card(experiment, run, decoding, options)
        return
    check_folder(options.to, options.overwrite)
    bundled = options.to.resolve() == Path(hf_deqnar.PRETRAINED).resolve()
    model, tokenizer = load_model(str(experiment.result(run.name)), "cpu")
    card = card_of_run(
        experiment, run, decoding, model.config, name=options.to.resolve().name, half=options.half, bundled=bundled
    )
    set_generation_defaults(model, experiment.figures(run.name)["decodings"][decoding]["system"])
    options.to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.to.parent) as unfinished:
        save(model, tokenizer, Path(unfinished), half=options.half)
        if bundled:
            link_code(Path(unfinished), options.to)
        card.save(Path(unfinished) / "README.md")
        move_files(Path(unfinished), options.to)
    size = sum(file.stat().st_size for file in options.to.glob("*.safetensors"))
    print(f"{options.to}: {run.title}{f', {decoding}' if decoding else ''}; {size / 1e6:.1f} MB of weights")


# ---- Checks


def select_run(experiment: Experiment, name: str, path: Path) -> ExperimentRun:
    """The run, if it makes a model and was executed with the current recipe."""
    names = select(experiment, [name])
    if experiment.about is None:
        raise ValueError(f"{path} has no 'about', which gives the card its data and licence; see experiment.py.")
    run = experiment.runs[name]
    if run.verb == "distill":
        raise ValueError(f"Run '{name}' makes a corpus; only models can be released.")
    figures = experiment.file(name, "json")
    if experiment.figures(name) is None:
        raise ValueError(f"Run '{name}' has no results: there is no {figures}; run the experiment first.")
    if not experiment.has_result(name):
        raise ValueError(f"Run '{name}' has figures but no model; remove {figures} and run the experiment again.")
    for one in names:
        check_recipe(experiment, experiment.runs[one])
    return run


def select_decoding(experiment: Experiment, run: ExperimentRun, name: str | None) -> str:
    """The decoding, if it is evaluated with its current options and needs no other model."""
    name = next(iter(run.decode)) if name is None else name
    if name not in run.decode:
        known = ", ".join(filter(None, run.decode)) or "one without a name"
        raise ValueError(f"Run '{run.name}' has no decoding '{name}'; it has {known}.")
    others = sorted(references(run.decode[name]))
    if others:
        raise ValueError(f"Decoding '{name}' needs {{{others[0]}}}, which is not part of a release; choose another.")
    figures = experiment.figures(run.name)["decodings"].get(name, {})
    if figures.get("options") != run.decode[name]:
        raise ValueError(f"Run '{run.name}' is not evaluated with decoding '{name}'; run the experiment first.")
    return name


def check_folder(folder: Path, overwrite: bool) -> None:
    """Refuse to overwrite anything but an earlier release; hidden files, such as those of git, are ignored."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --to names a folder.")
    if not folder.is_dir() or all(file.name.startswith(".") for file in folder.iterdir()):
        return
    card = folder / "README.md"
    if not card.is_file() or not is_generated(card):
        raise ValueError(f"{folder} is not empty and does not contain a release; name another folder.")
    if not overwrite:
        raise ValueError(f"{folder} contains an earlier release; --overwrite replaces it.")


# ---- The card


def write_card(experiment: Experiment, run: ExperimentRun, decoding: str, options: argparse.Namespace) -> None:
    """Write only the card; a card that was not generated is not overwritten."""
    path = options.card
    if path.is_dir():
        raise ValueError(f"{path} is a folder; --card names a file, such as {path / f'{run.name}.md'}.")
    if path.is_file() and not is_generated(path):
        raise ValueError(f"{path} exists and was not generated by this script; name another file.")
    if path.is_file() and not options.overwrite:
        raise ValueError(f"{path} contains an earlier card; --overwrite replaces it.")
    config = AutoConfig.from_pretrained(experiment.result(run.name))
    card = card_of_run(experiment, run, decoding, config, name=run.name, half=options.half, bundled=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    card.save(path)
    print(f"{path}: {run.title}{f', {decoding}' if decoding else ''}")


def card_of_run(
    experiment: Experiment,
    run: ExperimentRun,
    decoding: str,
    config: PreTrainedConfig,
    *,
    name: str,
    half: bool,
    bundled: bool,
) -> ModelCard:
    """The card of a run's model; `decoding` is the one whose options are the defaults of the release."""
    about, known = experiment.about, experiment.figures(run.name)
    figures = known["decodings"][decoding]
    content = CardContent(
        title=f"{about['title']}: {run.title}",
        name=name,
        source=experiment.test["source"],
        target=experiment.test["target"],
        licence=about["licence"],
        dataset=about["dataset"],
        attribution=about["attribution"],
        limits=about["limits"],
        training=commands(experiment, run.name, known["machine"]),
        results=results(experiment, run, decoding, figures, half),
        figures=figures,
        parameters=known["parameters"],
        half=half,
        bundled=bundled,
    )
    return make_card(config, content)


def commands(experiment: Experiment, name: str, machine: dict[str, Any]) -> str:
    """The commands that made the model, with all settings; paths are relative, so that no local folder is published."""
    relative = replace(experiment, data=Path("data"), output=Path())
    steps = []
    for number, each in enumerate(lineage(experiment, name), start=1):
        run = experiment.runs[each]
        settings = yaml.safe_dump(relative.settings(run), allow_unicode=True, sort_keys=False)
        steps.append(f"{number}. `hf-deqnar {run.verb} {each}.yaml` with\n\n```yaml\n{settings}```")
    environment = (
        f"The last step ran on {machine['processor']} ({machine['threads']} threads) with torch {machine['torch']} and "
        f"transformers {machine['transformers']}."
    )
    return "\n\n".join(["`data` is the folder of the corpus.", *steps, environment])


def lineage(experiment: Experiment, name: str) -> list[str]:
    """The run and all runs it was trained on, directly or indirectly, in the order of the recipe."""
    found = {name}
    for other in reversed(experiment.runs):  # a run is only trained on runs above it
        if other in found:
            found |= experiment.runs[other].trained_on()
    return [other for other in experiment.runs if other in found]


def results(experiment: Experiment, run: ExperimentRun, decoding: str, figures: dict[str, Any], half: bool) -> str:
    """The table of the model and the runs that it needs."""
    row = f"{run.title}, {decoding}" if decoding else run.title
    opening = (
        f"Measured on the {figures['sentences']:,} sentences of the test set of {experiment.about['dataset']}. The row "
        f"'{row}' is this model with its default options; the other rows are the models that it was trained with. "
        "Evaluations are those of the decoder, per sentence."
    )
    if half:
        opening += " Figures were measured before the weights were rounded to half precision."
    return f"{opening}\n\n{table(experiment, select(experiment, [run.name]))}\n\nchrF {figures['chrf_signature']}"


# ---- The model


def set_generation_defaults(model: PreTrainedModel, system: str) -> None:
    """Make the options that a system was evaluated with the defaults of the model."""
    _, options = parse_system(system)
    unknown = model.generation_config.update(**options)
    if unknown:
        raise ValueError(f"{next(iter(unknown))} cannot be a default of generate; choose another decoding.")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, half: bool) -> None:
    """Save weights, configuration, tokenizer and the model's code."""
    if half:
        check_range(model)
        model.half()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if half:
        file = folder / "config.json"
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        config["dtype"] = "float32"  # from_pretrained loads float32 for any stored dtype
        write_json(file, config)


def link_code(folder: Path, destination: Path) -> None:
    """Replace the code in a folder by links to that of the package, relative to where the folder will be."""
    package = Path(hf_deqnar.__file__).parent / "models" / "deqnar"
    for file in folder.glob("*.py"):
        file.unlink()
        file.symlink_to(os.path.relpath(package / file.name, destination.resolve()))


def check_range(model: PreTrainedModel) -> None:
    """Refuse weights that half precision cannot represent."""
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.isfinite().all() and not weight.half().isfinite().all():
            largest = weight.abs().max().item()
            raise ValueError(f"{name} reaches {largest:.3g}, too large for half precision; leave out --half.")


def move_files(finished: Path, folder: Path) -> None:
    """Move the files of a release into its folder, and remove files that only an earlier release had."""
    folder.mkdir(exist_ok=True)
    names = {file.name for file in finished.iterdir()}
    for file in folder.iterdir():
        if file.suffix in RELEASE_SUFFIXES and file.name not in names:
            file.unlink()
    for name in sorted(names):
        os.replace(finished / name, folder / name)


if __name__ == "__main__":
    sys.exit(main())

"""Make a folder that can be published: the model of a rung, its tokenizer, and a card that says what it is.

    hf-deqnar release ladders/tatoeba.yaml --data data/tatoeba --output runs/tatoeba --rung box --to my-model --half
    hf-deqnar release ladders/tatoeba.yaml --data data/tatoeba --output runs/tatoeba --rung teacher \\
        --decoding "beam 5" --to my-teacher
    hf-deqnar release ladders/multi30k.yaml --data data/multi30k --output runs/ladder --rung cmlm --card cards/cmlm.md

The options of the decoding become the defaults of `generate`, and its figures those of the card. What the card says of
data, licence and limits is `about:` in the ladder. The folder also carries the model's code, for `trust_remote_code`;
only the model in the box does not, as the package around it is its code. `--card` writes the card alone, for a model
that is quoted but not given away.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_deqnar

from ..corpus.files import write_json
from .card import MARK, make_card
from .evaluate import parse_system
from .ladder import Ladder, Rung, check_recipe, named_in, read_ladder, wanted
from .loading import load_model, train_extra

KINDS = (".json", ".safetensors", ".py")  # of files that an earlier release may have left, besides the card


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ladder", type=Path, help="the YAML file of rungs")
    parser.add_argument("--data", type=Path, required=True, help="what {data} stands for in it")
    parser.add_argument("--output", type=Path, required=True, help="folder of the ladder's results")
    parser.add_argument("--rung", required=True, help="the rung whose model is released")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=Path, metavar="FOLDER", help="folder of the release")
    where.add_argument("--card", type=Path, metavar="FILE", help="write nothing but the card, into this file")
    parser.add_argument("--half", action="store_true", help="store weights in half precision; loaded, they are float32")
    parser.add_argument("--decoding", metavar="NAME", help="decoding of the rung; its first if not given")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier release")


def run(options: argparse.Namespace) -> None:
    with train_extra("Releasing a rung"):
        ladder = read_ladder(options.ladder, options.data, options.output)
    rung = chosen_rung(ladder, options.rung, options.ladder)
    decoding = chosen_decoding(ladder, rung, options.decoding)
    if options.card is not None:
        write_card(ladder, rung, decoding, options)
        return
    check_folder(options.to, options.overwrite)
    boxed = options.to.resolve() == Path(hf_deqnar.BOX).resolve()
    model, tokenizer = load_model(str(ladder.result(rung.name)), "cpu")
    card = make_card(
        ladder, rung, decoding, model.config, name=options.to.resolve().name, half=options.half, boxed=boxed
    )
    keep_options(model, ladder.figures(rung.name)["decodings"][decoding]["system"])
    options.to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.to.parent) as unfinished:
        save(model, tokenizer, Path(unfinished), half=options.half, code=not boxed)
        card.save(Path(unfinished) / "README.md")
        put_in_place(Path(unfinished), options.to)
    size = sum(file.stat().st_size for file in options.to.glob("*.safetensors"))
    print(f"{options.to}: {rung.title}{f', {decoding}' if decoding else ''}; {size / 1e6:.1f} MB of weights")


def write_card(ladder: Ladder, rung: Rung, decoding: str, options: argparse.Namespace) -> None:
    """The card alone; one that somebody wrote by hand is not written over."""
    path = options.card
    if path.is_dir():
        raise ValueError(f"{path} is a folder; --card names a file, such as {path / f'{rung.name}.md'}.")
    if path.is_file() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{path} is there, and is not a card that was made here; name another file.")
    if path.is_file() and not options.overwrite:
        raise ValueError(f"{path} holds an earlier card; --overwrite replaces it.")
    config = AutoConfig.from_pretrained(ladder.result(rung.name))
    card = make_card(ladder, rung, decoding, config, name=rung.name, half=options.half, boxed=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    card.save(path)
    print(f"{path}: {rung.title}{f', {decoding}' if decoding else ''}")


def chosen_rung(ladder: Ladder, name: str, path: Path) -> Rung:
    """The rung, if it can be released: it is run by the recipe that the ladder has now, and makes a model."""
    below = wanted(ladder, [name])
    if ladder.about is None:
        raise ValueError(f"{path} has no 'about', from which cards take data and licence; see hf-deqnar ladder --help.")
    rung = ladder.rungs[name]
    if rung.verb == "distill":
        raise ValueError(f"Rung '{name}' makes a corpus; only models can be released.")
    if ladder.figures(name) is None:
        raise ValueError(f"Rung '{name}' is not run: {ladder.file(name, 'json')} is not there; climb the ladder first.")
    if not ladder.made(name):
        raise ValueError(
            f"Of rung '{name}' there are figures but no model; remove {ladder.file(name, 'json')} and climb again."
        )
    for one in below:
        check_recipe(ladder, ladder.rungs[one])
    return rung


def chosen_decoding(ladder: Ladder, rung: Rung, name: str | None) -> str:
    """The decoding, if it is evaluated as it is written now and needs no other model."""
    name = next(iter(rung.decode)) if name is None else name
    if name not in rung.decode:
        known = ", ".join(filter(None, rung.decode)) or "only one, which has no name"
        raise ValueError(f"Rung '{rung.name}' has no decoding '{name}'; there is {known}.")
    others = sorted(named_in(rung.decode[name]))
    if others:
        raise ValueError(f"Decoding '{name}' needs {{{others[0]}}}, which is not part of a release; choose another.")
    found = ladder.figures(rung.name)["decodings"].get(name, {})
    if found.get("options") != rung.decode[name]:
        raise ValueError(f"Rung '{rung.name}' is not evaluated with decoding '{name}'; climb the ladder first.")
    return name


def check_folder(folder: Path, overwrite: bool) -> None:
    """Nothing is written over but an earlier release; hidden files, as those of git, are let be."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; --to names a folder.")
    if not folder.is_dir() or all(file.name.startswith(".") for file in folder.iterdir()):
        return
    card = folder / "README.md"
    if not card.is_file() or MARK not in card.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{folder} is not empty, and what it holds is not a release; name another folder.")
    if not overwrite:
        raise ValueError(f"{folder} holds an earlier release; --overwrite replaces it.")


def keep_options(model: PreTrainedModel, system: str) -> None:
    """The options that a system was evaluated with become the model's defaults."""
    _, options = parse_system(system)
    unknown = model.generation_config.update(**options)
    if unknown:
        raise ValueError(f"{next(iter(unknown))} cannot be a default of generate; choose another decoding.")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, half: bool, code: bool) -> None:
    """Weights, configurations, tokenizer and, if asked for, code."""
    if half:
        check_range(model)
        model.half()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if half:
        config["dtype"] = "float32"  # what from_pretrained computes in, whatever is stored
    if not code:
        for source in folder.glob("*.py"):
            source.unlink()
        for key in ("auto_map", "custom_pipelines"):  # they name the code
            config.pop(key, None)
    write_json(file, config)


def check_range(model: PreTrainedModel) -> None:
    for name, weight in model.state_dict().items():
        if weight.is_floating_point() and weight.isfinite().all() and not weight.half().isfinite().all():
            largest = weight.abs().max().item()
            raise ValueError(f"{name} reaches {largest:.3g}, too large for half precision; leave out --half.")


def put_in_place(finished: Path, folder: Path) -> None:
    """Move the files to where they belong, and remove what an earlier release had and this one has not."""
    folder.mkdir(exist_ok=True)
    names = {file.name for file in finished.iterdir()}
    for file in folder.iterdir():
        if file.suffix in KINDS and file.name not in names:
            file.unlink()
    for name in sorted(names):
        os.replace(finished / name, folder / name)

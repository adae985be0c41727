"""Dataclasses as command-line flags and YAML settings, with transformers' `HfArgumentParser`."""

import argparse
import json
import re
import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import Field, fields
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NoReturn

import yaml

from .suggestions import did_you_mean


def load_hf_argument_parser() -> type[argparse.ArgumentParser]:
    """`transformers.HfArgumentParser`, without running the `__init__` of transformers.

    Importing transformers takes about a second, which `--help` should not. The module that defines the parser imports
    nothing else of transformers, so only that file is executed.
    """
    package = None if "transformers" in sys.modules else find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        from transformers import HfArgumentParser

        return HfArgumentParser
    file = Path(package.submodule_search_locations[0]) / "hf_argparser.py"
    spec = spec_from_file_location("hf_argparser_of_transformers", file)
    assert spec is not None  # the file name ends in .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.HfArgumentParser


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows one spelling of each flag, and defaults that are set."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if len(action.option_strings) > 1 and action.dest != "help":
            action = copy(action)
            action.option_strings = action.option_strings[:1]
        return super()._format_action_invocation(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default in ("", []):
            return action.help
        return super()._get_help_string(action)


class ArgumentParser(load_hf_argument_parser()):  # type: ignore[misc]  # found at run time
    """`HfArgumentParser` with positional fields and errors that are raised.

    A field with `metadata={"positional": True}` has no flag. If there is one, bool flags take no value, because
    `--flag TEXT` would otherwise read the positional TEXT as the value of the flag. `metadata={"nargs": …}` overrides
    the number of values. Every flag is also accepted with hyphens instead of underscores.
    """

    def __init__(self, dataclass_types: Iterable[type], **settings: Any) -> None:
        dataclass_types = list(dataclass_types)
        self.positionals = [entry for kind in dataclass_types for entry in fields(kind) if is_positional(entry)]
        self.inherited: set[str] = set()
        self.inherited_group: argparse._ArgumentGroup | None = None
        super().__init__(dataclass_types, formatter_class=HelpFormatter, **settings)
        self.usage = self.short_usage()

    def _add_dataclass_arguments(self, dtype: type) -> None:
        """Add the fields of a dataclass; those that it inherits from transformers have a heading of their own."""
        ours = [kind for kind in dtype.__mro__ if not is_of_transformers(kind)]
        own = {name for kind in ours for name in vars(kind).get("__annotations__", {})}
        inherits = len(ours) < len(dtype.__mro__)
        self.inherited = {entry.name for entry in fields(dtype)} - own if inherits else set()
        super()._add_dataclass_arguments(dtype)

    def _parse_dataclass_field(self, parser: argparse.ArgumentParser, field: Field) -> None:
        if field.name in self.inherited:
            if self.inherited_group is None:
                self.inherited_group = self.add_argument_group("options of transformers")
            parser = self.inherited_group  # type: ignore[assignment]  # it has the same methods
        names = [f"--{field.name}", *field.metadata.get("aliases", [])]
        if "_" in field.name:
            names.insert(1, f"--{field.name.replace('_', '-')}")
        if is_positional(field):
            settings = {key: value for key, value in field.metadata.items() if key != "positional"}
            parser.add_argument(field.name, default=[] if settings.get("nargs") == "*" else None, **settings)
        elif self.positionals and field.type in (bool, bool | None):
            parser.add_argument(
                *names, action="store_const", const=True, default=field.default, help=field.metadata.get("help")
            )
        else:
            super()._parse_dataclass_field(parser, field)
            if "nargs" in field.metadata:
                self._option_string_actions[names[0]].nargs = field.metadata["nargs"]

    def short_usage(self) -> str:
        """Required arguments only; the list of all flags would fill the screen."""
        required = [action for action in self._actions if action.required and action.option_strings]
        flags = " ".join(f"{action.option_strings[0]} {action.dest.upper()}" for action in required)
        positionals = {"?": "[{}]", "*": "[{} …]", "+": "{} [{} …]", None: "{}"}
        texts = [
            positionals[entry.metadata.get("nargs")].replace("{}", entry.metadata.get("metavar", entry.name.upper()))
            for entry in self.positionals
        ]
        return " ".join(["%(prog)s", *(texts or ["[settings.yaml]"]), *([flags] if flags else []), "[--flag VALUE …]"])

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"(--\w+)(/--[\w-]+)+", r"\1", message))  # one spelling of a flag


def is_of_transformers(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "transformers"


def is_positional(field: Field) -> bool:
    return field.metadata.get("positional", False)


def parse_arguments(
    kinds: Iterable[type],
    arguments: list[str] | None = None,
    program: str | None = None,
    description: str | None = None,
) -> tuple:
    """Dataclasses from flags, from a YAML file named first, or both; a flag overrides the file.

    >>> from dataclasses import dataclass, field
    >>> @dataclass
    ... class Options:
    ...     max_nfe: int = field(default=20, metadata={"help": "Maximum number of evaluations of a solve."})
    >>> parse_arguments([Options], ["--max_nfe", "4"])
    (Options(max_nfe=4),)
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    parser = ArgumentParser(kinds, prog=program, description=description)
    if arguments and not parser.positionals and arguments[0].endswith((".yaml", ".yml")):
        arguments = [*read_flags(Path(arguments.pop(0)), parser), *arguments]
    *parsed, unknown = parser.parse_args_into_dataclasses(
        arguments, return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-").replace("-", "_")
        advice = did_you_mean(name, {action.dest for action in parser._actions if action.option_strings})
        advice = f"{advice.replace('mean ', 'mean --')} " if unknown[0].startswith("-") and advice else ""
        raise ValueError(f"'{unknown[0]}' is not understood; {advice}--help lists every flag.")
    return tuple(parsed)


def parse_settings(kinds: Iterable[type], settings: dict[str, Any]) -> tuple:
    """Dataclasses from settings by name, checked as flags are."""
    parser = ArgumentParser(kinds)
    return tuple(parser.parse_args_into_dataclasses(as_flags(settings, parser, "settings"), look_for_args_file=False))


def read_flags(path: Path, parser: argparse.ArgumentParser) -> list[str]:
    """The entries of a YAML file as flags, so that both are checked in the same way."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no settings file {path}.")
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must consist of name: value entries.")
    return as_flags(settings, parser, str(path))


def as_flags(settings: dict[str, Any], parser: argparse.ArgumentParser, origin: str) -> list[str]:
    """Settings by name as flags; the error for an unknown name includes its origin."""
    known = {action.dest for action in parser._actions}
    flags = []
    for name, value in settings.items():
        if name not in known:
            advice = did_you_mean(str(name), known)
            advice += " " * bool(advice)
            raise ValueError(f"{origin}: '{name}' is not a setting; {advice}--help lists every one.")
        if value is None:
            continue
        if name == "config" and isinstance(value, dict):
            value = [f"{key}={'null' if entry is None else entry}" for key, entry in value.items()]
        elif isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        if values:
            flags += [f"--{name}", *map(str, values)]
    return flags

"""Shell completion of verbs and flags with argcomplete, which is optional.

eval "$(register-python-argcomplete hf-deqnar)"
"""

import argparse
import os
from collections.abc import Mapping

from ..utils.arguments import ArgumentParser
from .command import Command
from .extras import requires_extra


def complete_if_asked(program: str, commands: Mapping[str, Command | Mapping[str, Command]]) -> None:
    """Answer the request of a shell and exit; nothing happens otherwise.

    Args:
        commands: verbs with their commands, or with the commands of a second verb.
    """
    if "_ARGCOMPLETE" not in os.environ:
        return
    with requires_extra("complete", "Completion"):
        import argcomplete
    parser = argparse.ArgumentParser(prog=program)
    parser.add_argument("--version", action="store_true")
    words = os.environ.get("COMP_LINE", "").split()[1:]
    add_verbs(parser, commands, words)
    argcomplete.autocomplete(parser)


def add_verbs(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command | Mapping[str, Command]], words: list[str]
) -> None:
    """Add all verbs, and the flags of the one that is being written; the others are not needed."""
    verbs = parser.add_subparsers()
    for name, command in commands.items():
        chosen = bool(words) and words[0] == name
        if chosen and isinstance(command, Command):
            # `add_parser` makes parsers of one class with other arguments, so the entry is set instead.
            verbs.add_parser(name)
            verbs._name_parser_map[name] = ArgumentParser(command.dataclasses(["--help"]), prog=name)
            continue
        found = verbs.add_parser(name)
        if chosen and not isinstance(command, Command):
            add_verbs(found, command, words[1:])

"""Parsing the flags of a verb and running it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from ..utils.arguments import parse_arguments
from ..utils.source_dataclasses import read_dataclass
from .extras import requires_extra


@dataclass(frozen=True)
class Command:
    """A verb.

    Attributes:
        description: the text of `--help`, above the flags.
        arguments: dataclasses whose fields are the flags. One whose module imports torch is given as "module:Class": it
            is imported when the verb runs, and read from its source for `--help`.
        run: called with an instance of each dataclass.
    """

    description: str
    arguments: tuple[type | str, ...]
    run: Callable[..., int | None]

    def __call__(self, program: str, arguments: list[str]) -> int | None:
        """Parse the arguments and run the verb; returns its exit status."""
        with requires_extra("train", "This command"):
            parsed = parse_arguments(self.dataclasses(arguments), arguments, program, self.description)
        return self.run(*parsed)

    def dataclasses(self, arguments: list[str]) -> list[type]:
        """The dataclasses to parse with; for `--help`, without importing their modules."""
        imported = [kind for kind in self.arguments if isinstance(kind, str)]
        if imported and "--help_all" in arguments:
            arguments[:] = ["--help"]
        elif "--help" in arguments or "-h" in arguments:
            return [read_dataclass(*kind.split(":")) if kind in imported else kind for kind in self.arguments]
        return [import_dataclass(kind) if kind in imported else kind for kind in self.arguments]


def import_dataclass(name: str) -> type:
    """The class of "module:Class"."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)

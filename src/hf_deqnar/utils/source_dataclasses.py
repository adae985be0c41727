"""Dataclasses as they are written in a source file, for `--help`, without importing the module.

Importing the modules of the trainers and teachers takes seconds, because they import torch. Their dataclasses are read
from the syntax tree instead: fields with annotations, defaults and help texts, without methods.
"""

import ast
import builtins
from dataclasses import Field, field, make_dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

PACKAGE = __name__.partition(".")[0]


@cache
def parse_module(module: str) -> ast.Module:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise ValueError(f"The module {module} has no source file.")
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def read_docstring(module: str) -> str:
    """The docstring of a module that is not imported.

    >>> read_docstring("hf_deqnar.utils.versions")
    'Versions of other packages that this package works with.'
    """
    return ast.get_docstring(parse_module(module)) or ""


def read_dataclass(module: str, name: str) -> type:
    """A dataclass with the fields of a class and of its bases in this package; bases of other packages are left out.

    >>> sorted(read_dataclass("hf_deqnar.utils.locks", "SILENCE").__dataclass_fields__)
    Traceback (most recent call last):
        ...
    ValueError: hf_deqnar.utils.locks has no class SILENCE.
    """
    fields = [(key, kind, entry) for key, (kind, entry) in collect_fields(module, name).items()]
    return make_dataclass(name, fields, kw_only=True)


def collect_fields(module: str, name: str) -> dict[str, tuple[type, Field]]:
    """Name → annotation and field; a class overrides the fields of its bases."""
    classes = [node for node in parse_module(module).body if isinstance(node, ast.ClassDef) and node.name == name]
    if not classes:
        raise ValueError(f"{module} has no class {name}.")
    names = Names(module)
    found: dict[str, tuple[type, Field]] = {}
    for base in reversed(classes[0].bases):
        origin = names.origin(base.id) if isinstance(base, ast.Name) else None
        if origin is not None:
            found |= collect_fields(*origin)
    for node in classes[0].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            entry = field() if node.value is None else names.evaluate(node.value)
            entry = entry if isinstance(entry, Field) else field(default=entry)
            found[node.target.id] = (names.evaluate(node.annotation), entry)
    return found


class Names(dict):
    """Values of the names in a module: of its own constants and of those it imports from this package, else None."""

    def __init__(self, module: str) -> None:
        super().__init__(field=field)
        self.module = module

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)  # `eval` then finds the builtin
        for node in parse_module(self.module).body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                    return self.evaluate(node.value)
        origin = self.origin(name)
        return Names(origin[0])[origin[1]] if origin is not None and origin[0] != self.module else None

    def origin(self, name: str) -> tuple[str, str] | None:
        """Module and name under which this package defines a name; None if another package does."""
        package = self.module.rpartition(".")[0]
        for node in parse_module(self.module).body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        module = resolve_name("." * node.level + (node.module or ""), package)
                        return (module, alias.name) if module.startswith(f"{PACKAGE}.") else None
        return self.module, name

    def evaluate(self, expression: ast.expr) -> Any:
        # Of this package's own source only.
        return eval(compile(ast.Expression(expression), self.module, "eval"), {}, self)  # noqa: S307

"""Calling a function when a module is imported, without importing the module."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHooks(MetaPathFinder):
    """Finds the modules that have a hook as the other finders do, and calls the hook when their code has run."""

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[[], None]] = {}
        self.executing: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute, hook = spec.loader.exec_module, self.hooks[fullname]

            def execute_then_call(module: ModuleType) -> None:
                self.executing.add(fullname)
                try:
                    execute(module)
                finally:
                    self.executing.discard(fullname)
                hook()

            spec.loader.exec_module = execute_then_call  # type: ignore[method-assign]
        return spec


HOOKS = ImportHooks()


def after_import(module: str, hook: Callable[[], None]) -> None:
    """Call `hook` as soon as `module` is imported: now, if it already is.

    Used to register classes with a package that takes seconds to import, at no cost if it is not used.

    >>> after_import("json", lambda: print("json is imported"))
    json is imported
    """
    if module in sys.modules:
        hook()
        return
    HOOKS.hooks[module] = hook
    if HOOKS not in sys.meta_path:
        sys.meta_path.insert(0, HOOKS)


def is_executing(module: str) -> bool:
    """Whether the import of a module that has a hook has started and is not complete, so that its names are missing."""
    return module in HOOKS.executing

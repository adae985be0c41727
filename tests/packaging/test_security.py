"""Files that can contain code are not unpickled."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PICKLING = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


def unsafe(source: str) -> list[str]:
    """Imports of pickling modules, and calls of `torch.load` or `numpy.load` that would unpickle."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found += [name for name in names if name.split(".")[0] in PICKLING]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if called == "torch.load" and options.get("weights_only") != "True":
                found.append(ast.unparse(node))
            if options.get("allow_pickle", "False") != "False":
                found.append(ast.unparse(node))
            if called.endswith(("extractall", "unpack_archive")):
                found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize("folder", ["src", "scripts", "experiments", "examples"])
def test_nothing_is_unpickled_and_no_archive_is_extracted(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        assert unsafe(path.read_text(encoding="utf-8")) == [], path


def test_what_is_refused():
    assert unsafe("import pickle") == ["pickle"]
    assert unsafe("from dill.x import y") == ["dill.x"]
    assert unsafe("torch.load(path)") == ["torch.load(path)"]
    assert unsafe("torch.load(path, weights_only=True)") == []
    assert unsafe("numpy.load(path, allow_pickle=True)") != []
    assert unsafe("archive.extractall()") != []

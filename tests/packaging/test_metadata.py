"""The metadata in pyproject.toml agrees with the code."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import hf_deqnar
from hf_deqnar.utils.versions import FIRST_UNTESTED_TRANSFORMERS, OLDEST_TRANSFORMERS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "hf_deqnar"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
}  # where the name of the import differs from the name of the package

# What `import hf_deqnar` and `hf-deqnar translate` may import.
ENTRY_POINTS = ("hf_deqnar", "hf_deqnar.cli.main", "hf_deqnar.cli.translate", "hf_deqnar.models.deqnar.pipeline_deqnar")


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", requirement)[0].lower() for requirement in requirements}


DEPENDENCIES = names(PROJECT["project"]["dependencies"])
EXTRAS = {extra: names(packages) for extra, packages in PROJECT["project"]["optional-dependencies"].items()}


def module_file(module: str) -> Path | None:
    path = ROOT / "src" / module.replace(".", "/")
    candidates = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_modules(file: Path, inside_functions: bool = True) -> set[str]:
    """Absolute names of the modules that a file imports, with or without those imported when a function runs."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    found = set()
    pending: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names if module_file(f"{base}.{alias.name}")}
        elif isinstance(node, ast.FunctionDef) and not inside_functions:
            continue
        elif not is_type_checking(node):
            pending += ast.iter_child_nodes(node)
    return found


def third_party(modules: set[str]) -> set[str]:
    top = {module.split(".")[0] for module in modules} - {"hf_deqnar"} - sys.stdlib_module_names
    return {DISTRIBUTIONS.get(name, name).lower() for name in top}


def test_every_imported_package_is_declared():
    declared = DEPENDENCIES.union(*EXTRAS.values())
    for file in SOURCE.rglob("*.py"):
        undeclared = third_party(imported_modules(file)) - declared
        assert not undeclared, f"{file.relative_to(ROOT)} imports {undeclared}; declare them in pyproject.toml"


def test_translating_imports_only_the_dependencies():
    pending, done = list(ENTRY_POINTS), set()
    while pending:
        module = pending.pop()
        file = module_file(module)
        if module in done or file is None:
            continue
        done.add(module)
        modules = imported_modules(file, inside_functions=False)
        missing = third_party(modules) - DEPENDENCIES
        assert not missing, (
            f"{module} imports {missing} when it is imported, which pip install hf_deqnar does not bring"
        )
        pending += [name for name in modules if name.startswith("hf_deqnar")]
    assert "hf_deqnar.models.deqnar.modeling_deqnar" in done or "hf_deqnar.models.deqnar.text" in done


def test_every_extra_named_in_a_message_exists():
    for file in SOURCE.rglob("*.py"):
        for extra in re.findall(r"hf_deqnar\[(\w+)\]", file.read_text(encoding="utf-8")):
            assert extra in EXTRAS, f"{file.relative_to(ROOT)} names the extra {extra}"


def test_pinned_packages_are_dependencies():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0].lower() for line in lines if "==" in line}
    assert pinned <= DEPENDENCIES.union(*EXTRAS.values())


def test_the_version_is_stated_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hf_deqnar.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", hf_deqnar.__version__)


def test_the_declared_range_of_transformers_is_the_checked_one():
    oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST_TRANSFORMERS, FIRST_UNTESTED_TRANSFORMERS))
    assert f"transformers>={oldest},<{newest}" in PROJECT["project"]["dependencies"]
    pinned = re.search(r"^transformers==(\d+)\.(\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    assert OLDEST_TRANSFORMERS <= tuple(map(int, pinned.groups())) < FIRST_UNTESTED_TRANSFORMERS


def test_ruff_targets_the_oldest_python():
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=")
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")


@pytest.mark.parametrize("file", PROJECT["project"]["license-files"])
def test_license_files_exist(file):
    assert (ROOT / file).is_file()


def test_the_licence_of_the_weights_carries_the_attribution_of_their_card():
    card = (SOURCE / "pretrained" / "README.md").read_text(encoding="utf-8")
    licence = (ROOT / "LICENSE-WEIGHTS").read_text(encoding="utf-8")
    section = card.split("## Data and licence")[1].split("\n## ")[0]
    sources = re.findall(r"\((https://[^)]+)\)", section)
    assert sources
    for source in sources:
        assert source in licence
    assert re.search(r"^license: cc-by-2.0$", card, re.M)
    assert PROJECT["project"]["license"] == "Apache-2.0 AND CC-BY-2.0"

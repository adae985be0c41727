"""Manifest of an export; a folder whose files differ from its manifest is rejected."""

import hashlib
import json
from pathlib import Path
from typing import Any

from .. import __version__

MANIFEST = "deqnar_onnx.json"
FORMAT = 4  # incremented when graphs or their names change
PRECISIONS = ("fp32", "int8")
SHORTLIST = "shortlist.safetensors"
NGRAMS = "ngrams.safetensors"


def digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def write_manifest(folder: Path, precision: str, opset: int, limits: dict[str, int]) -> None:
    """List every file of the folder with its SHA-256."""
    files = {path.name: digest(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    manifest = {
        "format": FORMAT,
        "library": f"hf_deqnar {__version__}",
        "precision": precision,
        "opset": opset,
        "limits": limits,
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file in the folder, not a path to elsewhere.

    >>> [is_file_name(name) for name in ("head.onnx", "../head.onnx", "/head.onnx", "a\\\\b", "..", "")]
    [True, False, False, False, False, False]
    """
    return name not in ("", ".", "..") and not any(separator in name for separator in "/\\:\0")


def is_export(folder: str | Path) -> bool:
    return (Path(folder) / MANIFEST).is_file()


def contains_exports(folder: Path) -> bool:
    """Whether a folder was given to `hf-deqnar export`, so that its subfolders are exports."""
    return any(is_export(folder / precision) for precision in PRECISIONS)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder, after checking the SHA-256 of every file."""
    folder = Path(folder)
    if not is_export(folder):
        inside = [str(folder / precision) for precision in PRECISIONS if is_export(folder / precision)]
        advice = f"name {' or '.join(inside)}." if inside else "create one with hf-deqnar export."
        raise FileNotFoundError(f"{folder} is not an ONNX export, it has no {MANIFEST}; {advice}")
    again = "export the model again."
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        made_by, files = f"{manifest['library']} in format {manifest['format']}", manifest["files"]
        known = manifest["precision"] in PRECISIONS and {"source", "canvas"} <= manifest["limits"].keys()
        known = known and all(is_file_name(name) for name in files.keys())  # noqa: SIM118  (not of a list)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder / MANIFEST} is damaged; {again}") from error
    if manifest["format"] != FORMAT:
        raise ValueError(
            f"{folder} was made by {made_by}, but this is hf_deqnar {__version__}, format {FORMAT}; {again}"
        )
    if not known:
        raise ValueError(f"{folder / MANIFEST} is damaged; {again}")
    for name, expected in files.items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} is incomplete: {name} is missing; {again}")
        if digest(folder / name) != expected:
            raise ValueError(
                f"{folder / name} differs from the exported file: it is damaged or of another model; {again}"
            )
    return manifest

"""Work in pieces that processes share through a folder: claimed by locks, written whole or not at all.

A folder has a `manifest.json` that says what is made in it, `00000.jsonl` and so on for finished pieces, and for a
piece at work `00000.lock`.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from .files import check_writable, not_written, read_json, write_json, write_whole
from .locks import awaited, is_held

MANIFEST = "manifest.json"
MANIFEST_LOCK = "manifest.lock"


def folder_of(output: Path) -> Path:
    return Path(f"{output}.shards")


def check_origin(output: Path) -> None:
    """Refuse to write over a file that was made otherwise."""
    check_writable(output)
    if output.exists() and not (folder_of(output) / MANIFEST).is_file():
        raise FileExistsError(f"{output} exists and nothing says how it was made; choose another output or remove it.")


def begin(output: Path, manifest: dict[str, Any]) -> tuple[Path, str]:
    """Open the folder in which `output` is made; the folder, and the fingerprint of its manifest.

    The manifest says everything that decides the result. What was begun goes on only as it began; but if no piece was
    finished and nobody is at work, as after a start that failed, it begins anew.
    """
    check_origin(output)
    folder = folder_of(output)
    path = folder / MANIFEST
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise not_written(folder, error) from error
    manifest = json.loads(json.dumps(manifest))
    with awaited(folder / MANIFEST_LOCK):
        before = _read_manifest(path) if path.is_file() else None
        if before is not None and before != manifest:
            _check_nothing_made(output, before, manifest)
            _remove_leftovers(folder)
        if before != manifest:
            write_json(path, manifest)
    return folder, _fingerprint(manifest)


def check_still_ours(folder: Path, fingerprint: str) -> None:
    """For who holds the lock of a piece: until then, others could still begin anew with other settings."""
    with awaited(folder / MANIFEST_LOCK):
        if _fingerprint(_read_manifest(folder / MANIFEST)) != fingerprint:
            raise ValueError(f"Another run with other settings has begun in {folder}; choose another output.")


def _read_manifest(path: Path) -> dict[str, Any]:
    return read_json(path, remedy=f"choose another output or remove {path.parent}")


def _fingerprint(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]


def _check_nothing_made(output: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    folder = folder_of(output)
    at_work = (lock for lock in folder.glob("*.lock") if lock.name != MANIFEST_LOCK and is_held(lock))
    if not output.exists() and not any(folder.glob("*.jsonl")) and not any(at_work):
        return
    name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
    raise ValueError(
        f"{output} was begun with {name}={before.get(name)}, but now it is {now.get(name)}; choose another output, "
        f"go on as it began, or remove {folder}."
    )


def _remove_leftovers(folder: Path) -> None:
    """What a start that failed has left, a converted teacher say, is not for the next one."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (MANIFEST, MANIFEST_LOCK):
            path.unlink()


def write_shard(path: Path, fingerprint: str, rows: list[dict[str, Any]], **figures: Any) -> None:
    """A piece of work: a checksum, a line about it, and a line for every row."""
    header = {"fingerprint": fingerprint, "rows": len(rows), **figures}
    lines = [json.dumps(entry, ensure_ascii=False) for entry in (header, *rows)]
    write_whole(path, [_checksum(lines), *lines])


def read_shard(path: Path, fingerprint: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """What `write_shard` wrote: its figures and its rows. None if it is not there, not whole, or of other work."""
    try:
        checksum, *lines = path.read_text(encoding="utf-8").split("\n")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
    if not lines or lines.pop() != "" or checksum != _checksum(lines):
        return None
    header, *rows = map(json.loads, lines)
    return (header, rows) if header["fingerprint"] == fingerprint else None


def remove_unfinished(path: Path) -> None:
    """Remove what killed processes have left of a file; only for who holds its lock."""
    for unfinished in path.parent.glob(f"{path.name}.*.unfinished"):
        unfinished.unlink(missing_ok=True)


def _checksum(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()

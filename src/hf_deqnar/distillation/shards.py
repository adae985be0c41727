"""A folder of shards that several processes fill together: locked while in progress and written atomically.

The folder contains `manifest.json` with the settings, `00000.jsonl` and so on for finished shards, and `00000.lock` for
a shard in progress. The `datasets` library writes shards too, but cannot resume a `map` that was killed, and does not
let several jobs share one.
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, NoReturn

from ..utils.files import check_writable, read_json, write_atomically, write_error, write_json
from ..utils.locks import is_locked, wait_for_lock

MANIFEST = "manifest.json"
MANIFEST_LOCK = "manifest.lock"


def shard_folder(output: Path) -> Path:
    """Folder of the shards of an output file."""
    return Path(f"{output}.shards")


def check_output(output: Path) -> None:
    """Raise if `output` cannot be written, or exists without the folder of its shards."""
    check_writable(output)
    if output.exists() and not (shard_folder(output) / MANIFEST).is_file():
        raise FileExistsError(
            f"{output} exists but was not written by this command; choose another output or remove it."
        )


def open_folder(output: Path, manifest: dict[str, Any]) -> tuple[Path, str]:
    """Create or reopen the folder of the shards of `output`; returns the folder and the fingerprint of its manifest.

    Resuming requires an identical manifest. A different one is accepted only if no shard is finished or in progress, as
    after a failed start; the folder is then cleared.

    Args:
        output: the file that is made from the shards.
        manifest: everything that determines the result.
    """
    check_output(output)
    folder = shard_folder(output)
    path = folder / MANIFEST
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise write_error(folder, error) from error
    manifest = json.loads(json.dumps(manifest))
    with wait_for_lock(folder / MANIFEST_LOCK):
        previous = _read_manifest(path) if path.is_file() else None
        if previous is not None and previous != manifest:
            _check_unused(output, previous, manifest)
            _clear(folder)
        if previous != manifest:
            write_json(path, manifest)
    return folder, fingerprint_of_manifest(manifest)


def check_manifest(folder: Path, fingerprint: str) -> None:
    """Raise if another process has replaced the manifest.

    Called with the lock of a shard acquired: from then on no other process can replace it.

    Args:
        folder: of the shards.
        fingerprint: of the manifest that this process opened the folder with.
    """
    with wait_for_lock(folder / MANIFEST_LOCK):
        if fingerprint_of_manifest(_read_manifest(folder / MANIFEST)) != fingerprint:
            raise ValueError(f"Another run with other settings has started in {folder}; choose another output.")


def _read_manifest(path: Path) -> dict[str, Any]:
    return read_json(path, remedy=f"choose another output or remove {path.parent}")


def fingerprint_of_manifest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]


def _check_unused(output: Path, previous: dict[str, Any], manifest: dict[str, Any]) -> None:
    folder = shard_folder(output)
    in_progress = (lock for lock in folder.glob("*.lock") if lock.name != MANIFEST_LOCK and is_locked(lock))
    if not output.exists() and not any(folder.glob("*.jsonl")) and not any(in_progress):
        return
    refuse_other_settings(output, folder, previous, manifest)


def refuse_other_settings(
    output: Path | str, folder: Path | str, previous: dict[str, Any], manifest: dict[str, Any]
) -> NoReturn:
    """Raise the error for a manifest that differs from that of the finished shards."""
    name = next(name for name in {**manifest, **previous} if previous.get(name) != manifest.get(name))
    raise ValueError(
        f"{output} was started with {name}={previous.get(name)}, but now it is {manifest.get(name)}; choose another "
        f"output, resume with the same settings, or remove {folder}."
    )


def _clear(folder: Path) -> None:
    """Remove the files of a failed start, such as a converted teacher."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (MANIFEST, MANIFEST_LOCK):
            path.unlink()


def write_shard(path: Path, fingerprint: str, rows: list[dict[str, Any]], **figures: Any) -> None:
    """Write a shard.

    Args:
        path: of the shard.
        fingerprint: of the manifest.
        rows: the translations.
        figures: further entries of the header.
    """
    write_atomically(path, shard_lines(fingerprint, rows, **figures))


def shard_lines(fingerprint: str, rows: list[dict[str, Any]], **figures: Any) -> list[str]:
    """The lines of a shard: a checksum, a header and one line per row."""
    header = {"fingerprint": fingerprint, "rows": len(rows), **figures}
    lines = [json.dumps(entry, ensure_ascii=False) for entry in (header, *rows)]
    return [_checksum(lines), *lines]


def read_shard(path: Path, fingerprint: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Header and rows of a shard; None if it is missing, damaged, or has another fingerprint.

    Args:
        path: of the shard.
        fingerprint: of the manifest.
    """
    try:
        return parse_shard(path.read_bytes(), fingerprint)
    except FileNotFoundError:
        return None


def parse_shard(content: bytes, fingerprint: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Header and rows of a shard from the content of its file; None if it is damaged or has another fingerprint."""
    try:
        checksum, *lines = content.decode("utf-8").split("\n")
    except UnicodeDecodeError:
        return None
    if not lines or lines.pop() != "" or checksum != _checksum(lines):
        return None
    header, *rows = map(json.loads, lines)
    return (header, rows) if header["fingerprint"] == fingerprint else None


def remove_unfinished(path: Path) -> None:
    """Remove temporary files that killed processes left beside `path`; the caller must have acquired its lock."""
    for unfinished in path.parent.glob(f"{path.name}.*.unfinished"):
        unfinished.unlink(missing_ok=True)


def _checksum(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode("utf-8")).hexdigest()

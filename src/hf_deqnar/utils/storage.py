"""Files at addresses such as `s3://bucket/train.jsonl.gz`, through fsspec.

    local path               train.jsonl, or file:///data/train.jsonl
    Amazon S3, MinIO, …      s3://bucket/train.jsonl   (pip install 'hf_deqnar[s3]')
    others                   every protocol of fsspec whose package is installed, such as gs:// or hf://

Objects are read and written as a whole: on object stores an object appears when it is complete, and local files are
written beside their place and renamed.
"""

import contextlib
import posixpath
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import renamed, write_error

EXTRAS = {"s3": "s3", "s3a": "s3"}  # extra of this package by protocol


def is_address(path: str | Path) -> bool:
    """Whether a path has a protocol. (`Path` would remove one of its slashes.)

    >>> is_address("s3://bucket/train.jsonl"), is_address("data/train.jsonl")
    (True, False)
    """
    return isinstance(path, str) and "://" in path


@dataclass(frozen=True)
class Store:
    """The objects whose names begin with an address."""

    address: str

    def __post_init__(self) -> None:
        protocol = self.address.partition("://")[0]
        try:
            from fsspec.core import url_to_fs

            system, root = url_to_fs(self.address, use_listings_cache=False)
        except ImportError as error:
            extra = EXTRAS.get(protocol)
            remedy = f"pip install 'hf_deqnar[{extra}]'" if extra else str(error)
            raise ImportError(f"Addresses such as {self.address} need another package: {remedy}.") from error
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.address} cannot be used: {error}") from error
        object.__setattr__(self, "_system", system)
        object.__setattr__(self, "_root", root)

    @property
    def system(self) -> Any:
        """The fsspec file system."""
        return self._system  # type: ignore[attr-defined]

    def path(self, name: str) -> str:
        """Path of an object on the file system; an empty name is the address itself."""
        root: str = self._root  # type: ignore[attr-defined]
        return posixpath.join(root, name) if name else root

    def read(self, name: str = "") -> bytes | None:
        """The content of an object; None if there is none."""
        try:
            with _reaching(self.address):
                return self.system.cat_file(self.path(name))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def write(self, content: bytes, name: str = "") -> None:
        """Write an object; a reader sees all of it or nothing."""
        path = self.path(name)
        if self.system.protocol == "file" or "file" in self.system.protocol:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with renamed(Path(path)) as file:
                file.write(content)
            return
        try:
            with _reaching(self.address):
                self.system.pipe_file(path, content)
        except OSError as error:
            raise write_error(f"{self.address}/{name}".rstrip("/"), error) from error

    def exists(self, name: str = "") -> bool:
        """Whether there is an object."""
        with _reaching(self.address):
            return bool(self.system.isfile(self.path(name)))

    def names(self) -> list[str]:
        """Names of the objects that begin with the address and a slash, in order; without those in further folders."""
        try:
            with _reaching(self.address):
                found = self.system.ls(self.path(""), detail=False, refresh=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(posixpath.basename(path) for path in found)

    def remove(self, name: str = "") -> None:
        """Remove an object, if there is one."""
        with contextlib.suppress(FileNotFoundError), _reaching(self.address):
            self.system.rm_file(self.path(name))


def matching(address: str) -> list[str]:
    """The addresses that a pattern with `*` stands for, in order; an address without one as it is."""
    if "*" not in address:
        return [address]
    store = Store(address)
    with _reaching(address):
        found = sorted(store.system.glob(store.path("")))
    if not found:
        raise FileNotFoundError(f"There is nothing at {address}.")
    return [store.system.unstrip_protocol(path) for path in found]


@contextlib.contextmanager
def _reaching(address: str) -> Iterator[None]:
    """Replace the errors of a store's own library, such as missing credentials, by OSErrors that name the address."""
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:
        raise OSError(f"{address}: {error}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("botocore", "aiobotocore", "aiohttp", "gcsfs", "adlfs"):
            raise
        raise OSError(f"{address} cannot be reached: {' '.join(str(error).split())}") from error

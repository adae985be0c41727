"""Versions of other packages that this package works with."""

from importlib.metadata import PackageNotFoundError, version

# pyproject.toml declares the same range. Minor releases of transformers change internals that the models, the
# trainers and the pipeline use, so each one is tested before it is allowed.
OLDEST_TRANSFORMERS = (5, 22)
FIRST_UNTESTED_TRANSFORMERS = (5, 23)


def check_transformers(installed: str | None = None) -> None:
    """Raise ImportError unless the installed transformers is one of the tested versions.

    The version is read from the package metadata, so that transformers itself need not be imported.

    >>> check_transformers("5.22.1")
    >>> check_transformers("4.57.0")
    Traceback (most recent call last):
    ImportError: hf_deqnar needs transformers>=5.22,<5.23, but 4.57.0 is installed: pip install ...
    """
    needed = f"transformers>={_dotted(OLDEST_TRANSFORMERS)},<{_dotted(FIRST_UNTESTED_TRANSFORMERS)}"
    if installed is None:
        try:
            installed = version("transformers")
        except PackageNotFoundError as error:
            raise ImportError(f"hf_deqnar needs {needed}, but it is not installed: pip install '{needed}'") from error
    major, minor = installed.split(".")[:2]
    if not OLDEST_TRANSFORMERS <= (int(major), int(minor)) < FIRST_UNTESTED_TRANSFORMERS:
        raise ImportError(f"hf_deqnar needs {needed}, but {installed} is installed: pip install '{needed}'")


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

"""Errors for missing optional packages."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

TRACKERS = ("tensorboard", "trackio")  # of the extra "track"


@contextmanager
def requires_extra(extra: str, purpose: str) -> Iterator[None]:
    """Turn an ImportError into one that names the command that installs the extra.

    >>> with requires_extra("plot", "--plot"):
    ...     import matplotlib_is_missing
    Traceback (most recent call last):
        ...
    ImportError: --plot needs the package matplotlib_is_missing: pip install 'hf_deqnar[plot]'.
    """
    try:
        yield
    except ImportError as error:
        if "hf_deqnar[" in str(error):  # the function that needs the package has named its extra
            raise
        reason = str(error).partition(":")[0]  # such as "Using the `Trainer` requires `accelerate>=1.1.0`"
        name = missing_package(error)
        package = f"the package {name}" if name else f"more packages ({reason})"
        raise ImportError(f"{purpose} needs {package}: pip install 'hf_deqnar[{extra}]'.") from error


def missing_package(error: BaseException | None) -> str | None:
    """The name of the package whose import failed; transformers raises an error without a name from that error."""
    while error is not None and getattr(error, "name", None) is None:
        error = error.__cause__
    return error and error.name


def load_figure() -> type:
    """`matplotlib.figure.Figure`, which draws without a display."""
    with requires_extra("plot", "--plot"):
        from matplotlib.figure import Figure
    return Figure


def check_trackers(names: Iterable[str]) -> None:
    """Raise an ImportError for an experiment tracker of `--report_to` that is not installed."""
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise ImportError(f"--report_to {name} needs the package {name}: pip install 'hf_deqnar[track]'.")

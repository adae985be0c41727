"""Suggestions for mistyped names."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The most similar known name as the end of an error message; empty if none is similar.

    >>> did_you_mean("bach_size", ["batch_size", "device"])
    'did you mean batch_size?'
    >>> did_you_mean("colour", ["batch_size", "device"])
    ''
    """
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"did you mean {nearest[0]}?" if nearest else ""

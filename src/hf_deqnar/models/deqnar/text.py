"""Source text before it is tokenized: cleaning, task prefixes and the limit on its length."""

from typing import Any


def source_prefix(config: Any, source: str | None, target: str | None) -> str:
    """The prefix that a model expects before a text: T5 names its task in words, which its configuration lists."""
    tasks = getattr(config, "task_specific_params", None) or {}
    task = tasks.get(f"translation_{source}_to_{target}") or {}
    return task.get("prefix") or getattr(config, "prefix", None) or ""


def clean_text(text: str) -> str:
    """Control characters become spaces (a tokenizer has never seen them), and the ends are trimmed."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("A text is not valid Unicode: it holds half of a character, or bytes that are not UTF-8.")
    return "".join(" " if ord(character) < 32 or ord(character) == 127 else character for character in text).strip()


def longest_source(config: Any) -> int | None:
    """Most tokens of a source text; None if the configuration does not limit them."""
    own = getattr(config, "max_source_length", None)
    return getattr(config, "max_position_embeddings", None) if own is None else own


def check_length(tokens: int, config: Any) -> None:
    longest = longest_source(config)
    if longest is not None and tokens > longest:
        raise ValueError(f"A text of {tokens} tokens is too long, this model takes {longest}; split it into sentences.")

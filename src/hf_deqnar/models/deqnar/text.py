"""Source text before it is tokenized: cleaning, task prefixes and the limit on its length."""

from typing import Any


def source_prefix(config: Any, source: str | None, target: str | None) -> str:
    """The prefix that a model expects before a text, from its configuration, such as the task prefix of T5."""
    tasks = getattr(config, "task_specific_params", None) or {}
    task = tasks.get(f"translation_{source}_to_{target}") or {}
    return task.get("prefix") or getattr(config, "prefix", None) or ""


def clean_text(text: str) -> str:
    """Replace control characters by spaces, because tokenizers are trained without them, and strip the text."""
    return replace_controls(text).strip()


def replace_controls(text: str) -> str:
    """Replace each control character by a space, so that offsets remain valid."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("A text is not valid Unicode: it contains an unpaired surrogate, or bytes that are not UTF-8.")
    return "".join(" " if ord(character) < 32 or ord(character) == 127 else character for character in text)


def longest_source(config: Any) -> int | None:
    """Maximum number of source tokens; None if the configuration has no limit."""
    own = getattr(config, "max_source_length", None)
    return getattr(config, "max_position_embeddings", None) if own is None else own


def check_length(tokens: int, config: Any) -> None:
    longest = longest_source(config)
    if longest is not None and tokens > longest:
        raise ValueError(
            f"A text of {tokens} tokens is too long: this model supports {longest}; "
            "split it into sentences, or leave out split_sentences=False."
        )

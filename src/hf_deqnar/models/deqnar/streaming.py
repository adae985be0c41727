"""Streaming of intermediate drafts, and the state of the canvases during refinement."""

import difflib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from torch import Tensor


@dataclass
class Draft:
    """The prediction of a sentence after one evaluation."""

    tokens: Tensor
    residual: float | None


RESET, BOLD, DIM = "\033[0m", "\033[1m", "\033[2m"  # ANSI escape sequences


class TerminalStreamer:
    """Prints the draft after each evaluation that changes it, with its number, and then the translation.

    On a terminal, changed words are highlighted.

    >>> model.generate(**batch, streamer=TerminalStreamer(tokenizer))                      # doctest: +SKIP
    """

    def __init__(self, tokenizer: Any, stream: TextIO | None = None) -> None:
        self.tokenizer, self.stream = tokenizer, sys.stdout if stream is None else stream
        self.on_terminal = self.stream.isatty()
        self.evaluations = 0
        self.previous: list[str] | None = None

    def put_draft(self, value: Tensor, **rest) -> None:
        self.evaluations += 1
        words = self.words(value)
        if words != self.previous:
            self.write(str(self.evaluations), self.mark(words) if self.on_terminal else " ".join(words))
        self.previous = words

    def put(self, value: Tensor) -> None:
        self.write("=>", " ".join(self.words(value)))

    def end(self) -> None:
        self.evaluations, self.previous = 0, None

    def words(self, value: Tensor) -> list[str]:
        return self.tokenizer.decode(value.reshape(-1), skip_special_tokens=True).split()

    def mark(self, words: list[str]) -> str:
        """A draft is dimmed except for words that changed."""
        before = words if self.previous is None else self.previous
        parts = []
        for kind, _, _, first, last in difflib.SequenceMatcher(None, before, words, autojunk=False).get_opcodes():
            parts += [f"{DIM if kind == 'equal' else BOLD}{word}{RESET}" for word in words[first:last]]
        return " ".join(parts)

    def write(self, label: str, text: str) -> None:
        self.stream.write(f"{label:>4}  {text}\n")
        self.stream.flush()


@dataclass
class Candidates:
    """All canvases of a batch during refinement."""

    sentence: Tensor  # candidates: index of the sentence of each candidate
    canvas: Tensor  # candidates, positions: tokens of the injected canvas
    mask: Tensor  # candidates, positions
    tokens: Tensor  # candidates, positions: predicted tokens
    scores: Tensor | None  # candidates, positions: log-probability of each token; None if not requested
    nfe: Tensor  # candidates
    residual: Tensor | None = None
    converged: Tensor | None = None
    log_probs: Tensor | None = None  # candidates, positions, vocabulary; for a beam search
    log_links: Tensor | None = None  # candidates, positions, positions; of a graph
    forced: dict[int, list[list[int]]] | None = None  # candidate: the terms that its text must contain
    masked_chances: Tensor | None = None  # candidates, positions: P(z_i is masked | X); for input sampling


class DraftReader:
    """Observer of a solve: predicts tokens after every evaluation, to stream or collect them or to stop stable rows."""

    def __init__(
        self,
        config: Any,
        length_model: Any,
        candidates: Candidates,
        options: Any,
        streamer: Any,
        read: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """
        Args:
            read: rows and their features → tokens.
        """
        self.candidates, self.length_model, self.read = candidates, length_model, read
        self.mask_token = config.mask_token_id
        self.patience, self.streamer = options.stop_on_stable_tokens, streamer
        self.lengths = candidates.mask.sum(dim=1)
        self.tokens = torch.full_like(candidates.canvas, -1)
        self.stable = torch.zeros_like(candidates.nfe)
        self.drafts: list[list[Draft]] | None = [[] for _ in self.lengths] if options.output_trajectory else None

    def __call__(self, rows: Tensor, value: Tensor, residual: Tensor | None) -> Tensor | None:
        tokens = self.read(rows, value)
        width = tokens.shape[1]
        known = self.candidates.canvas[rows, :width] != self.mask_token
        tokens = torch.where(known, self.candidates.tokens[rows, :width], tokens)
        inside = torch.arange(width, device=tokens.device)[None] < self.lengths[rows, None]
        same = ((tokens == self.tokens[rows, :width]) | ~inside).all(dim=1)
        self.tokens[rows, :width] = tokens
        self.stable[rows] = torch.where(same, self.stable[rows] + 1, 0)
        for place, row in enumerate(rows.tolist()):
            draft = self.text(tokens[place, : int(self.lengths[row])]).cpu()
            if self.drafts is not None:
                self.drafts[row].append(Draft(draft, None if residual is None else float(residual[place])))
            if row == 0 and self.streamer is not None and hasattr(self.streamer, "put_draft"):
                self.streamer.put_draft(value=draft)
        return None if self.patience is None else self.stable[rows] >= self.patience

    def text(self, tokens: Tensor) -> Tensor:
        """The text tokens of one row."""
        mask = torch.ones_like(tokens, dtype=torch.bool)[None]
        return tokens[self.length_model.text_positions(tokens[None], mask, merge_repetitions=False)[0]]

    def restart(self) -> None:
        """Reset the counts of stable evaluations for a new pass."""
        self.tokens.fill_(-1)
        self.stable.zero_()


__all__ = ["Draft", "TerminalStreamer"]

"""Estimates of the quality of translations, from what `generate` computes anyway.

The quality of a translation is the chrF / 100 that is expected of it: σ(b + w·x) for its features x. The quality of a
word is the probability that a reference has it: σ(c + v·(s, w·x + b)) for the smallest log-probability s of its tokens.
`hf-deqnar calibrate` fits the parameters, which are the option `quality` in the generation config of a model. The same
option has the log-probabilities of source tokens, which tell whether a text is in the source language.
"""

import base64
import re
from typing import Any

import torch
from torch import Tensor

from .ctc import starts_of_runs, viterbi_path

# What is known of a translation, in the order of the weights.
FEATURES = (
    "mean log-probability of the tokens",
    "smallest log-probability of a token",
    "mean log-probability of the canvas",
    "excess of log(target tokens / source tokens) over the usual value",
    "lack of it",
    "mean log-probability of the source tokens in the source language",
    "share of the source tokens that are rare in it",
    "log(source tokens)",
    "whether the solve has not converged",
)
KEYS = ("sentence", "word", "usual_log_ratio", "source_log_probs", "rare", "unfamiliar")
LEAST = -20.0  # log-probabilities are clamped, so that one of −∞ does not decide alone
FEWEST_TOKENS = 5  # of a text whose language is judged


def check_quality(quality: Any) -> None:
    """Raise ValueError if the option `quality` is not one that `hf-deqnar calibrate` has written."""
    if quality is None:
        return
    remedy = "fit it with hf-deqnar calibrate, or leave it unset."
    if not isinstance(quality, dict) or set(quality) != set(KEYS):
        raise ValueError(f"quality must be unset or a dictionary with {', '.join(KEYS)}; {remedy}")
    if len(quality["sentence"]) != len(FEATURES) + 1 or len(quality["word"]) != 3:
        raise ValueError(f"quality has {len(quality['sentence'])} and {len(quality['word'])} parameters; {remedy}")


def pack_log_probs(log_probs: Tensor) -> str:
    """Log-probabilities of all tokens as text: a byte each, the multiple of −0.1, in base 64.

    >>> unpack_log_probs(pack_log_probs(torch.tensor([-0.31, -25.5, -99.0])))
    tensor([ -0.3000, -25.5000, -25.5000])
    """
    return base64.b64encode(bytes((log_probs * -10).round().clamp(0, 255).to(torch.uint8).tolist())).decode()


def unpack_log_probs(packed: str) -> Tensor:
    """Log-probabilities by token."""
    return torch.tensor(list(base64.b64decode(packed))) / -10


class Familiarity:
    """Log-probabilities of source tokens, each by itself, in the source language."""

    def __init__(self, quality: dict[str, Any]) -> None:
        self.log_probs = unpack_log_probs(quality["source_log_probs"])
        self.rare, self.unfamiliar = quality["rare"], quality["unfamiliar"]

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Log-probability of every token; tokens that were added since then are as rare as the rarest."""
        known = tokens < len(self.log_probs)
        found = self.log_probs.to(tokens.device)[tokens.clamp_max(len(self.log_probs) - 1)]
        return torch.where(known, found, self.log_probs.min())

    def is_unfamiliar(self, tokens: Tensor) -> bool:
        """Whether a text with these tokens does not look like the source language.

        The mean log-probability of n tokens is compared with μ + c / √n: means of few tokens vary more.
        """
        usual, deviation = self.unfamiliar
        count = len(tokens)
        return count >= FEWEST_TOKENS and float(self.of_tokens(tokens).mean()) < usual + deviation / count**0.5


def token_log_probs(candidates: Any, selected: Tensor, texts: Tensor, padding: int, blank: int) -> Tensor | None:
    """Log-probability of every token of texts from a beam: that of its first position on the likeliest path.

    Args:
        candidates: the canvases, with the log-probabilities of all tokens; None is returned if there are none.
        selected: the candidate of each text.
        texts: tokens, padded.
    """
    if candidates.log_probs is None:
        return None
    lengths, canvas_lengths = (texts != padding).sum(dim=1), candidates.mask.sum(dim=1)[selected]
    log_probs = candidates.log_probs[selected]
    path, _ = viterbi_path(log_probs, texts, canvas_lengths, lengths, blank)
    starts = starts_of_runs(path, canvas_lengths) & (path != blank) & candidates.mask[selected]
    scores = log_probs.gather(2, path[:, :, None])[:, :, 0]
    found = torch.full(texts.shape, LEAST, device=texts.device)
    for row in range(len(texts)):  # a text that does not fit on the canvas has no path
        emitted = scores[row][starts[row]][: texts.shape[1]]
        found[row, : len(emitted)] = emitted
    return found.masked_fill(texts == padding, 0.0)


def features_of(
    token_scores: Tensor,
    real: Tensor,
    canvas_scores: Tensor,
    canvas_mask: Tensor,
    source: Tensor,
    source_mask: Tensor,
    converged: Tensor | None,
    quality: dict[str, Any],
) -> Tensor:
    """`FEATURES` of every text: (rows, features).

    Args:
        token_scores: log-probabilities of the tokens of the texts, at `real` positions.
        canvas_scores: log-probability of the likeliest token of every position of the canvases.
        source: source tokens.
        converged: of the solves; None for models that seek no equilibrium.
        quality: the option, of which only what does not belong to the weights is used.
    """
    familiarity = Familiarity(quality)
    counts, source_counts = real.sum(dim=1), source_mask.sum(dim=1)
    token_scores = token_scores.clamp(LEAST, 0)
    empty = counts == 0
    mean = (token_scores * real).sum(dim=1) / counts.clamp_min(1)
    least = token_scores.masked_fill(~real, 0).min(dim=1).values
    canvas = (canvas_scores.clamp(LEAST, 0) * canvas_mask).sum(dim=1) / canvas_mask.sum(dim=1).clamp_min(1)
    ratio = (counts.clamp_min(1) / source_counts).log() - quality["usual_log_ratio"]
    known = familiarity.of_tokens(source)
    rare = ((known < quality["rare"]) & source_mask).sum(dim=1) / source_counts
    moving = torch.zeros_like(mean) if converged is None else (~converged).to(mean.dtype)
    columns = [
        mean.masked_fill(empty, LEAST),
        least.masked_fill(empty, LEAST),
        canvas,
        ratio.clamp(0, 2),
        (-ratio).clamp(0, 2),
        (known * source_mask).sum(dim=1) / source_counts,
        rare,
        source_counts.to(mean.dtype).log(),
        moving,
    ]
    return torch.stack([column.float() for column in columns], dim=1)


def sentence_logits(features: Tensor, quality: dict[str, Any]) -> Tensor:
    """b + w·x."""
    bias, *weights = quality["sentence"]
    return features @ features.new_tensor(weights) + bias


def token_quality(logits: Tensor, token_scores: Tensor, quality: dict[str, Any]) -> Tensor:
    """σ(c + v·(s, l)) of every token, for its log-probability s and the logit l of its sentence."""
    bias, of_token, of_sentence = quality["word"]
    return (bias + of_token * token_scores.clamp(LEAST, 0) + of_sentence * logits[:, None]).sigmoid()


def words_of(tokenizer: Any, tokens: list[int]) -> tuple[str, list[tuple[int, int, list[int]]]]:
    """The text of some tokens, and for each of its words the offsets and the indices of its tokens."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    ends = [len(tokenizer.decode(tokens[: index + 1], skip_special_tokens=True)) for index in range(len(tokens))]
    starts = [0, *ends[:-1]]
    lead = len(text) - len(text.lstrip())
    words = []
    for match in re.finditer(r"\S+", text):
        own = [
            index
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
            if min(end, match.end()) > max(start, match.start())
        ]
        words.append((match.start() - lead, match.end() - lead, own))
    return text.strip(), words


__all__ = ["FEATURES", "Familiarity", "check_quality", "pack_log_probs", "words_of"]

"""Translating for the page: drafts of every evaluation, residuals, alternatives and times."""

import math
import time
from dataclasses import dataclass
from typing import Any

from ..documents.sentences import shorten, split
from ..documents.translation import Request
from ..documents.translator import Translator
from ..models.deqnar.configuration_deqnar import is_deqnar
from ..models.deqnar.text import clean_text


@dataclass
class Solve:
    """The translation of one sentence.

    Attributes:
        drafts: words after every evaluation.
        residuals: after every evaluation; empty for stacked models.
        alternatives: log-probability per token and text, the best first.
        quality: the estimate of the model, from 0 to 1; None for a model that `hf-deqnar calibrate` was not run on.
    """

    source: str
    drafts: list[list[str]]
    residuals: list[float]
    alternatives: list[tuple[float, str]]
    nfe: int
    converged: bool | None
    quality: float | None

    @property
    def text(self) -> str:
        return self.alternatives[0][1]


def sentences_of(text: str, translator: Translator) -> list[str]:
    """The sentences of a text."""
    parts = [part for sentence, _ in split(text) for part, _ in shorten(sentence, translator.fits)]
    return [part for part in map(clean_text, parts) if part]


def solve_all(translator: Translator, sentences: list[str], nbest: int, **options: Any) -> tuple[list[Solve], float]:
    """Translate sentences one by one; returns the solves, and the seconds that `generate` takes without drafts."""
    found, seconds = [], 0.0
    model, tokenizer = translator.model, translator.tokenizer
    if not is_deqnar(model.config):
        raise ValueError(f"The page shows the evaluations of a deqnar model, not of a {model.config.model_type} model.")
    for sentence in sentences:
        encoded = translator.encode(sentence)
        batch = {name: encoded[name].to(model.device) for name in ("input_ids", "attention_mask")}
        start = time.perf_counter()
        model.generate(**batch, **options)
        seconds += time.perf_counter() - start
        out = model.generate(
            **batch, **options, num_return_sequences=nbest, return_dict_in_generate=True, output_trajectory=True
        )
        texts = [text.strip() for text in tokenizer.batch_decode(out.sequences, skip_special_tokens=True)]
        alternatives: dict[str, float] = {}
        for text, score in zip(texts, out.sequences_scores.tolist(), strict=True):
            if math.isfinite(score) or not alternatives:
                alternatives.setdefault(text, score)
        drafts = out.trajectory[0]
        words = [tokenizer.decode(draft.tokens, skip_special_tokens=True).split() for draft in drafts]
        found.append(
            Solve(
                source=sentence,
                drafts=words,
                residuals=[draft.residual for draft in drafts if draft.residual is not None],
                alternatives=[(score, text) for text, score in alternatives.items()],
                nfe=int(out.nfe[0]),
                converged=None if out.converged is None else bool(out.converged[0]),
                quality=None if out.quality is None else float(out.quality[0]),
            )
        )
    return found, seconds


def compare(translator: Translator, sentences: list[str]) -> tuple[str, float]:
    """The translation by another model, and its seconds, one sentence at a time as for the first."""
    start = time.perf_counter()
    texts = [translator([Request(sentence)])[0] for sentence in sentences]
    return " ".join(texts), time.perf_counter() - start

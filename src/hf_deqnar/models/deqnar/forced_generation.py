"""Lexical constraints in `generate`: terms of `forced_tokens` are written onto the canvas, and the rest is solved."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .constraints import check_forced, contains_terms
from .ctc import collapse
from .generation_config_deqnar import DeqNarGenerationConfig
from .streaming import Candidates

if TYPE_CHECKING:
    from .refinement_deqnar import Source


class ForcedTokensMixin:
    """Part of `DeqNarGenerationMixin`. The searches for the best positions of terms are in `constraints.py`."""

    config: Any
    length_model: Any
    lay_out: Any
    solve: Any
    _logits: Any

    def check_forced_tokens(self, settings: DeqNarGenerationConfig, sentences: int) -> None:
        check_forced(settings.forced_tokens, sentences)
        self.length_model.forced_search([], None)  # not every length model has one
        if getattr(self, "lm_head", None) is None:
            raise ValueError("forced_tokens needs the model itself; an ONNX export cannot follow it.")
        if settings.input_sampling:
            raise ValueError("input_sampling=True and forced_tokens are mutually exclusive; set one of them.")
        if settings.shortlist:
            raise ValueError("shortlist=True and forced_tokens are mutually exclusive; set one of them.")

    def force_tokens(
        self, candidates: Candidates, source: "Source", features: Tensor, settings: DeqNarGenerationConfig
    ) -> None:
        """Write the terms of `forced_tokens` onto the canvases where they are most likely, and solve again.

        Every other position is predicted given the terms. Candidates without terms are not changed.
        """
        terms = {index: settings.forced_tokens[row] for index, row in enumerate(candidates.sentence.tolist())}
        candidates.forced = {index: found for index, found in terms.items() if found}
        if not candidates.forced:
            return
        rows = torch.tensor(sorted(candidates.forced), device=features.device)
        lengths = candidates.mask[rows].sum(dim=1).tolist()
        log_probs = self._logits(features[rows], None).log_softmax(dim=-1)
        path, known = self._forced_paths(log_probs, rows, lengths, candidates, settings)
        canvas = torch.where(
            known, path, candidates.canvas[rows].masked_fill(candidates.mask[rows], self.config.mask_token_id)
        )
        part = source.select(rows)
        limits = {"max_nfe": settings.max_nfe, "tol": settings.tol, "solver": settings.solver}
        found = self.solve(part, self.lay_out(part, tokens=canvas), **limits)
        log_probs = self._logits(found.value, None).log_softmax(dim=-1)
        # Scores are those of the other tokens given the terms, which have probability 1: products with those of
        # unlikely terms could underflow in a beam search.
        log_probs = fix_known_tokens(log_probs, path, torch.zeros_like(log_probs[..., 0]), ~known)
        path, _ = self._forced_paths(log_probs, rows, lengths, candidates, settings)
        candidates.tokens = candidates.tokens.index_copy(0, rows, path)
        if candidates.scores is not None:
            chosen = log_probs.gather(2, path[..., None])[..., 0]
            candidates.scores = candidates.scores.index_copy(0, rows, chosen.to(candidates.scores.dtype))
        if candidates.log_probs is not None:
            candidates.log_probs = candidates.log_probs.index_copy(0, rows, log_probs)
        candidates.nfe = candidates.nfe.index_add(0, rows, found.nfe)
        if candidates.residual is not None and candidates.converged is not None:
            candidates.residual = candidates.residual.index_copy(0, rows, found.residual)
            candidates.converged = candidates.converged.index_copy(0, rows, found.converged)

    def _forced_paths(
        self,
        log_probs: Tensor,
        rows: Tensor,
        lengths: list[int],
        candidates: Candidates,
        settings: DeqNarGenerationConfig,
    ) -> tuple[Tensor, Tensor]:
        """The most likely tokens with the terms, and which of them belong to a term, both (rows, canvas)."""
        path = candidates.tokens[rows].clone()
        known = torch.zeros_like(path, dtype=torch.bool)
        assert candidates.forced is not None
        for place, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            search = self.length_model.forced_search(candidates.forced[row], settings.word_starts)
            found = search(log_probs[place, :length])
            if found is None:
                raise ValueError(
                    f"The terms of forced_tokens do not fit on a canvas of {length} positions; force fewer."
                )
            path[place, :length], known[place, :length] = (torch.tensor(values, device=path.device) for values in found)
        return path, known

    def select_forced(
        self,
        candidates: Candidates,
        tokens: Tensor,
        counts: Tensor,
        ranking: Tensor,
        log_probs: Tensor,
        settings: DeqNarGenerationConfig,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Texts of a beam without the terms of `forced_tokens` get −∞; if no text has them, the best path is taken."""
        padding, blank = self.config.pad_token_id, self.config.blank_token_id
        assert candidates.forced is not None
        for row, terms in candidates.forced.items():
            texts = [text[:count] for text, count in zip(tokens[row].tolist(), counts[row].tolist(), strict=True)]
            valid = torch.tensor([contains_terms(text, terms, settings.word_starts) for text in texts])
            valid &= ranking[row].cpu() > float("-inf")
            if not valid.any():
                length = int(candidates.mask[row].sum())
                path = candidates.tokens[row : row + 1, :length]
                text, count = collapse(path, torch.tensor([length], device=path.device), blank, padding)
                tokens = functional.pad(tokens, (0, max(0, text.shape[1] - tokens.shape[2])), value=padding)
                tokens[row, 0], counts[row, 0] = padding, count[0]
                tokens[row, 0, : text.shape[1]] = text[0]
                of_tokens = candidates.log_probs[row, :length]  # type: ignore[index]  # of a beam search
                log_probs[row, 0] = of_tokens.gather(1, path[0][:, None]).sum()  # at most log p of the text
                ranking[row, 0] = log_probs[row, 0] / count[0].clamp_min(1)
                valid[0] = True
            dropped = ~valid.to(ranking.device)
            for figures in (ranking, log_probs):
                figures[row] = figures[row].masked_fill(dropped, float("-inf"))
        return tokens, counts, ranking, log_probs


def fix_known_tokens(log_probs: Tensor, tokens: Tensor, scores: Tensor, masked: Tensor) -> Tensor:
    """Known tokens keep their score and have no alternatives, so that a beam does not change them."""
    only = torch.full_like(log_probs, float("-inf")).scatter(2, tokens[..., None], scores[..., None])
    return torch.where(masked[..., None], log_probs, only)

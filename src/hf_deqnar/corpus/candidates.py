"""Data for Dynamic KD: several targets for every sentence, and how near they are to each other (MPLE paper, app. F).

A line of such a file is {"en": source, "de": raw target, "candidates": [of teacher 1, of teacher 2, …, raw target]};
`hf-deqnar distill` writes it when it is given several teachers.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..pipeline_deqnar import clean_text
from .evaluation import sentence_bleu
from .reading import Pair, read_parallel
from .tokenized import KEPT, TokenizedPairs, cleaned, fate_of, fingerprint_of, map_once, rules_of, target_ids, usable

COLUMN = "candidates"
GRID = tuple(round(0.1 * step, 1) for step in range(1, 31))


@dataclass
class TokenizedCandidates(TokenizedPairs):
    """As `TokenizedPairs`; the data set also has `candidates` and `similarity`, S(Γ_i, Γ_j) of every pair of them."""

    replaced: int = 0  # candidates that could not be used, in whose place the raw target stands


def read_candidates(path: str | Path, source: str, target: str) -> tuple[list[Pair], list[list[str]]]:
    """The pairs of a file with their raw targets, and the candidates of each; every line must have as many."""
    pairs = read_parallel(path, source, target)
    try:
        candidates = [pair.references for pair in read_parallel(path, source, COLUMN)]
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"Dynamic KD chooses among candidates, and {path} has none ({error}); hf-deqnar distill with several "
            "teachers writes such a file."
        ) from error
    for number, several in enumerate(candidates, start=1):
        if len(several) != len(candidates[0]):
            raise ValueError(f"{path}: pair {number} has {len(several)} candidates but the first {len(candidates[0])}.")
    return pairs, candidates


def tokenize_candidates(
    pairs: list[Pair],
    candidates: list[list[str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    canvas: int | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
) -> TokenizedCandidates:
    """Pairs with all candidates as token ids, and the sentence BLEU of every two of them.

    A pair is left out, as by `tokenize_pairs`, if its raw target cannot be used. A candidate that cannot be, being
    empty or too long, is replaced by the raw target and counted.

    Args:
        cache: as for `tokenize_pairs`; what is slow here is BLEU, which is so computed once.
        processes: how many share that.
    """
    texts = {
        "source": cleaned(pair.source for pair in pairs),
        "target": cleaned(pair.references[0] for pair in pairs),
        COLUMN: [list(map(clean_text, several)) for several in candidates],
    }

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        columns: dict[str, list] = {name: [] for name in ("input_ids", "labels", COLUMN, "similarity", "fate")}
        columns["replaced"] = []
        for source, target, several in zip(*(batch[name] for name in texts), strict=True):
            input_ids = tokenizer(source)["input_ids"]
            labels, *tokens = target_ids(tokenizer, [target, *several])
            usable_ones = [
                fate_of(source, text, input_ids, ids, max_length, canvas) == KEPT
                for text, ids in zip(several, tokens, strict=True)
            ]
            several = [text if fits else target for text, fits in zip(several, usable_ones, strict=True)]
            row = {"input_ids": input_ids, "labels": labels, "replaced": usable_ones.count(False)}
            row[COLUMN] = [ids if fits else labels for ids, fits in zip(tokens, usable_ones, strict=True)]
            row["fate"] = fate_of(source, target, input_ids, labels, max_length, canvas)
            row["similarity"] = pairwise_bleu(several)
            for name, value in row.items():
                columns[name].append(value)
        return columns

    settings = [COLUMN, str(max_length), str(canvas), rules_of(tokenizer)]
    written = (
        text for row in zip(*texts.values(), strict=True) for text in (row[0], row[1], str(len(row[2])), *row[2])
    )
    fingerprint = fingerprint_of([*settings, *written])
    tokenized = map_once(
        texts, tokenize, fingerprint, cache, description="tokenizing, and comparing candidates", processes=processes
    )
    found = usable(tokenized, max_length, fingerprint)
    replaced = sum(found.dataset["replaced"])
    return TokenizedCandidates(found.dataset.remove_columns("replaced"), found.left_out, fingerprint, replaced)


def pairwise_bleu(texts: list[str]) -> list[list[float]]:
    """S(Γ_i, Γ_j) at [i][j]: the sentence BLEU, 0 to 100, of text j with text i as the reference."""
    different = list(dict.fromkeys(texts))
    scores = dict(zip(different, sentence_bleu(different, [different] * len(different)), strict=True))
    place = {text: number for number, text in enumerate(different)}
    return [[scores[text][place[reference]] for text in texts] for reference in texts]


@dataclass
class TunedGamma:
    """γ, what it leaves of the real distortion, what equal weights leave, and on how many sentences that was seen."""

    gamma: tuple[float, ...]
    distortion: float
    distortion_of_ones: float
    sentences: int


def tune_gamma(candidates: list[list[str]], references: list[list[str]], grid: Sequence[float] = GRID) -> TunedGamma:
    """The γ under which the candidate nearest to the other candidates is nearest to real translations (appendix F).

    Minimises −E[S(Y, T)] with T = argmax_j Σ_i γ_i·S(Γ_i, Γ_j) over the values of `grid`: from ones, one weight at a
    time takes its best value, until none gets better. (The paper searches by hand.) β and L_NAT play no part.

    Args:
        candidates: of every sentence, the raw target last.
        references: real translations Y of every sentence. One that is the raw target says nothing about the others and
            does not count; sentences with no other are left out.
    """
    usable_rows = [
        (several, [text for text in real if text != several[-1]])
        for several, real in zip(candidates, references, strict=True)
    ]
    usable_rows = [(several, real) for several, real in usable_rows if real]
    if not usable_rows:
        raise ValueError("No sentence has a reference besides its raw target; tuning gamma needs several of them.")
    similarity = torch.tensor([pairwise_bleu(several) for several, _ in usable_rows], dtype=torch.float64)
    real_scores = torch.tensor(
        [
            [sum(scores) / len(scores) for scores in sentence_bleu(several, [real] * len(several))]
            for several, real in usable_rows
        ],
        dtype=torch.float64,
    )

    def distortion(gamma: Sequence[float]) -> float:
        nearness = torch.einsum("i,rij->rj", torch.tensor(gamma, dtype=torch.float64), similarity)
        return -real_scores.gather(1, nearness.argmax(dim=1, keepdim=True)).mean().item()

    gamma = [1.0] * similarity.shape[1]
    lowest = of_ones = distortion(gamma)
    improved = True
    while improved:
        improved = False
        for place, value in itertools.product(range(len(gamma)), grid):
            found = distortion([*gamma[:place], value, *gamma[place + 1 :]])
            if found < lowest - 1e-9:
                gamma[place], lowest, improved = value, found, True
    return TunedGamma(tuple(gamma), lowest, of_ones, len(usable_rows))

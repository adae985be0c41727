"""Data for Dynamic KD: several candidate targets per sentence and their similarities (MPLE paper, appendix F).

A line of such a file is {"en": source, "de": raw target, "candidates": [of teacher 1, of teacher 2, …, raw target]};
`hf-deqnar distill` with several teachers writes it.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from ..data.parallel_text import Pair, read_parallel
from ..data.tokenized_dataset import (
    VALID,
    CanvasLimit,
    TokenizedPairs,
    clean_texts,
    drop_reason,
    map_cached,
    select_valid,
    target_ids,
    tokenization_rules,
)
from ..evaluation.metrics import sentence_bleu
from ..models.deqnar.text import clean_text
from ..utils.fingerprints import fingerprint_of

COLUMN = "candidates"
GRID = tuple(round(0.1 * step, 1) for step in range(1, 31))


@dataclass
class TokenizedCandidates(TokenizedPairs):
    """`TokenizedPairs` with further columns `candidates` and `similarity`, S(Γ_i, Γ_j) of every two candidates."""

    replaced: int = 0  # number of invalid candidates, which were replaced by the raw target


def read_candidates(path: str | Path, source: str, target: str) -> tuple[list[Pair], list[list[str]]]:
    """Read sentence pairs with their raw targets, and the candidates of each pair.

    Args:
        path: of a file in which all lines have the same number of candidates.
        source, target: names of the columns.
    """
    pairs = read_parallel(path, source, target)
    try:
        candidates = [pair.references for pair in read_parallel(path, source, COLUMN)]
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(
            f"{path} has no candidates for Dynamic KD ({error}); hf-deqnar distill with several teachers writes such a "
            "file."
        ) from error
    for number, several in enumerate(candidates, start=1):
        if len(several) != len(candidates[0]):
            raise ValueError(
                f"{path}: pair {number} has {len(several)} candidates but the first has {len(candidates[0])}."
            )
    return pairs, candidates


def tokenize_candidates(
    pairs: list[Pair],
    candidates: list[list[str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    canvas: int | CanvasLimit | None = None,
    cache: str | Path | None = None,
    processes: int | None = None,
) -> TokenizedCandidates:
    """Tokenise pairs with all candidates, and compute the sentence BLEU of every two candidates.

    A pair is dropped, as by `tokenize_pairs`, if its raw target is invalid. An invalid candidate is replaced by the raw
    target and counted.

    Args:
        pairs: the corpus with its raw targets.
        candidates: of every pair.
        tokenizer, max_length, canvas, cache: as for `tokenize_pairs`.
        processes: number of processes that compute BLEU.
    """
    texts = {
        "source": clean_texts(pair.source for pair in pairs),
        "target": clean_texts(pair.references[0] for pair in pairs),
        COLUMN: [list(map(clean_text, several)) for several in candidates],
    }

    def tokenize(batch: dict[str, list]) -> dict[str, list]:
        columns: dict[str, list] = {name: [] for name in ("input_ids", "labels", COLUMN, "similarity", "drop_reason")}
        columns["replaced"] = []
        for source, target, several in zip(*(batch[name] for name in texts), strict=True):
            input_ids = tokenizer(source)["input_ids"]
            labels, *tokens = target_ids(tokenizer, [target, *several])
            valid = [
                drop_reason(source, text, input_ids, ids, max_length, canvas) == VALID
                for text, ids in zip(several, tokens, strict=True)
            ]
            several = [text if is_valid else target for text, is_valid in zip(several, valid, strict=True)]
            row = {"input_ids": input_ids, "labels": labels, "replaced": valid.count(False)}
            row[COLUMN] = [ids if is_valid else labels for ids, is_valid in zip(tokens, valid, strict=True)]
            row["drop_reason"] = drop_reason(source, target, input_ids, labels, max_length, canvas)
            row["similarity"] = pairwise_bleu(several)
            for name, value in row.items():
                columns[name].append(value)
        return columns

    settings = [COLUMN, str(max_length), str(canvas), tokenization_rules(tokenizer)]
    all_texts = (
        text for row in zip(*texts.values(), strict=True) for text in (row[0], row[1], str(len(row[2])), *row[2])
    )
    fingerprint = fingerprint_of([*settings, *all_texts])
    tokenized = map_cached(
        texts, tokenize, fingerprint, cache, description="tokenizing and comparing candidates", processes=processes
    )
    selected = select_valid(tokenized, max_length, fingerprint)
    replaced = sum(selected.dataset["replaced"])
    return TokenizedCandidates(selected.dataset.remove_columns("replaced"), selected.dropped, fingerprint, replaced)


def pairwise_bleu(texts: list[str]) -> list[list[float]]:
    """S(Γ_i, Γ_j) at [i][j]: the sentence BLEU, 0 to 100, of text j with text i as the reference."""
    distinct = list(dict.fromkeys(texts))
    scores = dict(zip(distinct, sentence_bleu(distinct, [distinct] * len(distinct)), strict=True))
    index = {text: number for number, text in enumerate(distinct)}
    return [[scores[text][index[reference]] for text in texts] for reference in texts]


@dataclass
class TunedGamma:
    """Result of `tune_gamma`."""

    gamma: tuple[float, ...]  # weight of every candidate
    distortion: float  # −E[S(Y, T)] with these weights
    distortion_of_equal_weights: float
    sentences: int  # number of sentences that were used


def tune_gamma(candidates: list[list[str]], references: list[list[str]], grid: Sequence[float] = GRID) -> TunedGamma:
    """Find the weights γ of Dynamic KD that minimise the real distortion (appendix F).

    Minimises −E[S(Y, T)] with T = argmax_j Σ_i γ_i·S(Γ_i, Γ_j) by coordinate descent over the values of `grid`, from
    ones. The paper searches by hand. β and L_NAT are not used.

    Args:
        candidates: of every sentence, the raw target last.
        references: real translations Y of every sentence. References equal to the raw target are ignored; sentences
            without any other are not used.
        grid: values of a weight.
    """
    rows = [
        (several, [text for text in real if text != several[-1]])
        for several, real in zip(candidates, references, strict=True)
    ]
    rows = [(several, real) for several, real in rows if real]
    if not rows:
        raise ValueError("No sentence has a reference besides its raw target; tuning gamma needs several references.")
    similarity = torch.tensor([pairwise_bleu(several) for several, _ in rows], dtype=torch.float64)
    real_scores = torch.tensor(
        [
            [sum(scores) / len(scores) for scores in sentence_bleu(several, [real] * len(several))]
            for several, real in rows
        ],
        dtype=torch.float64,
    )

    def distortion(gamma: Sequence[float]) -> float:
        weighted = torch.einsum("i,rij->rj", torch.tensor(gamma, dtype=torch.float64), similarity)
        return -real_scores.gather(1, weighted.argmax(dim=1, keepdim=True)).mean().item()

    gamma = [1.0] * similarity.shape[1]
    lowest = of_equal_weights = distortion(gamma)
    improved = True
    while improved:
        improved = False
        for index, value in itertools.product(range(len(gamma)), grid):
            found = distortion([*gamma[:index], value, *gamma[index + 1 :]])
            if found < lowest - 1e-9:
                gamma[index], lowest, improved = value, found, True
    return TunedGamma(tuple(gamma), lowest, of_equal_weights, len(rows))

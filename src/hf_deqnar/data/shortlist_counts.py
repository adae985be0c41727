"""Likely target tokens of every source token, for vocabulary shortlists (`models.deqnar.shortlist`).

They come from IBM model 1 (Brown et al. 1993). fast_align and eflomal are not used: they are programs that must be
compiled, and model 1 on token ids is twenty lines.
"""

from collections.abc import Sequence

import numpy
import torch
from tqdm import tqdm

from ..models.deqnar.modeling_deqnar import DeqNarForConditionalGeneration
from ..models.deqnar.shortlist import Shortlist

EM_ITERATIONS = 5  # p(t | s) changes little after them

Tokens = Sequence[Sequence[int]]


def learn_companions(sources: Tokens, targets: Tokens, vocabulary: int, size: int) -> numpy.ndarray:
    """The `size` most likely target tokens (companions) of every source token: an array of vocabulary × size.

    Uses the lexical translation probabilities p(t | s) of IBM model 1 (Brown et al. 1993), estimated by expectation
    maximisation on the sets of tokens of every pair. The first companion of a token is the token itself, because names
    are copied; a token with fewer companions is repeated in the remaining columns.

    Args:
        sources, targets: token ids of the pairs.
        vocabulary: number of tokens.
        size: number of companions of a token.
    """
    token, companion, _ = learn_probabilities(sources, targets, vocabulary)
    token, companion = token[token != companion], companion[token != companion]
    column = 1 + numpy.arange(len(token)) - numpy.searchsorted(token, token)
    table = numpy.repeat(numpy.arange(vocabulary)[:, None], size, axis=1)
    table[token[column < size], column[column < size]] = companion[column < size]
    return table


def learn_probabilities(
    sources: Tokens, targets: Tokens, vocabulary: int
) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Source tokens s, target tokens t and p(t | s) of IBM model 1, for all s and t that occur in a pair; sorted by s
    and falling p.
    """
    source, target, occurrence = _links(sources, targets)
    links, link_of = numpy.unique(source * vocabulary + target, return_inverse=True)
    probability = numpy.ones(len(links))
    for _ in tqdm(range(EM_ITERATIONS), desc="estimating p(t | s)", unit="iteration", delay=2, disable=None):
        weight = probability[link_of]
        weight /= numpy.bincount(occurrence, weight)[occurrence]
        count = numpy.bincount(link_of, weight)
        probability = count / numpy.bincount(links // vocabulary, count)[links // vocabulary]
    order = numpy.lexsort((-probability, links // vocabulary))
    return links[order] // vocabulary, links[order] % vocabulary, probability[order]


def _links(sources: Tokens, targets: Tokens) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Every source token with every target token of its pair, and the number of that occurrence of the target token.

    Links of the same occurrence are alternatives: IBM model 1 aligns a target token with one source token.
    """
    parts: list[tuple[numpy.ndarray, ...]] = []
    occurrences = 0
    pairs = list(zip(sources, targets, strict=True))
    for source_ids, target_ids in tqdm(pairs, desc="linking tokens", unit="pair", delay=2, disable=None):
        source, target = numpy.unique(source_ids), numpy.unique(target_ids)
        numbers = numpy.arange(occurrences, occurrences + len(target))
        parts.append(
            (numpy.tile(source, len(target)), numpy.repeat(target, len(source)), numpy.repeat(numbers, len(source)))
        )
        occurrences += len(target)
    source, target, numbers = (numpy.concatenate(part) for part in zip(*parts, strict=True))
    return source, target, numbers


def add_shortlist(
    model: DeqNarForConditionalGeneration, sources: Tokens, targets: Tokens, size: int, common: int
) -> None:
    """Add a vocabulary shortlist to a model.

    The end and blank tokens always belong to the common tokens.

    Args:
        model: changed in place.
        sources, targets: token ids of the training pairs.
        size: companions of every source token.
        common: number of the most frequent target tokens, which every sentence may use.
    """
    config = model.config
    if not 1 <= size <= config.vocab_size or not 1 <= common <= config.vocab_size:
        raise ValueError(f"size={size} and common={common} must be between 1 and the {config.vocab_size} tokens.")
    if len(sources) == 0:
        raise ValueError("There is no pair of sentences to learn a shortlist from.")
    frequency = numpy.bincount(
        numpy.concatenate([numpy.asarray(target) for target in targets]), minlength=config.vocab_size
    )
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = [token for token in (config.blank_token_id, *ends) if token is not None]
    if common < len(special):
        raise ValueError(f"common={common} is less than the number of special tokens, {len(special)}; raise it.")
    frequency[special] = frequency.sum()
    config.shortlist_size, config.shortlist_common = size, common
    shortlist = Shortlist(config)
    shortlist.companions.copy_(torch.from_numpy(learn_companions(sources, targets, config.vocab_size, size)))
    shortlist.common.copy_(torch.from_numpy(numpy.argsort(-frequency, kind="stable")[:common].copy()))
    model.model.shortlist = shortlist.to(model.device)

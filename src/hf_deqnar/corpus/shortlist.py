"""Learning which target tokens go with a source token, for `shortlist_deqnar`."""

from collections.abc import Sequence

import numpy
import torch

from ..modeling_deqnar import DeqNarForConditionalGeneration
from ..shortlist_deqnar import Shortlist

ROUNDS = 5  # of expectation maximisation; p(t | s) changes little after them

Tokens = Sequence[Sequence[int]]


def learn_companions(sources: Tokens, targets: Tokens, vocabulary: int, size: int) -> numpy.ndarray:
    """The `size` likeliest target tokens of every source token, itself first (a name stays): vocabulary × size.

    By IBM model 1 (Brown et al. 1993) on the sets of tokens of every pair: each target token has one source token,
    p(t | s) is how often t has s, and s is chosen among those of its sentence by p(t | s). A source token with fewer
    companions is itself in the places that are left.
    """
    source, target, choice = _links(sources, targets)
    kinds, kind = numpy.unique(source * vocabulary + target, return_inverse=True)
    probability = numpy.ones(len(kinds))
    for _ in range(ROUNDS):
        weight = probability[kind]
        weight /= numpy.bincount(choice, weight)[choice]
        count = numpy.bincount(kind, weight)
        probability = count / numpy.bincount(kinds // vocabulary, count)[kinds // vocabulary]
    order = numpy.lexsort((-probability, kinds // vocabulary))
    owner, companion = kinds[order] // vocabulary, kinds[order] % vocabulary
    owner, companion = owner[owner != companion], companion[owner != companion]
    place = 1 + numpy.arange(len(owner)) - numpy.searchsorted(owner, owner)
    table = numpy.repeat(numpy.arange(vocabulary)[:, None], size, axis=1)
    table[owner[place < size], place[place < size]] = companion[place < size]
    return table


def _links(sources: Tokens, targets: Tokens) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Every source token with every target token of its pair, and which of them exclude each other."""
    parts: list[tuple[numpy.ndarray, ...]] = []
    choices = 0
    for one, other in zip(sources, targets, strict=True):
        said, heard = numpy.unique(one), numpy.unique(other)
        which = numpy.arange(choices, choices + len(heard))
        parts.append((numpy.tile(said, len(heard)), numpy.repeat(heard, len(said)), numpy.repeat(which, len(said))))
        choices += len(heard)
    return tuple(numpy.concatenate(part) for part in zip(*parts, strict=True))


def add_shortlist(
    model: DeqNarForConditionalGeneration, sources: Tokens, targets: Tokens, size: int, common: int
) -> None:
    """Give a model a shortlist: `size` companions of every source token, and the `common` commonest target tokens.

    Special tokens are common whatever the data say; those that are never part of a text are left out when reading.
    """
    config = model.config
    if not 1 <= size <= config.vocab_size or not 1 <= common <= config.vocab_size:
        raise ValueError(f"size={size} and common={common} must be between 1 and the {config.vocab_size} tokens.")
    if len(sources) == 0:
        raise ValueError("There is no pair of sentences to learn a shortlist from.")
    frequency = numpy.bincount(numpy.concatenate([numpy.asarray(one) for one in targets]), minlength=config.vocab_size)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    special = [token for token in (config.blank_token_id, *ends) if token is not None]
    if common < len(special):
        raise ValueError(f"common={common} leaves no room for the {len(special)} special tokens; raise it.")
    frequency[special] = frequency.sum()
    config.shortlist_size, config.shortlist_common = size, common
    shortlist = Shortlist(config)
    shortlist.companions.copy_(torch.from_numpy(learn_companions(sources, targets, config.vocab_size, size)))
    shortlist.common.copy_(torch.from_numpy(numpy.argsort(-frequency, kind="stable")[:common].copy()))
    model.model.shortlist = shortlist.to(model.device)

"""Subword regularisation: random segmentations of BPE tokens, so that a model sees a word in several spellings.

A token is replaced by the two tokens it was merged from with a probability p, and each of these again with p, and so
on. As in BPE-dropout (Provilkov et al. 2020, https://arxiv.org/abs/1910.13267) rare pieces are trained and words are
composed of parts; here the standard segmentation is refined, so that texts need not be tokenised again. A segmentation
is determined by the seed, the epoch and the number of the pair: it does not depend on processes or on resuming.
"""

import json
import random
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

Merges = Mapping[int, tuple[int, int]]  # from a token to the two it was merged from


def merges_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, tuple[int, int]]:
    """The two parts of every token that BPE has merged, by token id.

    Args:
        tokenizer: a fast BPE tokenizer; an error for others, which have no merges.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE":
        raise ValueError(
            f"Subword regularisation needs a BPE tokenizer; {type(tokenizer).__name__} has no merges. Leave "
            "subword_dropout out, or train a tokenizer."
        )
    vocabulary = model["vocab"]
    merges: dict[int, tuple[int, int]] = {}
    for merge in model["merges"]:
        first, second = merge.split(" ") if isinstance(merge, str) else merge
        merges.setdefault(vocabulary[first + second], (vocabulary[first], vocabulary[second]))
    return merges


def split_tokens(tokens: Sequence[int], merges: Merges, probability: float, generator: random.Random) -> list[int]:
    """Replace every token by its two parts with a probability, recursively.

    Args:
        tokens: ids of a text.
        merges: from `merges_of`; tokens that are not in it, such as bytes and special tokens, are retained.
        probability: from 0 to 1.
        generator: of the random choices.

    >>> split_tokens([9, 7], {9: (7, 5), 7: (1, 2)}, 1.0, random.Random(0))
    [1, 2, 5, 1, 2]
    """
    stack, result = list(reversed(tokens)), []
    while stack:
        token = stack.pop()
        parts = merges.get(token)
        if parts is not None and generator.random() < probability:
            stack.extend(reversed(parts))
        else:
            result.append(token)
    return result

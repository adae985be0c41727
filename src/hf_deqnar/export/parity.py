"""Agreement of an export with its model, measured on sentences."""

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ..data.parallel_text import Pair
from ..evaluation.metrics import score
from ..evaluation.translation import Translations, encode_texts, translate_sentences
from ..models.deqnar.text import longest_source

# Default sentences, of several lengths. The language does not matter.
SENTENCES = (
    "Hello!",
    "She is reading a book.",
    "Where is the nearest train station?",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "The meeting was moved to Thursday, 14 May, because 3 of the 12 members could not come.",
    "If it rains tomorrow we will stay at home, play cards with the children, and cook something warm in the evening.",
)
# Minimum share of equal tokens of an fp32 export; rounding changes far fewer.
LEAST_AGREEMENT = 0.9


@dataclass
class Agreement:
    """Shares of equal sentences and of equal tokens in the translations of a model and its export."""

    sentences: float
    tokens: float


def agreement(expected: list[list[int]], actual: list[list[int]]) -> Agreement:
    """2·M / T with M tokens that match in order and T tokens in both, so that an insertion is one mismatch.

    >>> agreement([[1, 2, 3], [4]], [[1, 2, 3], [4]])
    Agreement(sentences=1.0, tokens=1.0)
    >>> agreement([[1, 2, 3]], [[9, 1, 2, 3]]).tokens.__round__(3)
    0.857
    """
    total = sum(map(len, expected)) + sum(map(len, actual))
    matched = sum(
        block.size
        for one, other in zip(expected, actual, strict=True)
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    )
    same = sum(one == other for one, other in zip(expected, actual, strict=True))
    return Agreement(same / len(expected), 2 * matched / total if total else 1.0)


def compare_systems(systems: dict[str, Any], tokenizer: Any, pairs: list[Pair], batch_size: int) -> dict[str, dict]:
    """Metrics of every system; the others are compared with the first, the model in torch.

    Args:
        pairs: sentences, with references (for BLEU) or without.
    """
    sources, model = [pair.source for pair in pairs], next(iter(systems.values()))
    found: dict[str, Translations] = {
        name: translate_sentences(system, tokenizer, sources, batch_size, show_progress=False)
        for name, system in systems.items()
    }
    tokens = {name: [tokenizer(text)["input_ids"] for text in one.texts] for name, one in found.items()}
    reference = next(iter(tokens.values()))
    figures = {}
    for name, one in found.items():
        near = agreement(reference, tokens[name])
        figures[name] = {"same_sentences": near.sentences, "same_tokens": near.tokens}
        figures[name]["mean_nfe"] = sum(one.nfe) / len(one.nfe)
        if getattr(systems[name], "sentence", None) is not None:
            figures[name]["same_tokens_sentence_graph"] = sentence_graph_agreement(
                model, systems[name], tokenizer, sources
            )
        if pairs[0].references:
            figures[name]["bleu"] = score(one, pairs)["bleu"]
    return figures


def sentence_graph_agreement(model: Any, export: Any, tokenizer: Any, sources: list[str]) -> float:
    """Share of equal tokens with two evaluations, one sentence at a time: the sentence graph of the export."""
    longest = longest_source(model.config)
    batches = [encode_texts(tokenizer, [text], longest)["input_ids"] for text in sources]
    found = ([system.generate(one, max_nfe=2)[0].tolist() for one in batches] for system in (model, export))
    return agreement(*found).tokens

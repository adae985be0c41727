"""Does an export say what its model says? Measured on sentences, and told as a table."""

from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from ..data.parallel_text import Pair
from ..evaluation.metrics import score
from ..evaluation.translation import Translations, encode_texts, translate_sentences
from ..models.deqnar.text import longest_source

# Without data of the user's: sentences of several lengths. Their language is of no account, both sides read the same.
SENTENCES = (
    "Hello!",
    "She is reading a book.",
    "Where is the nearest train station?",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
    "The meeting was moved to Thursday, 14 May, because 3 of the 12 members could not come.",
    "If it rains tomorrow we will stay at home, play cards with the children, and cook something warm in the evening.",
)
# Below this an fp32 export does not compute what its model does; rounding alone changes far less.
LEAST_AGREEMENT = 0.9


@dataclass
class Agreement:
    """How near an export's translations are to the model's: shares of equal sentences and of equal tokens."""

    sentences: float
    tokens: float


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> Agreement:
    """2·M / T with M tokens that match in order and T tokens in both: one word too many is one mistake, not many.

    >>> agreement([[1, 2, 3], [4]], [[1, 2, 3], [4]])
    Agreement(sentences=1.0, tokens=1.0)
    >>> agreement([[1, 2, 3]], [[9, 1, 2, 3]]).tokens.__round__(3)
    0.857
    """
    total = sum(map(len, ours)) + sum(map(len, theirs))
    matched = sum(
        block.size
        for one, other in zip(ours, theirs, strict=True)
        for block in SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    )
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    return Agreement(same / len(ours), 2 * matched / total if total else 1.0)


def compare_systems(systems: dict[str, Any], tokenizer: Any, pairs: list[Pair], batch_size: int) -> dict[str, dict]:
    """Figures of every system; the first is the model in torch, with which the others are compared.

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
            figures[name]["same_tokens_alone"] = agree_alone(model, systems[name], tokenizer, sources)
        if pairs[0].references:
            figures[name]["bleu"] = score(one, pairs)["bleu"]
    return figures


def agree_alone(model: Any, export: Any, tokenizer: Any, sources: list[str]) -> float:
    """Equal tokens, sentence by sentence and with two evaluations: what an export does in one call."""
    longest = longest_source(model.config)
    batches = [encode_texts(tokenizer, [text], longest)["input_ids"] for text in sources]
    found = ([system.generate(one, max_nfe=2)[0].tolist() for one in batches] for system in (model, export))
    return agreement(*found).tokens

"""Targets of a distilled corpus: the teacher's translations, and references where these are wrong.

The translations of a teacher are simpler to learn than references, but some are wrong. chrF against the references
finds them.
"""

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any

from ..data.parallel_text import Pair
from ..evaluation.metrics import metrics
from ..utils.fingerprints import fingerprint_of

WRONG = 30.0  # chrF below which a translation is counted as probably wrong
MOST_WRONG = 0.02  # share of such targets above which a warning is due


@dataclass
class TargetOptions:
    """Which targets are the reference instead of the teacher's translation.

    They do not affect the translations, so a finished output is written again from its shards when they change.
    """

    min_chrf: float | None = field(
        default=None,
        metadata={"help": "Replace translations with less chrF against all references by the first reference; try 30."},
    )
    reference_share: float = field(
        default=0.0, metadata={"help": "Share of the sentences that get their first reference as target in any case."}
    )

    def __post_init__(self) -> None:
        if self.min_chrf is not None and not 0 < self.min_chrf <= 100:
            raise ValueError(f"min_chrf must be above 0 and at most 100, not {self.min_chrf}.")
        if not 0 <= self.reference_share <= 1:
            raise ValueError(f"reference_share must be from 0 to 1, not {self.reference_share}.")


def record_of(options: TargetOptions, pairs: list[Pair]) -> dict[str, Any]:
    """What determines the targets, given the translations."""
    return {**asdict(options), "references": fingerprint_of("\n".join(pair.references) for pair in pairs)}


def chrf_of(text: str, references: list[str]) -> float:
    """The chrF of a text against the nearest of its references.

    >>> chrf_of("Ein Pferd.", ["Das Pferd.", "Ein Pferd."])
    100.0
    """
    _, chrf = metrics()
    return max(round(chrf.sentence_score(text, [reference]).score, 6) for reference in references)


def is_mixed_in(source: str, share: float) -> bool:
    """Whether a sentence is among the share with references: a function of the sentence alone.

    >>> sum(is_mixed_in(str(number), 0.25) for number in range(1000))
    231
    """
    digest = hashlib.blake2b(source.encode(), digest_size=7, person=b"reference_share").digest()
    return int.from_bytes(digest, "big") < share * 2**56


def select_targets(
    pairs: list[Pair], translations: list[str], options: TargetOptions
) -> tuple[list[str], dict[str, Any]]:
    """The target of every pair, and statistics.

    Args:
        pairs: the corpus.
        translations: of its sources; those of empty sources remain empty.
        options: of the selection.
    """
    targets, before, after = [], [], []
    replaced = mixed = 0
    for pair, text in zip(pairs, translations, strict=True):
        if not pair.source.strip():
            targets.append(text)
            continue
        score = chrf_of(text, pair.references)
        before.append(score)
        if options.min_chrf is not None and score < options.min_chrf:
            text, score, replaced = pair.references[0], 100.0, replaced + 1
        elif is_mixed_in(pair.source, options.reference_share):
            text, score, mixed = pair.references[0], 100.0, mixed + 1
        targets.append(text)
        after.append(score)
    figures = {
        "mean_chrf": sum(before) / max(1, len(before)),
        "share_below_30_chrf": sum(score < WRONG for score in before) / max(1, len(before)),
        "targets_below_30_chrf": sum(score < WRONG for score in after) / max(1, len(after)),
        "replaced_by_reference": replaced,
        "mixed_in_references": mixed,
    }
    return targets, figures


def describe_targets(figures: dict[str, Any]) -> str:
    """The statistics as a sentence for the command line."""
    text = (
        f"chrF against the references {figures['mean_chrf']:.1f} on average; "
        f"{figures['share_below_30_chrf']:.2%} of the translations are below {WRONG:g} chrF"
    )
    if figures["replaced_by_reference"] or figures["mixed_in_references"]:
        text += (
            f"; {figures['replaced_by_reference']:,} are replaced by the reference for that, "
            f"{figures['mixed_in_references']:,} further targets are references"
        )
    return text


def warning_of_targets(name: str, figures: dict[str, Any]) -> str | None:
    """A warning if many targets are probably wrong."""
    share = figures["targets_below_30_chrf"]
    if share <= MOST_WRONG:
        return None
    return (
        f"WARNING: {share:.1%} of the targets of {name} are below {WRONG:g} chrF against the references; many of those "
        f"are wrong, and a student learns them. Replace them with --min_chrf {WRONG:g} (nothing is translated again), "
        "select better beams with --nearest, or train the teacher for longer."
    )

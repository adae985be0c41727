"""BLEU, chrF, length ratio, brevity penalty and repetition rate of translations, and paired bootstrap tests."""

import itertools
from typing import Any

from ..data.parallel_text import Pair
from .translation import Translations


def sentence_bleu(texts: list[str], references: list[list[str]]) -> list[list[float]]:
    """Sentence BLEU, 0 to 100, of every text against each of its references; n-gram orders without matches are ignored.

    Args:
        texts: translations.
        references: of every text.
    """
    bleu, _ = metrics(effective_order=True)
    return [
        [bleu.sentence_score(text, [reference]).score for reference in several]
        for text, several in zip(texts, references, strict=True)
    ]


def corpus_scores(texts: list[str], references: list[list[str]]) -> dict[str, Any]:
    """Corpus BLEU and chrF with their signatures, and BLEU's length ratio and brevity penalty.

    Args:
        texts: translations.
        references: of every text, one or more.

    >>> figures = corpus_scores(["Ein Hund schläft."], [["Ein Hund schläft.", "Der Hund schläft."]])
    >>> figures["bleu"].__round__(), figures["length_ratio"], figures["brevity_penalty"]
    (100, 1.0, 1.0)
    """
    if len(texts) != len(references):
        raise ValueError(f"There are {len(texts):,} translations but references of {len(references):,} sentences.")
    if not texts:
        raise ValueError("There are no translations to score.")
    bleu, chrf = metrics()
    streams = reference_streams(references)
    bleu_score, chrf_score = (metric.corpus_score(texts, streams) for metric in (bleu, chrf))
    return {
        "bleu": bleu_score.score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf_score.score,
        "chrf_signature": str(chrf.get_signature()),
        "length_ratio": bleu_score.ratio,
        "brevity_penalty": bleu_score.bp,
    }


def score(translations: Translations, pairs: list[Pair]) -> dict[str, Any]:
    """The figures of `corpus_scores`, repetition rate, number of empty translations and the solver's statistics.

    Args:
        translations: of one system.
        pairs: the test set, with one or more references per sentence.
    """
    figures = {
        **corpus_scores(translations.texts, [pair.references for pair in pairs]),
        "repetition_rate": repetition_rate(translations.texts),
        "empty": sum(not text for text in translations.texts),
        "sentences": len(pairs),
        "seconds": translations.seconds,
    }
    if translations.nfe is not None:
        figures["mean_nfe"] = sum(translations.nfe) / len(pairs)
    if translations.converged is not None:
        figures["share_converged"] = sum(translations.converged) / len(pairs)
    if translations.residual is not None:
        figures["mean_residual"] = sum(translations.residual) / len(pairs)
    return figures


def compare(systems: dict[str, Translations], pairs: list[Pair], samples: int = 1000) -> dict[str, dict[str, Any]]:
    """Paired bootstrap resampling of every system against the first one (Koehn 2004).

    Args:
        systems: translations by name of the system.
        pairs: the test set.
        samples: number of bootstrap samples.
    """
    from sacrebleu.significance import PairedTest

    named = [(name, translations.texts) for name, translations in systems.items()]
    bleu, chrf = metrics()
    streams = reference_streams([pair.references for pair in pairs])
    test = PairedTest(named, {"BLEU": bleu, "chrF": chrf}, streams, test_type="bs", n_samples=samples)
    _, results = test()
    compared = {}
    for position, name in enumerate(results.pop("System")):
        compared[name] = {
            metric: {
                "score": float(outcomes[position].score),
                "mean": float(outcomes[position].mean),
                "interval": float(outcomes[position].ci),
                "p_value": _p_value(outcomes[position], outcomes[0]),
            }
            for metric, outcomes in results.items()
        }
    return compared


def _p_value(outcome: Any, baseline: Any) -> float | None:
    """The p-value; None for the baseline, and 1 for equal scores, for which sacreBLEU's own value is not 1."""
    if outcome is baseline:
        return None
    return 1.0 if outcome.score == baseline.score else float(outcome.p_value)


def metrics(**bleu_options: Any) -> tuple[Any, Any]:
    """sacreBLEU's BLEU and chrF.

    Args:
        bleu_options: of the class `BLEU`.
    """
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("Scoring needs sacrebleu: pip install 'hf_deqnar[train]'.") from error
    return BLEU(**bleu_options), CHRF()


def reference_streams(references: list[list[str]]) -> list[list[str | None]]:
    """References as sacreBLEU takes them: one list per reference number, with None where a sentence has fewer.

    >>> reference_streams([["a", "b"], ["c"]])
    [['a', 'c'], ['b', None]]
    """
    for number, several in enumerate(references, start=1):
        if not several:
            raise ValueError(f"Sentence {number} has no reference.")
    return [list(stream) for stream in itertools.zip_longest(*references)]


def repetition_rate(texts: list[str]) -> float:
    """Share of words that repeat the word before them, a typical error of non-autoregressive decoding."""
    words = repeated = 0
    for text in texts:
        tokens = text.split()
        words += len(tokens)
        repeated += sum(first == second for first, second in itertools.pairwise(tokens))
    return repeated / words if words else 0.0

"""The metrics of `hf-deqnar evaluate` for the `evaluate` library.

>>> import evaluate, hf_deqnar                                       # doctest: +SKIP
>>> quality = evaluate.load(str(hf_deqnar.METRICS))                  # doctest: +SKIP
>>> quality.compute(predictions=["Sie liest."], references=[["Sie liest.", "Sie liest gerade."]])   # doctest: +SKIP

`evaluate.load` copies this file and imports the copy, so its imports are absolute.
"""

from typing import Any

import datasets
import evaluate

from hf_deqnar.evaluation.metrics import corpus_scores

DESCRIPTION = """BLEU and chrF as sacreBLEU computes them, with the signatures that make them comparable, and the length
ratio and brevity penalty, which tell whether short translations explain a low BLEU."""

INPUTS = """
Args:
    predictions: translations.
    references: one reference, or a list of references, of every translation; lists may differ in length.
Returns:
    bleu, bleu_signature, chrf, chrf_signature, length_ratio, brevity_penalty
"""

CITATION = """@inproceedings{post-2018-call,
    title = "A Call for Clarity in Reporting {BLEU} Scores",
    author = "Post, Matt",
    booktitle = "Proceedings of the Third Conference on Machine Translation: Research Papers",
    year = "2018"
}"""


class TranslationQuality(evaluate.Metric):
    """BLEU, chrF, length ratio and brevity penalty."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        several, one = (
            datasets.Features({"predictions": text, "references": references})
            for references in (datasets.Sequence(text), text)
        )
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation=CITATION, inputs_description=INPUTS, features=[several, one]
        )

    def _compute(self, predictions: list[str], references: list[str] | list[list[str]]) -> dict[str, Any]:
        return corpus_scores(predictions, [[one] if isinstance(one, str) else one for one in references])

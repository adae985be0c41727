"""Translating a test set and scoring the result."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..pipeline_deqnar import check_named_reranker, clean_text, longest_source
from .reading import Pair
from .tokenized import start_tokens


@dataclass
class Translations:
    """What a system made of a test set, and what it took."""

    texts: list[str]
    seconds: float
    nfe: list[int] | None = None
    converged: list[bool] | None = None
    residual: list[float] | None = None


def translate_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: list[str],
    batch_size: int,
    *,
    prefix: str = "",
    show_progress: bool = True,
    **options: Any,
) -> Translations:
    """Translate with `generate`, in batches of similar length; the results are in the given order.

    Args:
        prefix: stands before every sentence, for models that are told what to do in words.
    """
    ours = model.config.model_type == "deqnar"
    if batch_size < 1:
        raise ValueError(f"The batch size must be at least 1, not {batch_size}.")
    if options.get("num_return_sequences", 1) != 1:
        raise ValueError("num_return_sequences must be 1: a system is scored by one translation per sentence.")
    options["num_return_sequences"] = 1  # a model's own options may say otherwise
    if ours:
        check_named_reranker(tokenizer, model, options)
        options = {**options, "return_dict_in_generate": True}
    order = sorted(range(len(sentences)), key=lambda index: len(sentences[index]))
    texts, nfe = [""] * len(sentences), [0] * len(sentences)
    converged, residual = [True] * len(sentences), [0.0] * len(sentences)
    solved = ours and model.config.refinement != "stacked"
    start = time.perf_counter()
    for first in tqdm(
        range(0, len(order), batch_size), desc="translating", unit="batch", disable=None if show_progress else True
    ):
        indices = order[first : first + batch_size]
        told = [prefix + sentences[index] for index in indices]
        batch = encode_texts(tokenizer, told, longest_source(model.config))
        result = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}, **options
        )
        sequences = result.sequences if ours else result
        for place, text in enumerate(tokenizer.batch_decode(sequences, skip_special_tokens=True)):
            texts[indices[place]] = text.strip() if clean_text(sentences[indices[place]]) else ""
        if ours:
            for place, index in enumerate(indices):
                nfe[index] = int(result.nfe[place])
                if solved:
                    converged[index], residual[index] = bool(result.converged[place]), float(result.residual[place])
    seconds = time.perf_counter() - start
    if not ours:
        return Translations(texts, seconds)
    return Translations(texts, seconds, nfe, *((converged, residual) if solved else (None, None)))


def labelled_batches(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, pairs: list[tuple[str, str]], batch_size: int
) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Sources and targets as batches of similar length, labels being −100 at padding, and the order of the pairs."""
    order = sorted(range(len(pairs)), key=lambda index: (len(pairs[index][1]), len(pairs[index][0])))
    batches = []
    for first in range(0, len(order), batch_size):
        sources, targets = zip(*(pairs[index] for index in order[first : first + batch_size]), strict=True)
        batch = encode_texts(tokenizer, sources, longest_source(model.config))
        answers = encode_texts(tokenizer, targets, model.config.max_position_embeddings, side="text_target")
        labels = answers["input_ids"].masked_fill(answers["attention_mask"] == 0, -100)[:, start_tokens(tokenizer) :]
        columns = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}
        batches.append({name: values.to(model.device) for name, values in columns.items()})
    return batches, order


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], longest: int | None, side: str = "text"
) -> dict[str, Tensor]:
    """Token ids, padded and cut to what a model takes; a row needs something in it, so an empty text becomes a dot."""
    cleaned = [clean_text(text) or "." for text in texts]
    return tokenizer(**{side: cleaned}, return_tensors="pt", padding=True, truncation=True, max_length=longest)


def sentence_bleu(texts: list[str], references: list[list[str]]) -> list[list[float]]:
    """Sentence BLEU, 0 to 100, of every text with each of its references alone; orders without n-grams do not count."""
    bleu, _ = metrics(effective_order=True)
    return [
        [bleu.sentence_score(text, [reference]).score for reference in several]
        for text, several in zip(texts, references, strict=True)
    ]


def score(translations: Translations, pairs: list[Pair]) -> dict[str, Any]:
    """sacreBLEU and chrF with their signatures, and how the text behaves."""
    bleu, chrf = metrics()
    references = reference_streams(pairs)
    bleu_score, chrf_score = (metric.corpus_score(translations.texts, references) for metric in (bleu, chrf))
    figures = {
        "bleu": bleu_score.score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": chrf_score.score,
        "chrf_signature": str(chrf.get_signature()),
        "length_ratio": bleu_score.ratio,
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
    """Paired bootstrap resampling against the first system: how likely the difference is chance (Koehn 2004)."""
    from sacrebleu.significance import PairedTest

    named = [(name, translations.texts) for name, translations in systems.items()]
    bleu, chrf = metrics()
    test = PairedTest(named, {"BLEU": bleu, "chrF": chrf}, reference_streams(pairs), test_type="bs", n_samples=samples)
    _, results = test()
    compared = {}
    for position, name in enumerate(results.pop("System")):
        compared[name] = {
            metric: {
                "score": float(outcomes[position].score),
                "mean": float(outcomes[position].mean),
                "interval": float(outcomes[position].ci),
                "p_value": _chance(outcomes[position], outcomes[0]),
            }
            for metric, outcomes in results.items()
        }
    return compared


def _chance(outcome: Any, baseline: Any) -> float | None:
    """The p-value; none for the baseline itself, and 1 for equal scores, of which sacreBLEU counts every sample."""
    if outcome is baseline:
        return None
    return 1.0 if outcome.score == baseline.score else float(outcome.p_value)


def metrics(**bleu_options: Any) -> tuple[Any, Any]:
    """sacreBLEU's BLEU and chrF."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise ImportError("Scoring needs sacrebleu: pip install 'hf_deqnar[train]'.") from error
    return BLEU(**bleu_options), CHRF()


def reference_streams(pairs: list[Pair]) -> list[list[str | None]]:
    """One list per reference number, as sacreBLEU wants them; None where a sentence has fewer references."""
    most = max(len(pair.references) for pair in pairs)
    return [
        [pair.references[number] if number < len(pair.references) else None for pair in pairs] for number in range(most)
    ]


def repetition_rate(texts: list[str]) -> float:
    """Share of words that repeat the word before them: the typical mistake of parallel decoding."""
    words = repeated = 0
    for text in texts:
        tokens = text.split()
        words += len(tokens)
        repeated += sum(first == second for first, second in itertools.pairwise(tokens))
    return repeated / words if words else 0.0

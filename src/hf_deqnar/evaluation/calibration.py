"""Fitting the quality estimate of a model on a validation set.

The features of every translation (`quality.FEATURES`) are regressed on its chrF against the nearest reference. Texts
that are not in the source language are added with a chrF of 0: references in place of sources, and sources with
shuffled letters. The figures of the table are of folds that the parameters were not fitted on.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from ..data.parallel_text import Pair
from ..data.tokenized_dataset import target_ids
from ..models.deqnar.quality import FEATURES, LEAST, Familiarity, pack_log_probs, unpack_log_probs, words_of
from ..models.deqnar.text import clean_text, longest_source
from .metrics import metrics
from .translation import encode_texts

FOLDS = 5
FOREIGN_SHARE = 0.1  # texts of each kind of foreign input, relative to the validation set
RARE = -10.0  # log-probability of a rare token
UNFAMILIAR = 0.005  # share of the validation sources that look unlike the source language
RIDGE = 1e-3  # weight of the squared parameters of standardised features
BINS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass
class Calibration:
    """The option `quality` of a model, and how good it is on sentences that it was not fitted on.

    Attributes:
        quality: the option.
        sentences: rows of the table: bounds of the quality, sentences, mean quality, mean chrF / 100.
        words: the same for words; the last number is the share that a reference has.
        correlation: Spearman's rank correlation of quality and chrF.
        foreign: mean quality of foreign texts.
        foreign_found: share of the references that look unlike the source language, as sources.
    """

    quality: dict[str, Any]
    sentences: list[tuple[float, float, int, float, float]]
    words: list[tuple[float, float, int, float, float]]
    correlation: float
    foreign: float
    foreign_found: float


@dataclass
class Observations:
    """Translations of some texts: features, chrF / 100, and the words with the index of their sentence."""

    features: Tensor
    scores: Tensor
    word_scores: Tensor
    word_sentence: Tensor
    word_found: Tensor


def calibrate(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    pairs: list[Pair],
    source_texts: list[str],
    batch_size: int = 32,
) -> Calibration:
    """Fit the quality estimate.

    Args:
        model: a model of this package, in torch or as an ONNX export.
        pairs: the validation set.
        source_texts: texts in the source language, whose tokens are counted; for example those of the training set.
        batch_size: sentences translated together.
    """
    quality = language_statistics(tokenizer, pairs, source_texts, model.config.vocab_size)
    quality |= {"sentence": [0.0] * (len(FEATURES) + 1), "word": [0.0, 1.0, 0.0]}
    real = observe(model, tokenizer, pairs, quality, batch_size)
    foreign = observe(model, tokenizer, foreign_pairs(pairs), quality, batch_size)
    foreign.scores = torch.zeros_like(foreign.scores)
    folds = torch.arange(len(pairs)) % FOLDS
    logits, word_quality = torch.zeros(len(pairs)), torch.zeros(len(real.word_found))
    for fold in range(FOLDS):
        fitted = fit(real, foreign, folds != fold)
        logits[folds == fold] = apply(fitted["sentence"], real.features[folds == fold])
        inside = (folds == fold)[real.word_sentence]
        word_features = torch.stack([real.word_scores, logits[real.word_sentence]], dim=1)[inside]
        word_quality[inside] = apply(fitted["word"], word_features).sigmoid()
    fitted = fit(real, foreign, torch.ones(len(pairs), dtype=torch.bool))
    quality |= {name: [round(value, 6) for value in values] for name, values in fitted.items()}
    familiarity = Familiarity(quality)
    references = tokenizer([clean_text(pair.references[0]) for pair in pairs])["input_ids"]
    return Calibration(
        quality=quality,
        sentences=table(logits.sigmoid(), real.scores),
        words=table(word_quality, real.word_found),
        correlation=spearman(logits, real.scores),
        foreign=float(apply(fitted["sentence"], foreign.features).sigmoid().mean()),
        foreign_found=sum(familiarity.is_unfamiliar(torch.tensor(row)) for row in references) / len(references),
    )


def language_statistics(
    tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], source_texts: list[str], vocabulary: int
) -> dict[str, Any]:
    """What is known of the source language: log-probabilities of tokens, and what is unusual."""
    counts = torch.zeros(vocabulary)
    for tokens in tokenizer([clean_text(text) for text in source_texts])["input_ids"]:
        counts.index_add_(0, torch.tensor(tokens), torch.ones(len(tokens)))
    packed = pack_log_probs(((counts + 0.5) / (counts + 0.5).sum()).log())
    log_probs = unpack_log_probs(packed)
    sources = tokenizer([clean_text(pair.source) for pair in pairs])["input_ids"]
    targets = target_ids(tokenizer, [clean_text(pair.references[0]) for pair in pairs])
    ratios = [len(target) / len(source) for source, target in zip(sources, targets, strict=True)]
    means = torch.tensor([float(log_probs[row].mean()) for row in sources])
    usual = float(means.mean())
    deviations = (means - usual) * torch.tensor([float(len(row)) for row in sources]).sqrt()
    return {
        "usual_log_ratio": round(float(torch.tensor(ratios).log().mean()), 4),
        "source_log_probs": packed,
        "rare": RARE,
        "unfamiliar": [round(usual, 4), round(float(deviations.quantile(UNFAMILIAR)), 4)],
    }


def foreign_pairs(pairs: list[Pair]) -> list[Pair]:
    """Texts that are not in the source language: references, and sources whose letters are shuffled."""
    draw = random.Random(0)
    count = max(1, round(FOREIGN_SHARE * len(pairs)))
    chosen = draw.sample(pairs, 2 * count) if len(pairs) >= 2 * count else pairs
    references = [Pair(pair.references[0], pair.references) for pair in chosen[:count]]
    shuffled = []
    for pair in chosen[count:]:
        words = ["".join(draw.sample(word, len(word))) for word in pair.source.split()]
        shuffled.append(Pair(" ".join(words), pair.references))
    return [*references, *shuffled]


@torch.no_grad()
def observe(
    model: Any, tokenizer: PreTrainedTokenizerBase, pairs: list[Pair], quality: dict[str, Any], batch_size: int
) -> Observations:
    """Translate sources; features and chrF of every translation, log-probability and correctness of every word."""
    _, chrf = metrics()
    order = sorted(range(len(pairs)), key=lambda index: len(pairs[index].source))
    features, scores = torch.zeros(len(pairs), len(FEATURES)), torch.zeros(len(pairs))
    words: list[tuple[float, int, bool]] = []
    for first in range(0, len(order), batch_size):
        indices = order[first : first + batch_size]
        batch = encode_texts(tokenizer, [pairs[index].source for index in indices], longest_source(model.config))
        out = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
            quality=quality,
            return_dict_in_generate=True,
            num_return_sequences=1,
        )
        features[indices] = out.quality_features.cpu()
        log_probs = out.token_quality.logit().cpu()  # because of the parameters (0, 1, 0) for words
        for row, index in enumerate(indices):
            text, own = words_of(tokenizer, out.sequences[row].tolist())
            references = pairs[index].references
            scores[index] = max(chrf.sentence_score(text, [one]).score for one in references) / 100
            right = {word for one in references for word in one.split()}
            for start, end, tokens in own:
                words.append((float(log_probs[row, tokens].min()), index, text[start:end] in right))
    log_prob, sentence, found = zip(*words, strict=True) if words else ((), (), ())
    return Observations(
        features,
        scores,
        torch.tensor(log_prob).clamp(LEAST, 0),
        torch.tensor(sentence, dtype=torch.long),
        torch.tensor(found, dtype=torch.float),
    )


def fit(real: Observations, foreign: Observations, selected: Tensor) -> dict[str, list[float]]:
    """Parameters for the sentences and for the words, from the selected real translations and all foreign ones."""
    sentence = regress(
        torch.cat([real.features[selected], foreign.features]), torch.cat([real.scores[selected], foreign.scores])
    )
    logits, inside = apply(sentence, real.features), selected[real.word_sentence]
    word_features = torch.stack([real.word_scores, logits[real.word_sentence]], dim=1)
    return {"sentence": sentence, "word": regress(word_features[inside], real.word_found[inside])}


def regress(features: Tensor, scores: Tensor) -> list[float]:
    """Bias and weights that minimise Σ −y·log σ(b + w·x) − (1 − y)·log(1 − σ(b + w·x)), for y in [0, 1].

    >>> bias, weight = regress(torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0.1, 0.2, 0.8, 0.9]))
    >>> weight > 1
    True
    """
    mean, scale = features.mean(dim=0).double(), features.std(dim=0).double().clamp_min(1e-6)
    inputs, wanted = (features.double() - mean) / scale, scores.double()
    parameters = torch.zeros(features.shape[1] + 1, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = inputs @ parameters[1:] + parameters[0]
        value = functional.binary_cross_entropy_with_logits(logits, wanted) + RIDGE * parameters[1:].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    weights = parameters.detach()[1:] / scale
    return [float(parameters.detach()[0] - weights @ mean), *weights.tolist()]


def apply(parameters: list[float], features: Tensor) -> Tensor:
    """b + w·x."""
    return features @ features.new_tensor(parameters[1:]) + parameters[0]


def table(quality: Tensor, scores: Tensor) -> list[tuple[float, float, int, float, float]]:
    """Bounds, count, mean quality and mean score of every bin that is not empty."""
    rows = []
    for low, high in itertools.pairwise(BINS):
        inside = (quality >= low) & ((quality < high) | (high == BINS[-1]))
        if inside.any():
            rows.append((low, high, int(inside.sum()), float(quality[inside].mean()), float(scores[inside].mean())))
    return rows


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation; ranks of equal values are averaged.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 5.0, 7.0])), 6)
    1.0
    """
    ranks = []
    for values in (first, second):
        _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
        ends = counts.cumsum(0).double()
        ranks.append((ends - (counts - 1) / 2)[inverse])
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])

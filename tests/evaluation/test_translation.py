import pytest

from hf_deqnar.data.parallel_text import Pair
from hf_deqnar.evaluation.metrics import compare, repetition_rate, score
from hf_deqnar.evaluation.translation import Translations, translate_sentences

from ..conftest import SENTENCES, small_model

sacrebleu = pytest.importorskip("sacrebleu", reason="sacrebleu is part of the train extra")
PAIRS = [Pair(english, [german]) for english, german in SENTENCES]
GERMAN = [german for _, german in SENTENCES]


def test_a_translation_equal_to_any_reference_scores_100():
    pairs = [Pair(pair.source, ["Etwas ganz anderes.", *pair.references]) for pair in PAIRS[:3]] + PAIRS[3:]
    figures = score(Translations(GERMAN, 1.0, nfe=[3] * 6, converged=[True] * 3 + [False] * 3), pairs)
    assert figures["bleu"] == pytest.approx(100)
    assert figures["chrf"] == pytest.approx(100)
    assert figures["mean_nfe"] == 3
    assert figures["share_converged"] == 0.5
    assert figures["length_ratio"] == pytest.approx(1)


def test_bleu_equals_sacrebleus():
    texts = [text.replace("e", "a") for text in GERMAN]
    expected = sacrebleu.corpus_bleu(texts, [GERMAN])
    assert score(Translations(texts, 1.0), PAIRS)["bleu"] == pytest.approx(expected.score)


def test_repetition_rate_is_a_share_of_words():
    assert repetition_rate(["a a b", "c", ""]) == pytest.approx(1 / 4)
    assert repetition_rate([""]) == 0


def test_a_large_difference_is_significant_and_no_difference_is_not():
    pairs, good = PAIRS * 10, GERMAN * 10
    bad = [text[: len(text) // 2] for text in good]
    systems = {"bad": Translations(bad, 1.0), "good": Translations(good, 1.0), "same": Translations(list(bad), 1.0)}
    compared = compare(systems, pairs, samples=200)
    assert compared["good"]["BLEU"]["p_value"] < 0.05
    assert compared["same"]["BLEU"]["p_value"] > 0.5


def test_translations_are_in_the_order_of_the_sentences(tokenizer):
    model = small_model(vocab_size=len(tokenizer))
    sentences = [english for english, _ in SENTENCES] + [""]
    batched = translate_sentences(model, tokenizer, sentences, batch_size=3)
    single = [translate_sentences(model, tokenizer, [sentence], batch_size=1).texts[0] for sentence in sentences]
    assert batched.texts == single
    assert batched.texts[-1] == ""
    assert len(batched.nfe) == len(batched.converged) == 7

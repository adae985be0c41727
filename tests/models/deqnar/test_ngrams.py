"""Beam search with n-grams: equal to enumeration, for single sentences and batches, saved and loaded."""

import itertools
import math

import numpy
import pytest
import torch

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.data.ngram_counts import add_ngrams, learn_ngrams
from hf_deqnar.models.deqnar import lengths
from hf_deqnar.models.deqnar.ctc_beam_search import (
    prefix_beam_of_sentence,
    prefix_beam_search,
    prefix_beams_by_batch,
    prefix_beams_by_sentence,
)
from hf_deqnar.models.deqnar.ngrams import Fluency, HashIndex

from ...conftest import random_sentences, small_model

END, BLANK = 2, 0


def fluency(order: int = 3) -> Fluency:
    texts = [[3 + token % 5 for token in text] for text in random_sentences(50, seed=5)]
    return Fluency(learn_ngrams(texts, 64, END, order, 1), 0.7, 0.4, END)


def unsure(seed: int, rows: int, canvas: int, vocabulary: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return (2 * torch.randn(rows, canvas, vocabulary, dtype=torch.float64)).log_softmax(dim=-1)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_wide_beam_agrees_with_enumeration(order):
    language, vocabulary = fluency(order=order), 6
    log_probabilities = unsure(order, 3, 5, vocabulary)
    lengths = torch.tensor([5, 4, 2])
    texts, counts, scores = prefix_beam_search(log_probabilities, lengths, BLANK, 400, padding=1, added=language)
    scores = scores + language.of_end(texts, counts)
    log_chance = language.ngrams.one_by_one()
    for row, length in enumerate(lengths.tolist()):
        expected = {}
        for path in itertools.product(range(vocabulary), repeat=length):
            merged = tuple(token for token, _ in itertools.groupby(path) if token != BLANK)
            chance = math.exp(sum(log_probabilities[row, place, token].item() for place, token in enumerate(path)))
            expected[merged] = expected.get(merged, 0.0) + chance
        likelihoods = dict(expected)
        for text, chance in expected.items():
            full = (END, *text, END)
            before = [full[max(0, place - order + 1) : place] for place in range(1, len(full))]
            likely = sum(map(log_chance, before, full[1:]))
            expected[text] = math.log(chance) + language.weight * likely + language.bonus * len(text)
        best = int(scores[row].argmax())
        found = tuple(texts[row, best, : counts[row, best]].tolist())
        assert found == max(expected, key=expected.get)
        assert scores[row, best].item() == pytest.approx(expected[found], abs=1e-4)
        added = language.of_text(texts, counts) + language.of_end(texts, counts)
        assert (scores - added)[row, best].item() == pytest.approx(math.log(likelihoods[found]), abs=1e-4)


@pytest.mark.parametrize("least_chance", [0.0, 0.02])
@pytest.mark.parametrize("beam_size", [2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_sentence_search_agrees_with_batched_search(seed, beam_size, least_chance):
    language, vocabulary = fluency(), 40
    log_probabilities = unsure(seed, 4, 9, vocabulary)
    texts, counts, scores = prefix_beam_search(
        log_probabilities,
        torch.full((4,), 9),
        BLANK,
        beam_size,
        padding=1,
        added=language,
        least_chance=least_chance,
    )
    ends = language.of_end(texts, counts)
    candidates = log_probabilities.topk(2 * beam_size + 1, dim=-1).indices
    for row in range(4):
        added, of_end = language.one_by_one()
        single = (log_probabilities[row].numpy(), candidates[row].numpy(), BLANK, beam_size)
        found = prefix_beam_of_sentence(*single, added, language.bonus, least_chance)
        expected = [tuple(texts[row, place, : counts[row, place]].tolist()) for place in range(beam_size)]
        assert [text for text, _ in found] == expected
        assert [score for _, score in found] == pytest.approx(scores[row].tolist(), abs=1e-4)
        assert [of_end(text) for text, _ in found] == pytest.approx(ends[row].tolist(), abs=1e-4)


def with_ngrams() -> DeqNarForConditionalGeneration:
    model = small_model(torch.float32, length="ctc")
    add_ngrams(model, random_sentences(60, seed=7), order=3, least=1, weight=0.5, bonus=0.5)
    return model


def source() -> dict[str, torch.Tensor]:
    rows = random_sentences(4, seed=8)
    longest = max(map(len, rows))
    padded = [row + [1] * (longest - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def test_ngrams_change_translations_and_are_saved_with_the_model(tmp_path):
    model, batch = with_ngrams(), source()
    fluent = model.generate(**batch)
    plain = model.generate(**batch, ngram_weight=0.0)
    assert fluent.shape != plain.shape or not torch.equal(fluent, plain)
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(**batch), fluent)
    assert (tmp_path / "ngrams.py").is_file()


def test_scores_with_ngrams_are_log_probabilities():
    model, batch = with_ngrams(), source()
    options = {"return_dict_in_generate": True, "num_return_sequences": 3, "token_bonus": 5.0}
    scores = model.generate(**batch, **options).sequences_scores
    assert (scores < 0).all()


def test_new_tokens_have_the_lowest_unigram_probability(tmp_path):
    model, batch = with_ngrams(), source()
    before = model.generate(**batch)
    model.resize_token_embeddings(pad_to_multiple_of=64)
    model.lm_head.weight.data[50:] = model.lm_head.weight.data[1]  # padding, so that nothing changes
    chances = model.model.ngrams.first_chances
    assert len(chances) == 64
    assert (chances[50:] == chances[:50].min()).all()
    assert torch.equal(model.generate(**batch), before)
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    assert torch.equal(loaded.generate(**batch), before)


def test_translation_does_not_depend_on_batch():
    model, batch = with_ngrams(), source()
    batched = model.generate(**batch, return_dict_in_generate=True)
    for row, (tokens, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        single = model.generate(tokens[mask.bool()][None], return_dict_in_generate=True)
        length = single.sequences.shape[1]
        assert torch.equal(batched.sequences[row, :length], single.sequences[0])
        assert batched.sequences_scores[row].item() == pytest.approx(single.sequences_scores[0].item(), abs=1e-4)


def test_ctc_beam_size_1_returns_best_path():
    model, plain, batch = with_ngrams(), small_model(torch.float32, length="ctc"), source()
    assert torch.equal(model.generate(**batch, ctc_beam_size=1), plain.generate(**batch))
    assert torch.equal(model.generate(**batch, ngram_weight=0), plain.generate(**batch, ctc_beam_size=5))
    assert model.generation_config.ngram_weight == 0.5


def test_unsupported_ngram_options_are_refused():
    model, plain, batch = with_ngrams(), small_model(torch.float32, length="ctc"), source()
    with pytest.raises(ValueError, match="this model has no n-grams"):
        plain.generate(**batch, ngram_weight=0.2, ctc_beam_size=3)
    with pytest.raises(ValueError, match="set ctc_beam_size above 1"):
        model.generate(**batch, ctc_beam_size=1, ngram_weight=0.5)
    with pytest.raises(ValueError, match="token_bonus=0.5 has no effect without ngram_weight"):
        model.generate(**batch, ngram_weight=0.0, token_bonus=0.5)
    with pytest.raises(ValueError, match="ngram_weight must be a number from 0 to 100"):
        model.generate(**batch, ngram_weight=-1.0)
    without_ngrams = DeqNarForConditionalGeneration(model.config)
    with pytest.raises(ValueError, match="n-grams of this model are empty"):
        without_ngrams.generate(**batch, ngram_weight=0.2, ctc_beam_size=3)


@pytest.mark.parametrize("least_chance", [0.0, 0.02])
@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_search_in_numpy_agrees_with_search_by_sentence(seed, order, least_chance):
    language, vocabulary, beam_size = fluency(order=order), 40, 4
    log_probabilities = unsure(seed, 6, 9, vocabulary)
    candidates = log_probabilities.topk(2 * beam_size + 1, dim=-1).indices
    arrays = (log_probabilities.numpy(), candidates.numpy(), numpy.array([9, 8, 3, 9, 1, 5]))
    question = (*arrays, BLANK, beam_size, language, least_chance)
    expected, found = prefix_beams_by_sentence(*question), prefix_beams_by_batch(*question)
    for one, other in zip(expected[:2], found[:2], strict=True):
        numpy.testing.assert_array_equal(other, one)
    numpy.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    # The same words in another order, as on a shortlist.
    names = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(seed)).numpy()
    places = numpy.argsort(names)
    listed = (arrays[0][:, :, names], places[arrays[1]], arrays[2], int(places[BLANK]), *question[4:], names)
    for search in (prefix_beams_by_sentence, prefix_beams_by_batch):
        texts, counts, scores = search(*listed)
        numpy.testing.assert_array_equal(counts, expected[1])
        numpy.testing.assert_array_equal(numpy.where(texts < 0, -1, names[texts]), expected[0])
        numpy.testing.assert_allclose(scores, expected[2], atol=1e-5)


def test_hashes_are_found_by_their_first_bits():
    generator = numpy.random.default_rng(0)
    limits = numpy.iinfo(numpy.int64)
    for count in (1, 2, 1000):
        keys = numpy.unique(generator.integers(limits.min, limits.max, count, endpoint=True))
        hashes = numpy.concatenate([keys, generator.integers(limits.min, limits.max, 500), [limits.min, limits.max]])
        places, listed = HashIndex(keys)(hashes)
        numpy.testing.assert_array_equal(listed, numpy.isin(hashes, keys))
        numpy.testing.assert_array_equal(keys[places[listed]], hashes[listed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_search_on_a_cpu_agrees_with_that_of_tensors(monkeypatch, dtype):
    model, batch = with_ngrams().to(dtype), source()
    on_cpu = model.generate(**batch, return_dict_in_generate=True)

    def with_tensors(log_probs, row_lengths, blank, beam_size, padding, fluency, least_chance):
        options = {"added": fluency, "least_chance": least_chance}
        return prefix_beam_search(log_probs, row_lengths, blank, beam_size, padding, **options)

    monkeypatch.setattr(lengths, "prefix_beams_on_cpu", with_tensors)
    batched = model.generate(**batch, return_dict_in_generate=True)
    assert torch.equal(on_cpu.sequences, batched.sequences)
    torch.testing.assert_close(on_cpu.sequences_scores, batched.sequences_scores, rtol=1e-4, atol=1e-4)


def test_reranker_does_not_select_unfilled_beam_entries(monkeypatch):
    model = with_ngrams()
    scores = torch.tensor([[float("-inf"), -1.0]])
    found = torch.tensor([[[7], [8]]]), torch.tensor([[1, 1]]), scores, scores
    monkeypatch.setattr(model, "_search_beams", lambda *question: found)
    monkeypatch.setattr(model, "_rerank", lambda *question: torch.tensor([-1.0, -5.0]))
    assert model.generate(torch.tensor([[9, 2]]), reranker=model).tolist() == [[8]]

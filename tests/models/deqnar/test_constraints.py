"""Terms that a translation must contain: the search against enumeration, and `generate`."""

import itertools

import pytest
import torch

from hf_deqnar.models.deqnar.constraints import ForcedSearch, contains_terms

from ...conftest import PAD, VOCABULARY, padded, random_sentences, small_model

BLANK = 0


def text_of(path, merge):
    if not merge:
        return list(path)
    return [token for token, _ in itertools.groupby(path) if token != BLANK]


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("word_starts", [None, [False, True, False, True]])
@pytest.mark.parametrize(
    "terms", [[[1]], [[1, 2]], [[2, 2]], [[1], [1]], [[3, 2], [2]], [[1, 2], [2, 3]], [[1, 1, 1, 1]]]
)
def test_the_search_equals_enumeration(terms, word_starts, merge):
    starts = None if word_starts is None else torch.tensor(word_starts)
    for seed, length in itertools.product(range(4), (1, 3, 5)):
        scores = torch.randn(length, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if not merge:
            scores[:, BLANK] = float("-inf")  # a token of the text for every position
        log_probs = scores.log_softmax(dim=-1)
        fitting = {
            path: sum(log_probs[place, token].item() for place, token in enumerate(path))
            for path in itertools.product(range(0 if merge else 1, 4), repeat=length)
            if contains_terms(text_of(path, merge), terms, starts)
        }
        found = ForcedSearch(terms, BLANK, merge, starts)(log_probs)
        if not fitting:
            assert found is None
            continue
        path, known = found
        assert fitting[tuple(path)] == pytest.approx(max(fitting.values()))
        inside = [token for token, known_here in zip(path, known, strict=True) if known_here]
        assert len(text_of(inside, merge)) >= max(map(len, terms))


def test_terms_of_a_text_may_not_overlap():
    assert contains_terms([1, 2, 3], [[1, 2], [3]], None)
    assert not contains_terms([1, 2, 3], [[1, 2], [2, 3]], None)
    assert not contains_terms([1, 2], [[1]], torch.tensor([False, True, False]))


def test_more_terms_than_the_search_can_follow_are_an_error():
    with pytest.raises(ValueError, match="at most 6"):
        ForcedSearch([[1]] * 7, BLANK, merge=True)


OPTIONS = {
    "predict": [{}, {"length_beams": 3}, {"refinement_passes": 3}],
    "ctc": [{}, {"ctc_beam_size": 4}, {"refinement_passes": 2}],
}
CASES = [(length, options) for length, found in OPTIONS.items() for options in found]


@pytest.mark.parametrize(("length", "options"), CASES)
@pytest.mark.parametrize("refinement", ["implicit", "stacked"])
def test_translations_contain_the_terms_and_other_sentences_do_not_change(length, options, refinement):
    model = small_model(length=length, refinement=refinement)
    sentences = random_sentences(5, shortest=6)
    batch = {"input_ids": padded(sentences)}
    batch["attention_mask"] = (batch["input_ids"] != PAD).long()
    starts = torch.arange(VOCABULARY) % 2 == 0
    terms = [[[20, 21], [30]], [], [[9]], [], [[40, 40, 41]]]
    options = {**options, "return_dict_in_generate": True}
    free = model.generate(**batch, **options)
    found = model.generate(**batch, **options, forced_tokens=terms, word_starts=starts)
    for row, wanted in enumerate(terms):
        text = [token for token in found.sequences[row].tolist() if token != PAD]
        if wanted:
            assert contains_terms(text, wanted, starts)
            assert not contains_terms([token for token in free.sequences[row].tolist() if token != PAD], wanted, starts)
            assert found.nfe[row] > free.nfe[row]
        else:
            assert text == [token for token in free.sequences[row].tolist() if token != PAD]
            assert found.nfe[row] == free.nfe[row]
            assert found.sequences_scores[row] == pytest.approx(free.sequences_scores[row].item())
    alone = model.generate(
        input_ids=torch.tensor([sentences[0]]), **options, forced_tokens=terms[:1], word_starts=starts
    )
    width = alone.sequences.shape[1]
    assert alone.sequences[0].tolist() == found.sequences[0, :width].tolist()


def test_other_words_are_predicted_given_the_terms():
    """The terms are on the canvas of the second solve, so that they change the features of other positions."""
    model = small_model(length="predict")
    batch = padded(random_sentences(1, shortest=12))
    free = model.generate(batch, return_dict_in_generate=True)
    forced = model.generate(batch, return_dict_in_generate=True, forced_tokens=[[[9]]])
    place = forced.sequences[0].tolist().index(9)
    others = [index for index in range(forced.sequences.shape[1]) if index != place]
    assert not torch.allclose(forced.token_scores[0, others], free.token_scores[0, others])


def test_a_predicted_canvas_is_extended_and_a_ctc_canvas_is_an_error():
    term = list(range(10, 40))
    predict = small_model(length="predict").generate(torch.tensor([[7]]), forced_tokens=[[term]])
    assert contains_terms(predict[0].tolist(), [term], None)
    with pytest.raises(ValueError, match="do not fit on a canvas of 2 positions"):
        small_model(length="ctc").generate(torch.tensor([[7]]), forced_tokens=[[term]])


@pytest.mark.parametrize(
    ("forced", "message"),
    [([[], []], "each of the 1 sentences"), ([[[]]], "list of token ids"), ([["word"]], "list of token ids")],
)
def test_wrong_terms_are_an_error(forced, message):
    with pytest.raises(ValueError, match=message):
        small_model(length="ctc").generate(torch.tensor([[7, 8]]), forced_tokens=forced)

import pytest
import torch
from torch.nn import functional

from hf_deqnar import DeqNarForConditionalGeneration
from hf_deqnar.data.shortlist_counts import add_shortlist
from hf_deqnar.models.deqnar.shortlist import Shortlist, Words, never_written

from ...conftest import PAD, REFINEMENTS, VOCABULARY, padded, random_sentences, small_config, small_model

SOURCES = random_sentences(200, shortest=2, seed=1)
TARGETS = random_sentences(200, shortest=2, seed=2)


def listed_model(size: int = 4, common: int = 5, **fields) -> DeqNarForConditionalGeneration:
    model = small_model(**fields)
    add_shortlist(model, SOURCES, TARGETS, size, common)
    return model


def words_of(shortlist: Shortlist, sentence: list[int]) -> set[int]:
    """The shortlist of a sentence, computed in plain Python."""
    listed = {int(token) for word in sentence for token in shortlist.companions[word]}
    return listed | set(shortlist.common.tolist()) | set(shortlist.never)


def test_shortlist_of_a_batch_is_the_union_of_its_rows():
    shortlist = listed_model().model.shortlist
    sentences = random_sentences(5, seed=3)
    tokens = padded(sentences, extra=2)
    words = shortlist(tokens, tokens != PAD)
    for row, sentence in enumerate(sentences):
        expected = words_of(shortlist, sentence)
        assert set(words.tokens[~words.outside[row, 0]].tolist()) == expected
        single = shortlist(torch.tensor([sentence]), torch.ones(1, len(sentence), dtype=torch.bool))
        assert set(single.tokens.tolist()) == expected
        assert single.outside is None


SEARCHES = {
    "ctc": [{}, {"refinement_passes": 2}, {"ctc_beam_size": 3}],
    "predict": [{}, {"refinement_passes": 2}, {"length_beams": 2}],
    "dag": [{}, {"dag_search": "greedy"}, {"dag_search": "viterbi"}, {"dag_beam_size": 3}],
}


@pytest.mark.parametrize("length", SEARCHES)
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_shortlist_of_all_tokens_has_no_effect(refinement, length):
    model = listed_model(size=VOCABULARY, common=VOCABULARY, refinement=refinement, length=length)
    tokens = padded(random_sentences(4, seed=3))
    for options in SEARCHES[length]:
        actual = model.generate(tokens, **options, return_dict_in_generate=True, output_trajectory=True)
        full = model.generate(tokens, **options, return_dict_in_generate=True, output_trajectory=True, shortlist=False)
        assert torch.equal(actual.sequences, full.sequences)
        assert torch.equal(actual.nfe, full.nfe)
        torch.testing.assert_close(actual.sequences_scores, full.sequences_scores)
        for drafts, others in zip(actual.trajectory, full.trajectory, strict=True):
            assert all(torch.equal(one.tokens, other.tokens) for one, other in zip(drafts, others, strict=True))


@pytest.mark.parametrize("length", SEARCHES)
@pytest.mark.parametrize("refinement", REFINEMENTS)
def test_translation_does_not_depend_on_batch_and_uses_its_shortlist(refinement, length):
    model = listed_model(refinement=refinement, length=length)
    sentences = random_sentences(6, seed=3)
    for chosen in SEARCHES[length]:
        batched = model.generate(padded(sentences, extra=1), **chosen, return_dict_in_generate=True)
        for row, sentence in enumerate(sentences):
            single = model.generate(torch.tensor([sentence]), **chosen, return_dict_in_generate=True)
            output = [token for token in batched.sequences[row].tolist() if token != PAD]
            assert output == [token for token in single.sequences[0].tolist() if token != PAD]
            assert batched.nfe[row] == single.nfe[0]
            torch.testing.assert_close(batched.sequences_scores[row], single.sequences_scores[0])
            assert set(output) <= words_of(model.model.shortlist, sentence)


def test_scores_are_normalised_over_the_shortlist():
    model = listed_model(refinement="implicit", length="ctc")
    tokens = padded(random_sentences(3, seed=4))
    words = model.model.shortlist(tokens, tokens != PAD)
    features = torch.randn(3, 7, model.config.d_model, dtype=torch.float64)
    logits = functional.linear(features, model.lm_head.weight).float()
    for row in range(3):
        forbidden = torch.ones(VOCABULARY, dtype=torch.bool)
        forbidden[words.tokens[~words.outside[row, 0]]] = False
        forbidden[never_written(model.config)] = True
        logits[row, :, forbidden] = float("-inf")
    expected = logits.log_softmax(dim=-1)
    found, scores, every = model.read_scored(features, True, words)
    assert torch.equal(found, expected.argmax(dim=-1))
    assert torch.equal(found, model.read_tokens(features, words))
    torch.testing.assert_close(every, expected)
    torch.testing.assert_close(scores, expected.amax(dim=-1))


def test_special_tokens_are_never_generated():
    """Special tokens are on the shortlist, because the transition is trained on the full vocabulary."""
    model = listed_model(refinement="implicit", length="ctc")
    never = never_written(model.config)
    words = model.model.shortlist(torch.tensor([[8, 9]]), torch.ones(1, 2, dtype=torch.bool))
    assert set(never) <= set(words.tokens.tolist())
    features = model.lm_head.weight[never][None] * 100
    assert not set(model.read_tokens(features, words).flatten().tolist()) & set(never)
    assert model.model.shortlist.full_vocabulary().tokens.tolist() == list(range(VOCABULARY))


def test_rows_are_selected():
    outside = torch.tensor([[[True, False]], [[False, True]]])
    words = Words(torch.tensor([7, 9]), outside)
    assert words.select(torch.tensor([1, 1, 0])).outside[:, 0, 0].tolist() == [False, False, True]
    logits = words.hide(torch.zeros(2, 3, 2))
    assert logits[:, 0].tolist() == [[float("-inf"), 0], [0, float("-inf")]]


def test_shortlist_is_saved_and_copied_by_from_backbone(tmp_path):
    model = listed_model(dtype=torch.float32, refinement="stacked", length="ctc")
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    for other in (loaded, DeqNarForConditionalGeneration.from_backbone(model)):
        assert torch.equal(other.model.shortlist.companions, model.model.shortlist.companions)
        assert torch.equal(other.model.shortlist.common, model.model.shortlist.common)
    half = loaded.half()
    assert torch.equal(half.model.shortlist.companions, model.model.shortlist.companions)


@pytest.mark.parametrize("size", [VOCABULARY + 3, VOCABULARY])
def test_new_tokens_are_on_every_shortlist(size, tmp_path):
    model = listed_model(dtype=torch.float32, length="ctc")
    known, before = padded(random_sentences(4, seed=3)), words_of(model.model.shortlist, [8, 9])
    model.resize_token_embeddings(size)
    assert words_of(model.model.shortlist, [8, 9]) == before | set(range(VOCABULARY, size))
    model.save_pretrained(tmp_path)
    loaded = DeqNarForConditionalGeneration.from_pretrained(tmp_path)
    tokens = torch.cat([known, torch.full_like(known[:, :1], size - 1)], dim=1)[3:]
    assert torch.equal(loaded.generate(tokens), model.generate(tokens))
    with pytest.raises(ValueError, match="A shortlist or n-grams cover all .* tokens, so that 40 are too few"):
        model.resize_token_embeddings(40)
    assert model.config.vocab_size == size


def test_impossible_shortlist_options_are_refused():
    tokens = torch.tensor([[8, 9]])
    with pytest.raises(ValueError, match="shortlist=True, but this model has no shortlist"):
        small_model().generate(tokens, shortlist=True)
    with pytest.raises(ValueError, match="is empty; create it with hf-deqnar shortlist"):
        small_model(shortlist_size=3, shortlist_common=3).generate(tokens)
    with pytest.raises(ValueError, match="shortlist must be unset, True or False, not 3"):
        small_model().generate(tokens, shortlist=3)
    for sizes in ({"shortlist_size": 3}, {"shortlist_common": 3}, {"shortlist_size": -1, "shortlist_common": -1}):
        with pytest.raises(ValueError, match="must both be 0"):
            small_config(**sizes)

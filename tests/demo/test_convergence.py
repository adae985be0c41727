"""What the demo page shows, without its page."""

import re

import pytest

from hf_deqnar import PRETRAINED
from hf_deqnar.cli.loading import load_model
from hf_deqnar.demo.convergence import curve_svg, draft_html, final_since, list_html
from hf_deqnar.demo.solves import compare, sentences_of, solve_all
from hf_deqnar.documents.translation import Request
from hf_deqnar.documents.translator import Translator

from ..teachers import small_teacher


@pytest.mark.parametrize(
    ("drafts", "since"),
    [
        ([], []),
        (["a b"], [1, 1]),
        (["a b", "a b", "a b"], [1, 1]),
        (["a x", "a b", "a b"], [1, 2]),
        (["a b", "x b", "a b"], [3, 1]),  # a word that was changed back is final since then
        (["b", "a b"], [2, 1]),  # a word that moved did not change
        (["a b", ""], []),
    ],
)
def test_the_evaluation_since_which_a_word_did_not_change(drafts, since):
    assert final_since([draft.split() for draft in drafts]) == since


def test_text_is_never_markup():
    assert "<b>" not in draft_html([["<b>"]], 1) + list_html([(0.0, "<b>")])


def test_the_curve_has_a_point_for_every_residual():
    svg = curve_svg([1.0, 0.1, 0.0], 10, 1e-2)
    assert svg.count("<circle") == 3
    heights = [float(y) for y in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights == sorted(heights)


@pytest.fixture(scope="module")
def translator():
    return Translator(*load_model(PRETRAINED))


def test_the_page_shows_what_generate_returns(translator):
    (solve,), seconds = solve_all(translator, ["I like tea."], nbest=3, max_nfe=6, tol=1e-6, ctc_beam_size=5)
    assert solve.text == translator([Request("I like tea.")])[0]
    assert len(solve.drafts) == len(solve.residuals) == solve.nfe == 6
    assert solve.converged is False
    assert len(solve.alternatives) == 3
    assert seconds > 0


def test_a_text_is_divided_into_sentences(translator):
    assert sentences_of("I like tea.\n\nWhere is he?  ", translator) == ["I like tea.", "Where is he?"]
    assert sentences_of(" \n", translator) == []


def test_any_seq2seq_model_can_be_compared_but_not_shown(tokenizer):
    other = Translator(small_teacher("marian", len(tokenizer)), tokenizer, max_new_tokens=5)
    text, seconds = compare(other, ["She is reading.", "Hi."])
    assert text == " ".join(other([Request("She is reading."), Request("Hi.")]))
    assert seconds > 0
    with pytest.raises(ValueError, match="not of a marian model"):
        solve_all(other, ["Hi."], 1)

"""Placeholders, markup and glossary terms: with models that keep them, lose them or repeat them."""

import re

import pytest

from hf_deqnar import PRETRAINED
from hf_deqnar.cli.loading import load_model
from hf_deqnar.documents.formats import PARSERS
from hf_deqnar.documents.glossary import Glossary, read_glossary
from hf_deqnar.documents.translation import Request, translate_alternatives, translate_document
from hf_deqnar.documents.translator import Translator

TEXT = "Hello {name}, you have %d files at https://a.org/x?y=1. Write to a.b@c.org or {{ other }}! %(count)s of %1$s."
PLACEHOLDERS = ["{name}", "%d", "https://a.org/x?y=1", "a.b@c.org", "{{ other }}", "%(count)s", "%1$s"]

WORDS = {"lose": "", "repeat": r"\g<0> \g<0>", "split": " 1 7 ", "keep": r"\g<0>"}


@pytest.mark.parametrize("behaviour", WORDS)
def test_placeholders_come_through_whatever_the_model_does(behaviour):
    """If a number is lost or repeated, the texts between the placeholders are translated instead."""

    def translate(requests):
        assert not any(placeholder in request.text for request in requests for placeholder in PLACEHOLDERS)
        return [re.sub(r"\d+", WORDS[behaviour], request.text) for request in requests]

    found = translate_document(PARSERS["text"](TEXT), translate)
    assert re.findall("|".join(map(re.escape, PLACEHOLDERS)), found) == PLACEHOLDERS
    assert found == TEXT


def test_placeholders_may_change_their_order():
    def swap(requests):
        return [" ".join(reversed(request.text.split())) for request in requests]

    assert translate_document(PARSERS["text"]("{a} sees {b}"), swap) == "{b} sees {a}"


def test_tags_follow_their_words():
    table = {"Tom has two dogs.": "Zwei Hunde hat Tom.", "two dogs": "Zwei Hunde.", "Tom has": "Tom hat"}

    def translate(requests):
        return [table.get(request.text, "?") for request in requests]

    assert translate_document(PARSERS["html"]("<p>Tom has <b>two dogs</b>.</p>"), translate) == (
        "<p><b>Zwei Hunde</b> hat Tom.</p>"
    )
    table["two dogs"] = "ein Paar"  # not in the sentence: it is divided at its tags
    assert translate_document(PARSERS["html"]("<p>Tom has <b>two dogs</b>.</p>"), translate) == (
        "<p>Tom hat <b>ein Paar</b>.</p>"
    )


def test_a_sentence_without_the_required_term_is_divided_at_it():
    glossary = Glossary({"train station": "Hauptbahnhof"})
    asked = []

    def translate(requests):
        asked.extend(requests)
        return ["?" if "rain" in request.text else request.text.upper() for request in requests]

    assert translate_document(PARSERS["text"]("The Train  station is old."), translate, glossary) == (
        "THE Hauptbahnhof IS OLD."
    )
    assert asked[0] == Request("The Train station is old.", ("Hauptbahnhof",))
    assert [request.text for request in asked[-2:]] == ["The", "is old."]


def test_a_free_translation_with_the_word_of_the_term_is_preferred():
    glossary = Glossary({"train station": "Hauptbahnhof"})
    table = {
        Request("The train station is old.", ("Hauptbahnhof",)): "Der Bahnhof Hauptbahnhof ist alt.",
        Request("The train station is old."): "Der Bahnhof ist alt.",
        Request("train station", auxiliary=True): "Bahnhof",
    }

    def translate(requests):
        return [table[request] for request in requests]

    document = PARSERS["text"]("The train station is old.")
    assert translate_document(document, translate, glossary) == "Der Hauptbahnhof ist alt."
    table[Request("train station", auxiliary=True)] = "Zughalt"  # not in the free translation
    assert translate_document(document, translate, glossary) == "Der Bahnhof Hauptbahnhof ist alt."
    table[Request("The train station is old.")] = "Der Hauptbahnhof ist alt"
    assert translate_document(document, translate, glossary) == "Der Hauptbahnhof ist alt"


def answered(rounds, n_best):
    """The result of rounds whose requests a function answers."""
    try:
        requests = next(rounds)
        while True:
            requests = rounds.send(n_best(requests))
    except StopIteration as finished:
        return finished.value


def test_an_alternative_has_the_alternatives_of_the_sentences_and_what_is_required():
    glossary = Glossary({"station": "Bahnhof"})
    table = {
        "A station.": ["Bahnhof.", "Der Bahnhof.", "Die Station.", "Ein Bahnhof."],
        "Hello, 17.": ["Hallo, 17.", "Hallo.", "Gruß, 17."],
        "station": ["Station"],
        "Bye.": ["Tschüs."],
    }
    asked = []

    def n_best(requests):
        asked.extend(requests)
        return [table[one.text][: one.alternatives + 1] for one in requests]

    def all_of(text, alternatives):
        return answered(translate_alternatives(PARSERS["text"](text), alternatives, glossary), n_best)

    assert all_of("Hello, {name}. Bye.", 2) == ["Hallo, {name}. Tschüs.", "Gruß, {name}. Tschüs."]
    assert [one.alternatives for one in asked] == [2, 2]  # the second and third translations ask for nothing new
    assert all_of("A station.", 3) == ["Bahnhof.", "Der Bahnhof.", "Die Bahnhof.", "Ein Bahnhof."]
    assert all_of("A station.", 0) == ["Bahnhof."]
    assert all_of("Bye.", 5) == ["Tschüs."]
    assert all_of("42 {name}", 5) == ["42 {name}"]


def test_a_term_longer_than_the_sentence():
    term = "a very long term of many words that is the whole sentence"
    glossary = Glossary({term: "x" * 500, "the": "y"})
    assert translate_document(PARSERS["text"]("Hi."), lambda found: ["Hallo."] * len(found), glossary) == "Hallo."
    assert translate_document(PARSERS["text"](f"{term}."), lambda found: ["Hallo."] * len(found), glossary) == (
        "x" * 500 + "."
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# comment\n\nhouse\n", "line 3: expected a source term, a tab and its translation"),
        ("a\tb\na\tc\n", "line 2: 'a' already has the translation 'b'"),
        ("a\t\n", "line 1: expected"),
        (b"caf\xe9\tb\n", "not valid UTF-8 at byte 4"),
    ],
)
def test_a_wrong_glossary_is_an_error_that_names_the_line(text, message, tmp_path):
    file = tmp_path / "glossary.tsv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=message):
        read_glossary(file)


def test_terms_match_whole_words_and_the_longest_first(tmp_path):
    file = tmp_path / "glossary.tsv"
    file.write_text("# terms\ntrain\tZug\ntrain station\tBahnhof\nUS\tUSA\n", encoding="utf-8-sig")
    glossary = read_glossary(file)
    found = glossary.occurrences("Train: the train station of US, not us or trainer.")
    assert [target for _, _, target in found] == ["Zug", "Bahnhof", "USA"]


@pytest.fixture(scope="module")
def bundled():
    return Translator(*load_model(PRETRAINED))


def test_the_bundled_model_is_told_its_terms(bundled):
    """The term is part of the sentence: words around it are those of a translation as a whole."""
    glossary = Glossary({"train station": "Hauptbahnhof", "tea": "Kräutertee"})
    rounds = []

    def translate(requests):
        rounds.append([request.text for request in requests])
        return bundled(requests)

    document = "Where is the train station? I like tea. Tom is {name}. I have two dogs."
    found = translate_document(PARSERS["text"](document), translate, glossary)
    assert "Hauptbahnhof?" in found
    assert "Ich mag Kräutertee." in found
    assert "{name}" in found
    assert len(rounds) == 1  # nothing was divided
    assert found.endswith(bundled([Request("I have two dogs.")])[0])


def test_alternatives_have_placeholders_tags_and_terms(bundled):
    document = "<p>Hello <b>{name}</b>, the train station is at https://a.org. I like tea.</p>"
    rounds = translate_alternatives(
        PARSERS["html"](document), 3, Glossary({"train station": "Hauptbahnhof"}), bundled.fits
    )
    found = answered(rounds, bundled.n_best)
    assert len(set(found)) == len(found) == 4
    for text in found:
        assert re.fullmatch(r"<p>.*</p>", text)
        for required in ("<b>{name}</b>", "https://a.org", "Hauptbahnhof"):
            assert text.count(required) == 1
    assert found[0] == translate_document(
        PARSERS["html"](document), bundled, Glossary({"train station": "Hauptbahnhof"}), bundled.fits
    )


def test_small_models_of_both_kinds_give_required_texts(saved):
    for kind in ("predict", "ctc"):
        translator = Translator(*load_model(str(saved[kind])))
        requests = [Request("Where is the train station?", ("Zug", "17")), Request("She is reading."), Request("", ())]
        found = translator(requests)
        assert {"Zug", "17"} <= set(re.findall(r"(?<!\w)(?:Zug|17)(?!\w)", found[0]))
        assert found[1:] == translator(requests[1:])
        assert found[2] == ""


def test_more_terms_than_fit_are_left_to_the_caller(saved):
    translator = Translator(*load_model(str(saved["ctc"])))
    requests = [Request("Hi", ("a long text that does not fit on a canvas",)), Request("Hi", tuple("abcdefgh"))]
    assert translator(requests) == translator([Request("Hi")]) * 2

"""Markup, times and white space of documents are kept, and only text is translated."""

import time

import pytest

from hf_deqnar.documents.formats import PARSERS, format_of
from hf_deqnar.documents.marks import MARK, MarkedText
from hf_deqnar.documents.sentences import shorten, split
from hf_deqnar.documents.translation import translate_document

from ..conftest import real_sentences

HTML = """<!DOCTYPE html>
<html lang="en"><head><title>My house</title><style>p > b { color: red }</style>
<script>if (a < b) { alert("No text.") }</script></head>
<body class='x'><!-- A comment. --><h1>Hello &amp; welcome</h1>
<p>Tom has <b>two</b> dogs. See <a href="x?a=1&amp;b=2">the page</a>, <code>a &lt; b</code>.<br>
Do not touch <span translate="no">Visual Studio</span>. 1 &lt; 2</p>
<ul><li>One</li><li>Two &gt; one</li></ul><img src="a.png" alt="A"><pre>  as it is </pre></body></html>
"""
MARKDOWN = """---
title: not translated
---
# My *house*

Tom has **two** dogs, `a = 1` and [a cat](http://a.org/b_c "title"). z* = f(z*, x), 2 * 3 and snake_case.

- [x] one item
  1. a numbered one
* another **bold
  item** here

> A quotation.

| name | age |
|------|-----|
| a dog | 3 |

```python
print("not translated")
```

![image](a.png) <https://a.org> and text[^1] \\* \\[

[ref]: http://a.org
"""
SRT = (
    "\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>I like tea.</i>\r\n\r\n"
    "2\r\n00:00:03,000 --> 00:00:04,000 X1:40\r\n- Where is he?\r\n- {\\an8}At home.\r\n\r\n"
    "3\r\n00:00:05,000 --> 00:00:06,000\r\n\r\n"
)
TEXT = "\n\n  First paragraph. Second sentence!\n\n\n- an item\n- another\n\nThe end\n"
SAMPLES = {"html": HTML, "markdown": MARKDOWN, "srt": SRT, "text": TEXT, "lines": "One.\r\n\r\n  two \n\nthree"}


def unchanged(requests):
    return [request.text for request in requests]


def upper(requests):
    return [request.text.upper() for request in requests]


@pytest.mark.parametrize("name", PARSERS)
def test_a_translation_without_changes_gives_the_document(name):
    found = translate_document(PARSERS[name](SAMPLES[name]), unchanged)
    if name == "markdown":  # lines of a paragraph are joined
        assert found.split() == SAMPLES[name].split()
    else:
        assert found == SAMPLES[name]


def test_only_the_text_of_html_is_translated():
    found = translate_document(PARSERS["html"](HTML), upper)
    for kept in ("<style>p > b { color: red }</style>", 'alert("No text.")', "<!-- A comment. -->", "<body class='x'>",
                 'href="x?a=1&amp;b=2"', "<code>a &lt; b</code>", '<span translate="no">Visual Studio</span>',
                 "<pre>  as it is </pre>", 'alt="A"'):  # fmt: skip
        assert kept in found
    for translated in ("<title>MY HOUSE</title>", "HELLO &amp; WELCOME", "<b>TWO</b> DOGS", "TWO &gt; ONE"):
        assert translated in found


def test_only_the_text_of_markdown_is_translated():
    found = translate_document(PARSERS["markdown"](MARKDOWN), upper)
    for kept in ("title: not translated", "`a = 1`", '](http://a.org/b_c "title")', "|------|-----|", "[^1]", "\\*",
                 'print("not translated")', "![image](a.png)", "<https://a.org>", "[ref]: http://a.org"):  # fmt: skip
        assert kept in found
    for translated in ("# MY *HOUSE*", "**TWO** DOGS", "[A CAT](", "- [x] ONE ITEM", "| A DOG | 3 |", "> A QUOTATION."):
        assert translated in found


def test_numbers_and_times_of_subtitles_are_kept():
    found = translate_document(PARSERS["srt"](SRT), upper)
    assert found == SRT.replace("I like tea.", "I LIKE TEA.").replace("Where is he?", "WHERE IS HE?").replace(
        "At home.", "AT HOME."
    )


def test_lines_of_subtitles_are_as_many_as_before():
    cue = "1\n00:00:01,000 --> 00:00:02,000\nTwo dogs are\nplaying in the snow\n"
    found = translate_document(
        PARSERS["srt"](cue), lambda requests: [f"{request.text} and more" for request in requests]
    )
    assert found.count("\n") == cue.count("\n")
    assert found.split()[4:] == [*cue.split()[4:], "and", "more"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n00:00:01 --> 00:00:02\nHi.\n", r"line 2: expected a time .* found '00:00:01 --> 00:00:02'"),
        ("Hello\n", "line 1: expected a time"),
        ("1\n", "line 2: expected a time .* found the end of the file"),
    ],
)
def test_broken_subtitles_are_an_error_that_names_the_line(text, message):
    with pytest.raises(ValueError, match=message):
        PARSERS["srt"](text)


@pytest.mark.parametrize(
    "text",
    [
        "<p>Hi <b>there",
        "<p>a < b and c > d",
        "<a href='x>Hi",
        "</b></i>Hi</p>",
        "<!-- open",
        "<script>open",
        "<>",
        "&",
        "<",
    ],
)
def test_unclosed_html_is_kept(text):
    found = translate_document(PARSERS["html"](text), unchanged)
    for part in ("<p>", "<b>", "</b></i>", "</p>", "<!-- open", "<script>open"):
        assert (part in found) == (part in text)
    assert "Hi" in found or "Hi" not in text


def test_ten_thousand_tags_take_linear_time():
    text = "<p>" + "<b>a</b> " * 3000 + "</p>" + "<i>" * 3000
    assert translate_document(PARSERS["html"](text), unchanged) == text
    with pytest.raises(ValueError, match="more than 6400 tags"):
        PARSERS["html"]("<b>" * 7000)


def test_a_private_use_character_of_the_text_is_kept():
    text = "A \ue000 sign and {name} \uf8ff."
    paragraph = MarkedText()
    paragraph.add_text(text)
    assert len(MARK.findall(paragraph.text)) == 3
    assert translate_document([paragraph], unchanged) == text


def test_sentences_are_split_and_joined():
    sentences = real_sentences(50)
    text = " ".join(sentences)
    assert "".join(sentence + space for sentence, space in split(text)) == text
    assert len(split(text)) >= len(sentences) - 2
    for one in ("Dr. Smith is here.", "It is 3.5 m.", "He came at 5 p.m. today.", "J. R. Tolkien wrote.", "e.g. This"):
        assert split(one) == [(one, "")]
    assert [sentence for sentence, _ in split("“Go!” She left. 第一。第二。")] == [
        "“Go!”",
        "She left.",
        "第一。",
        "第二。",
    ]


def test_long_sentences_are_divided_until_they_fit():
    text = "one two three, four five six seven eight nine " + "x" * 50
    parts = shorten(text, lambda part: len(part) <= 15)
    assert "".join(part + space for part, space in parts) == text
    assert max(len(part) for part, _ in parts) <= 15


def test_formats_by_ending():
    from pathlib import Path

    assert [format_of(Path(name)) for name in ("a.md", "a.HTML", "a.srt", "a.txt", "a")] == [
        "markdown", "html", "srt", "lines", "lines",
    ]  # fmt: skip


def processor_seconds(function, *arguments):
    start = time.process_time()
    function(*arguments)
    return time.process_time() - start


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("lines", "a" * 40_000),  # an e-mail address may begin at every letter
        ("lines", "x" + "." * 40_000 + "x"),
        ("lines", "x" + "。" * 20_000),
        ("lines", "x" + " " * 40_000 + "x"),
        ("lines", "x" + "😀" * 40_000 + "x"),
        ("text", "x" + " " * 40_000 + "x"),
        ("markdown", "x" + "`" * 40_000 + "x"),
        ("markdown", "***" + " " * 40_000 + "x"),
        ("markdown", "a|b\n|" + " " * 40_000 + "x"),
        ("markdown", "x " + "![" * 20_000),
        ("markdown", "x " + "[^" * 20_000),
        ("markdown", "x " + "<!--" * 10_000),
        ("markdown", "\n    a\n" * 6_000),
        ("html", "<a " * 13_000),
        ("html", "<a " * 13_000 + '">'),
        ("html", "<a '\"" * 8_000),
        ("html", "<b translate=no>" + "<b " * 13_000),
        ("srt", "1\n0:00:00,0 --> 0:00:01,0\n" + "a b\n" + "a " * 3_000),
    ],
)
def test_a_long_text_with_many_repetitions_takes_linear_time(format, text):
    """In quadratic time, each of them takes at least three seconds of processor time on a fast machine."""

    def longer(requests):
        return [f"{request.text} {request.text} {request.text}" for request in requests]

    assert processor_seconds(lambda: translate_document(PARSERS[format](text), longer)) < 2


def test_unfinished_tags_are_text():
    for text in ("<a <b", "x <a '<b \"> y", '<i title=">'):
        (part,) = PARSERS["html"](text)
        assert part.text == text
    assert PARSERS["html"]("<a <b <i title='>'>x</i>")[0].text.endswith("x\ue001")
    assert PARSERS["html"]("<a ' <b>x</b>")[0].text == "<a ' \ue000x\ue001"


def test_references_to_characters_that_do_not_exist_are_replaced():
    many = "&#" + "9" * 5000 + ";"
    (part,) = PARSERS["html"](f"a {many} &#{'0' * 5000}65; &#x{'0' * 20}42; &#0000000067;")
    assert part.text == "a \ufffd A B C"


def test_runs_of_backticks_of_different_length_do_not_close_each_other():
    for text, code in (("a ``b ` c`` d `e `` f`", ["``b ` c``", "`e `` f`"]), ("\\``x`", ["\\`", "`x`"])):
        (part,) = PARSERS["markdown"](text)
        assert [mark.text for mark in part.marks.values()] == code

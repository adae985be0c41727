"""`hf-deqnar translate` with documents and glossaries."""

import pytest

from ..documents.test_formats import HTML, SRT


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "page.html").write_text(HTML, encoding="utf-8")
    (tmp_path / "film.srt").write_bytes(SRT.encode())
    (tmp_path / "broken.srt").write_text("1\nnot a time\nHi.\n")
    (tmp_path / "latin.md").write_bytes(b"# A\ncaf\xe9\n")
    (tmp_path / "terms.tsv").write_text("dogs\tDackel\n")
    return tmp_path


def test_the_format_is_that_of_the_ending(run, saved, folder):
    done = run("translate", "--model", saved["ctc"], "--input", folder / "film.srt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("\ufeff1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>")
    assert done.stdout.count("-->") == 3
    done = run(
        "translate", "--model", saved["ctc"], "--input", folder / "page.html", "--glossary", folder / "terms.tsv"
    )
    assert "<script>if (a < b)" in done.stdout
    assert "Dackel" in done.stdout
    assert done.stderr == ""


def test_arguments_and_standard_input_have_the_format_of_the_flag(run, saved):
    done = run("translate", "--model", saved["ctc"], "--format", "html", "<p>Hi.</p>", "<hr>")
    assert done.stdout.startswith("<p>")
    assert done.stdout.endswith("</p>\n<hr>\n")
    done = run("translate", "--model", saved["ctc"], "--format", "markdown", stdin=b"# {title}\r\n")
    assert done.stdout == "# {title}\r\n"


def test_a_glossary_is_applied_to_lines(run, saved, folder):
    done = run(
        "translate", "--model", saved["ctc"], "--glossary", folder / "terms.tsv", stdin=b"Two dogs.\n\nTwo cats.\n"
    )
    lines = done.stdout.split("\n")
    assert "Dackel" in lines[0]
    assert lines[1] == ""
    assert len(lines) == 4


def test_errors_are_one_readable_line(run, saved, folder):
    model = ["--model", saved["ctc"]]
    for arguments, message in [
        (["--input", folder / "broken.srt"], "broken.srt, line 2: expected a time such as"),
        (["--input", folder / "latin.md"], "latin.md, line 2: not valid UTF-8 at byte 8"),
        (["--glossary", folder / "absent.tsv", "Hi."], "There is no file"),
        (["--glossary", folder / "page.html", "Hi."], "page.html, line 1: expected a source term"),
        (["--input", folder / "page.html", "--watch"], "--watch is for lines"),
        (["--format", "text", "--jsonl", "Hi."], "--jsonl is for lines"),
        (["--format", "pdf", "Hi."], "invalid choice: 'pdf'"),
    ]:
        done = run("translate", *model, *arguments)
        assert done.returncode == 2
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1

import gzip
import json

import pytest

from hf_deqnar.data.parallel_text import Pair, read_parallel

from ..conftest import SENTENCES

PAIRS = [Pair(english, [german]) for english, german in SENTENCES]


def write_corpus(kind: str, folder) -> str:
    path = folder / f"corpus.{kind}"
    if kind.startswith("jsonl"):
        content = "".join(json.dumps({"en": english, "de": german}) + "\n" for english, german in SENTENCES)
    elif kind.startswith("tsv"):
        content = "de\ten\n" + "".join(f"{german}\t{english}\n" for english, german in SENTENCES)
    else:
        content = "en,de\n" + "".join(f'"{english}","{german}"\n' for english, german in SENTENCES)
    path.write_bytes(gzip.compress(content.encode()) if kind.endswith(".gz") else content.encode())
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "tsv", "tsv.gz", "csv", "csv.gz"])
def test_files_with_named_columns_are_read(kind, tmp_path):
    assert read_parallel(write_corpus(kind, tmp_path), "en", "de") == PAIRS


def test_aligned_files_with_windows_line_ends_are_read(tmp_path):
    (tmp_path / "corpus.en").write_bytes("\r\n".join(english for english, _ in SENTENCES).encode())
    (tmp_path / "corpus.de").write_text("\n".join(german for _, german in SENTENCES), encoding="utf-8")
    assert read_parallel(tmp_path / "corpus", "en", "de") == PAIRS


def test_tables_of_office_programs_are_read(tmp_path):
    """With a byte order mark, Windows line ends, a line break inside a cell, and an empty last line."""
    file = tmp_path / "pairs.csv"
    file.write_bytes('\ufeffen,de\r\n"two\r\nlines",zwei\r\n\r\n'.encode())
    assert read_parallel(file, "en", "de") == [Pair("two\nlines", ["zwei"])]
    file = tmp_path / "pairs.tsv"
    file.write_bytes("\ufeffen\tde\none\teins\n\n".encode())
    assert read_parallel(file, "en", "de") == [Pair("one", ["eins"])]


def test_several_references_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"en": "Hi", "de": ["Hallo", "Tag"]}\n')
    assert read_parallel(tmp_path / "a.jsonl", "en", "de") == [Pair("Hi", ["Hallo", "Tag"])]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"en": "x", "de": "y"}\n{"en": \n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl, line 1: not a JSON object with en and de"),
        ("a.jsonl", b'{"en": "x", "fr": "y"}\n', "a.jsonl, line 1: no column de; there are en, fr"),
        ("a.jsonl", b"", "contains no sentence pairs"),
        ("a.jsonl", b'{"en": null, "de": "y"}\n', "a.jsonl, line 1: en and de must be text"),
        ("a.jsonl", b'{"en": "x", "de": []}\n', "a.jsonl, line 1: en and de must be text"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"en": "x", "de": "y"}\n' * 99, mtime=0)[:-12],
            "a.jsonl.gz is damaged after line",
        ),
        ("a.jsonl.gz", b"no gzip at all", "a.jsonl.gz is damaged after line 0"),
        ("a.jsonl", b'{"en": "x", "de": "y"}\n\xff\n', "a.jsonl, line 2: not valid UTF-8 at byte 1"),
        ("a.tsv", b"en\tde\nx\ty\tz\n", "a.tsv, line 2: 3 columns, but the first line names 2"),
        ("a.csv", b"en,de\nx\n", "a.csv, line 2: 1 columns, but the first line names 2"),
        ("a.csv", b'en,de\nx,"y\n' + b"z" * 200_000, "a.csv, line 3: not valid CSV .field larger"),
        ("a.pdf", b"x", "unknown file format"),
    ],
)
def test_errors_name_the_file_and_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_parallel(tmp_path / name, "en", "de")


def test_aligned_files_of_unequal_length_are_refused_with_their_lengths(tmp_path):
    (tmp_path / "corpus.en").write_text("a\nb\nc\n")
    (tmp_path / "corpus.de").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"corpus.en has 3 lines but .*corpus.de has 2; aligned files"):
        read_parallel(tmp_path / "corpus", "en", "de")


def test_parquet_files_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the train extra")
    from pyarrow import parquet

    columns = {"en": [pair.source for pair in PAIRS], "de": [pair.references[0] for pair in PAIRS]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    assert read_parallel(tmp_path / "a.parquet", "en", "de") == PAIRS
    with pytest.raises(ValueError, match="no column fr; there are en, de"):
        read_parallel(tmp_path / "a.parquet", "en", "fr")
    (tmp_path / "b.parquet").write_text("nonsense")
    with pytest.raises(ValueError, match=r"b.parquet is not a Parquet file"):
        read_parallel(tmp_path / "b.parquet", "en", "de")


def test_data_sets_are_read_by_name(tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="datasets is part of the train extra")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "mine"
    folder.mkdir()
    lines = (json.dumps({"translation": {"en": pair.source, "de": pair.references[0]}}) for pair in PAIRS)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert read_parallel(f"datasets:{folder},,train", "en", "de") == PAIRS
    with pytest.raises(ValueError, match="should be datasets:name,configuration,split"):
        read_parallel(f"datasets:{folder}", "en", "de")


def test_fairseq_folders_are_read(tmp_path):
    folder = tmp_path / "iwslt14.tokenized.de-en"
    folder.mkdir()
    for part in ("train", "valid", "test"):
        (folder / f"{part}.en").write_text("\n".join(pair.source for pair in PAIRS) + "\n", encoding="utf-8")
        (folder / f"{part}.de").write_text("\n".join(pair.references[0] for pair in PAIRS) + "\n", encoding="utf-8")
    assert read_parallel(folder / "valid", "en", "de") == PAIRS
    with pytest.raises(
        ValueError, match="is a folder; name a file in it or a prefix of aligned files, such as .*train"
    ):
        read_parallel(folder, "de", "en")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"en": ' + "9" * 5000 + ', "de": "a"}', "huge number"),
        ('{"en": "\\ud83d", "de": "a"}', "not valid Unicode"),
        ('{"en": "a", "de": ["b", "\\udc00"]}', "not valid Unicode"),
    ],
)
def test_unusual_json_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"en": "a", "de": "b"}\n' + line)
    with pytest.raises(ValueError, match=message) as error:
        read_parallel(path, "en", "de")
    assert str(error.value).startswith(f"{path}, line 2: ")


def test_a_damaged_parquet_file_is_refused_with_its_name(tmp_path):
    from pyarrow import parquet, table

    path = tmp_path / "pairs.parquet"
    parquet.write_table(table({"en": ["one", "two"], "de": ["eins", "zwei"]}), path, compression="none")
    whole = path.read_bytes()
    messages = []
    for place in range(4, len(whole) - 8):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_parallel(path, "en", "de")
        except ValueError as error:
            messages.append(str(error))
    assert len(messages) > 50  # other bytes are text or are not read
    assert all(str(path) in message for message in messages)

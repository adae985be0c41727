import errno
import os
import time

import pytest

from hf_deqnar.corpus.files import read_json, write_json, write_whole


def test_equal_lines_are_equal_bytes_whenever_and_under_whatever_name(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_whole(tmp_path / name, ["ä", "b"])
        time.sleep(1.1 if name == "a.gz" else 0)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "b.gz"]


def test_a_damaged_file_is_named_with_what_to_do(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"settings": {"name": "ä"}, "finished": False})
    assert read_json(path, "settings", remedy="x") == {"settings": {"name": "ä"}, "finished": False}
    whole = path.read_bytes()
    for content in (b"", whole[:9], b"[]", b"null", b"{}", b'{"finished": true}', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run.json is damaged \(.*\); remove it\.$") as caught:
            read_json(path, "settings", remedy="remove it")
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == content


def test_a_full_disk_is_one_line_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_whole(path, ["before"])

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="file could not be written .No space left on device.; all that was finished"):
        write_whole(path, ["after"])
    assert path.read_text() == "before\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]

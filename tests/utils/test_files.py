import errno
import os
import time

import pytest

from hf_deqnar.utils.files import read_json, write_atomically, write_json


def test_equal_lines_give_equal_bytes_at_any_time_and_under_any_name(tmp_path):
    for name in ("a.gz", "b.gz"):
        write_atomically(tmp_path / name, ["ä", "b"])
        time.sleep(1.1 if name == "a.gz" else 0)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "b.gz"]


def test_a_damaged_file_is_reported_with_its_name_and_a_remedy(tmp_path):
    path = tmp_path / "run.json"
    write_json(path, {"settings": {"name": "ä"}, "finished": False})
    assert read_json(path, "settings", remedy="x") == {"settings": {"name": "ä"}, "finished": False}
    complete = path.read_bytes()
    for content in (b"", complete[:9], b"[]", b"null", b"{}", b'{"finished": true}', b"\xff\xfe"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"run.json is damaged \(.*\); remove it\.$") as caught:
            read_json(path, "settings", remedy="remove it")
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == content


def test_a_full_disk_is_a_one_line_error_and_leaves_the_old_file_intact(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_atomically(path, ["before"])

    def disk_full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", disk_full)
    with pytest.raises(OSError, match="file could not be written .No space left on device.; all finished files"):
        write_atomically(path, ["after"])
    assert path.read_text() == "before\n"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]

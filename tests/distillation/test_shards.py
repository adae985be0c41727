import pytest

from hf_deqnar.distillation.shards import check_manifest, open_folder, read_shard, write_shard
from hf_deqnar.utils.locks import try_lock

ROWS = [{"text": "Ein Pferd."}, {"text": "zwei\nZeilen\u2028"}]


def test_a_shard_is_read_back_and_any_damage_is_detected(tmp_path):
    path = tmp_path / "00000.jsonl"
    assert read_shard(path, "job") is None
    write_shard(path, "job", ROWS, seconds=1.5)
    header, rows = read_shard(path, "job")
    assert rows == ROWS
    assert header["seconds"] == 1.5
    assert read_shard(path, "other job") is None
    complete = path.read_bytes()
    for cut in range(len(complete)):
        path.write_bytes(complete[:cut])
        assert read_shard(path, "job") is None, cut
    for index in range(len(complete)):
        path.write_bytes(complete[:index] + bytes([complete[index] ^ 1]) + complete[index + 1 :])
        assert read_shard(path, "job") is None, index


def test_resuming_requires_identical_settings(tmp_path):
    output = tmp_path / "out.jsonl"
    folder, fingerprint = open_folder(output, {"corpus": "abc", "num_beams": 5})
    assert open_folder(output, {"corpus": "abc", "num_beams": 5}) == (folder, fingerprint)
    write_shard(folder / "00000.jsonl", fingerprint, ROWS)
    for changed, message in [
        ({"corpus": "abd", "num_beams": 5}, "started with corpus=abc, but now it is abd; choose another output"),
        ({"corpus": "abc", "num_beams": 4}, "started with num_beams=5, but now it is 4"),
        ({"corpus": "abc"}, "started with num_beams=5, but now it is None"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_folder(output, changed)
    for content in ("", "{", "[]"):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match="manifest.json is damaged .*; choose another output or remove"):
            open_folder(output, {"corpus": "abc", "num_beams": 5})
        assert (folder / "manifest.json").read_text() == content


def test_settings_may_change_before_the_first_shard(tmp_path):
    output = tmp_path / "out.jsonl"
    folder, first = open_folder(output, {"num_beams": 5})
    (folder / "ctranslate2").mkdir()
    (folder / "ctranslate2" / "model.bin").write_text("of the previous teacher")
    with try_lock(folder / "00000.lock"), pytest.raises(ValueError, match="started with num_beams=5, but now it is 4"):
        open_folder(output, {"num_beams": 4})  # a shard is in progress
    check_manifest(folder, first)
    assert open_folder(output, {"num_beams": 4})[1] != first
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    with pytest.raises(ValueError, match="Another run with other settings has started"):
        check_manifest(folder, first)


def test_a_file_of_another_origin_is_not_overwritten(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="exists but was not written by this command"):
        open_folder(output, {})
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        open_folder(tmp_path / "absent" / "out.jsonl", {})
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]

import pytest

from hf_deqnar.corpus.locks import held
from hf_deqnar.corpus.shards import begin, check_still_ours, read_shard, write_shard

ROWS = [{"text": "Ein Pferd."}, {"text": "zwei\nZeilen\u2028"}]


def test_a_shard_is_read_back_and_any_damage_is_seen(tmp_path):
    path = tmp_path / "00000.jsonl"
    assert read_shard(path, "work") is None
    write_shard(path, "work", ROWS, seconds=1.5)
    header, rows = read_shard(path, "work")
    assert rows == ROWS
    assert header["seconds"] == 1.5
    assert read_shard(path, "other work") is None
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        assert read_shard(path, "work") is None, cut
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert read_shard(path, "work") is None, place


def test_what_was_begun_goes_on_only_as_it_began(tmp_path):
    output = tmp_path / "out.jsonl"
    folder, fingerprint = begin(output, {"corpus": "abc", "num_beams": 5})
    assert begin(output, {"corpus": "abc", "num_beams": 5}) == (folder, fingerprint)
    write_shard(folder / "00000.jsonl", fingerprint, ROWS)
    for changed, message in [
        ({"corpus": "abd", "num_beams": 5}, "begun with corpus=abc, but now it is abd; choose another output"),
        ({"corpus": "abc", "num_beams": 4}, "begun with num_beams=5, but now it is 4"),
        ({"corpus": "abc"}, "begun with num_beams=5, but now it is None"),
    ]:
        with pytest.raises(ValueError, match=message):
            begin(output, changed)
    for content in ("", "{", "[]"):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match="manifest.json is damaged .*; choose another output or remove"):
            begin(output, {"corpus": "abc", "num_beams": 5})
        assert (folder / "manifest.json").read_text() == content


def test_what_failed_before_its_first_piece_begins_anew(tmp_path):
    output = tmp_path / "out.jsonl"
    folder, first = begin(output, {"num_beams": 5})
    (folder / "ctranslate2").mkdir()
    (folder / "ctranslate2" / "model.bin").write_text("of a teacher that is no longer meant")
    with held(folder / "00000.lock"), pytest.raises(ValueError, match="begun with num_beams=5, but now it is 4"):
        begin(output, {"num_beams": 4})  # somebody is at work
    check_still_ours(folder, first)
    assert begin(output, {"num_beams": 4})[1] != first
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    with pytest.raises(ValueError, match="Another run with other settings has begun"):
        check_still_ours(folder, first)


def test_a_file_of_unknown_origin_is_not_overwritten(tmp_path):
    output = tmp_path / "out.jsonl"
    output.write_text("mine")
    with pytest.raises(FileExistsError, match="exists and nothing says how it was made"):
        begin(output, {})
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        begin(tmp_path / "absent" / "out.jsonl", {})
    assert [file.name for file in tmp_path.iterdir()] == ["out.jsonl"]

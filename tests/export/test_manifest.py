import json
import shutil

import pytest

from hf_deqnar.export.manifest import MANIFEST, is_export, read_manifest, write_manifest

LIMITS = {"source": 64, "canvas": 128}


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "fp32"
    folder.mkdir()
    (folder / "head.onnx").write_bytes(b"some graph")
    (folder / "config.json").write_text("{}")
    write_manifest(folder, "fp32", 18, LIMITS)
    return folder


def test_manifest_round_trip(folder):
    manifest = read_manifest(folder)
    assert manifest["precision"] == "fp32"
    assert manifest["opset"] == 18
    assert manifest["limits"] == LIMITS
    assert manifest["library"].startswith("hf_deqnar ")
    assert set(manifest["files"]) == {"head.onnx", "config.json"}


def test_folder_without_manifest_is_refused_with_the_name_of_its_exports(folder, tmp_path):
    assert is_export(folder)
    assert not is_export(tmp_path)
    with pytest.raises(FileNotFoundError, match="is not an ONNX export.*name .*fp32"):
        read_manifest(tmp_path)
    with pytest.raises(FileNotFoundError, match="create one with hf-deqnar export"):
        read_manifest(tmp_path / "nothing")


def test_every_changed_or_missing_file_is_named(folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "head.onnx").write_bytes(b"some grapH")
    with pytest.raises(ValueError, match="head.onnx differs from the exported file"):
        read_manifest(broken)
    (broken / "head.onnx").unlink()
    with pytest.raises(FileNotFoundError, match="incomplete: head.onnx is missing"):
        read_manifest(broken)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"format": 1, "library": "x", "files": {}}'])
def test_a_damaged_manifest_is_refused(folder, text):
    (folder / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match="is damaged; export the model again"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "int4"),
        ("limits", {}),
        ("files", ["head.onnx"]),
        ("files", {"../secret": "0"}),
        ("files", {"/etc/passwd": "0"}),
        ("files", {"..\\secret.onnx": "0"}),
    ],
)
def test_manifest_without_required_fields_is_refused(folder, field, value):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, field: value}))
    with pytest.raises(ValueError, match="is damaged; export the model again"):
        read_manifest(folder)


def test_another_format_is_refused_with_both_versions(folder):
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 7, "library": "hf_deqnar 9.9"}))
    with pytest.raises(ValueError, match="made by hf_deqnar 9.9 in format 7, but this is hf_deqnar .*, format 4"):
        read_manifest(folder)

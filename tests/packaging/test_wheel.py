"""The wheel: what it contains, and that it translates in a new environment.

The new environment contains this wheel and borrows the other packages, such as torch, from that of the tests:
installing them anew would take minutes and a network. That every imported package is declared is checked by
test_metadata.py.
"""

import email
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hf_deqnar

pytest.importorskip("setuptools", minversion="77", reason="setuptools is part of the test extra")
ROOT = Path(__file__).parents[2]
OFFLINE = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HF_HUB_OFFLINE": "1"}


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that the build leaves no files in the repository."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "LICENSE-WEIGHTS"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "--wheel-dir", target, source, env=OFFLINE)
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_contains_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        contents = {name for name in archive.namelist() if name.startswith("hf_deqnar/")}
    tracked = [file for file in (ROOT / "src" / "hf_deqnar").rglob("*") if file.is_file()]
    expected = {file.relative_to(ROOT / "src").as_posix() for file in tracked if "__pycache__" not in file.parts}
    assert contents == expected
    pretrained = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert {"hf_deqnar/py.typed", *(f"hf_deqnar/pretrained/{name}" for name in pretrained)} <= contents


def test_the_metadata_of_the_wheel_is_complete(wheel):
    with zipfile.ZipFile(wheel) as archive:
        folder = f"hf_deqnar-{hf_deqnar.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        names = archive.namelist()
        scripts = archive.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Version"] == hf_deqnar.__version__
    assert metadata["License-Expression"] == "Apache-2.0 AND CC-BY-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "LICENSE-WEIGHTS"]
    assert {f"{folder}/licenses/LICENSE", f"{folder}/licenses/LICENSE-WEIGHTS"} <= set(names)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"] == "hf_deqnar contributors"
    assert "hf-deqnar = hf_deqnar.cli.main:main" in scripts


def test_the_installed_wheel_translates(wheel, tmp_path):
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    pip = (sys.executable, "-m", "pip", "--quiet", "--python", python)
    run(*pip, "install", "--no-deps", wheel, env=OFFLINE)
    # The other packages are those of this environment. A folder in a .pth file comes after site-packages, and .pth
    # files inside that folder, such as that of an editable hf_deqnar, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    environment = {name: value for name, value in OFFLINE.items() if name != "PYTHONPATH"}
    place = run(python, "-c", "import hf_deqnar; print(hf_deqnar.__file__)", cwd=tmp_path, env=environment).strip()
    assert Path(place).is_relative_to(tmp_path / "venv")
    command = (tmp_path / "venv" / "bin" / "hf-deqnar", "translate", "Where is the train station?")
    assert run(*command, cwd=tmp_path, env=environment).strip() == "Wo ist der Bahnhof?"

"""CONTRIBUTING.md, CHANGELOG.md and CITATION.cff agree with the repository."""

import re
from pathlib import Path

import pytest
import yaml

import hf_deqnar

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PLACES = re.findall(r"^\|[^|]+\| `([^`]+)` \|$", CONTRIBUTING.split("## Where is what")[1].split("\n## ")[0], re.M)
TABLES = {
    "SOLVERS": "models/deqnar/solvers.py",
    "TRANSITIONS": "models/deqnar/transition_deqnar.py",
    "LENGTH_MODELS": "models/deqnar/lengths.py",
    "CHOICES": "models/deqnar/configuration_deqnar.py",
    "TARGETS": "objectives/targets.py",
    "INPUTS": "objectives/inputs.py",
}


def test_the_table_names_at_least_twenty_places():
    assert len(PLACES) >= 20


@pytest.mark.parametrize("path", sorted({*PLACES, *re.findall(r"`((?:src|tests)/[\w/.]+)`", CONTRIBUTING)}))
def test_every_place_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("table", "file"), TABLES.items())
def test_the_tables_to_extend_are_where_the_guide_says(table, file):
    assert f"`{table}`" in CONTRIBUTING
    text = (ROOT / "src" / "hf_deqnar" / file).read_text(encoding="utf-8")
    assert re.search(rf"^{table}\b.*= \{{", text, re.M)


def test_the_latest_entry_of_the_changelog_is_this_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert versions[0] == hf_deqnar.__version__


def test_the_citation_names_this_version_and_the_four_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["version"] == hf_deqnar.__version__
    assert len(citation["references"]) == 4
    for paper in citation["references"]:
        assert {"type", "title", "authors", "year"} <= paper.keys()
        assert paper.keys() & {"doi", "url"}


def test_no_test_needs_data_from_outside_the_repository():
    for file in (ROOT / "tests").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert ("HF_DEQNAR" + "_DATA") not in text, file
        assert ("shared" + "/data") not in text, file

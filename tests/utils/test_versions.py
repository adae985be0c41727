import subprocess
import sys
from importlib import metadata

import pytest

from hf_deqnar.utils import versions
from hf_deqnar.utils.versions import check_transformers


@pytest.mark.parametrize("installed", ["5.22.0", "5.22.3", "5.22.0.dev0"])
def test_tested_versions_are_accepted(installed):
    check_transformers(installed)


@pytest.mark.parametrize("installed", ["4.57.1", "5.9.0", "5.23.0", "5.23.0.dev0", "6.0"])
def test_an_untested_version_is_an_error_that_names_the_remedy(installed):
    with pytest.raises(ImportError, match=rf"but {installed} is installed: pip install 'transformers>=5.22,<5.23'"):
        check_transformers(installed)


def test_a_missing_transformers_is_an_error_that_names_the_remedy(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(versions, "version", missing)
    with pytest.raises(ImportError, match="not installed: pip install 'transformers"):
        check_transformers()


def test_importing_the_package_with_an_untested_version_fails():
    code = "import importlib.metadata as m; m.version = lambda name: '5.23.0'; import hf_deqnar"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "hf_deqnar needs transformers>=5.22,<5.23, but 5.23.0 is installed" in run.stderr

import importlib
import sys

import pytest

from hf_deqnar.utils.import_hooks import HOOKS, after_import, is_executing


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module that has not been imported."""
    (tmp_path / "hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hooked_module"
    sys.modules.pop("hooked_module", None)
    HOOKS.hooks.pop("hooked_module", None)


def test_the_hook_is_called_when_the_module_is_complete(module):
    values = []
    after_import(module, lambda: values.append((sys.modules[module].value, is_executing(module))))
    assert values == []
    importlib.import_module(module)
    assert values == [(1, False)]


def test_the_hook_of_an_imported_module_is_called_at_once(module):
    importlib.import_module(module)
    calls = []
    after_import(module, lambda: calls.append(module))
    assert calls == [module]


def test_a_module_is_reported_as_executing_during_its_import(module, tmp_path):
    text = "from hf_deqnar.utils.import_hooks import is_executing\nincomplete = is_executing(__name__)\n"
    (tmp_path / "hooked_module.py").write_text(text)
    after_import(module, lambda: None)
    assert importlib.import_module(module).incomplete


def test_a_module_that_cannot_be_imported_raises_its_own_error(module, tmp_path):
    (tmp_path / "hooked_module.py").write_text("raise RuntimeError('broken')\n")
    after_import(module, lambda: pytest.fail("the hook must not be called"))
    with pytest.raises(RuntimeError, match="broken"):
        importlib.import_module(module)
    assert not is_executing(module)

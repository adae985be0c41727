"""The scripts silence transformers, which must not affect other tests."""

from ..cli.conftest import _quiet  # noqa: F401, a fixture

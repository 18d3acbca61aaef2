"""What a fork server imports: a wrong name only makes forks slow, so that nothing else shows it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest

from distributed.registry.catalog import get_catalog
from distributed.testing import preload

NAMES = sorted(
    {*preload._MODULES, *(name for spec in get_catalog().backends.values() for name in spec.preload)}
)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_imported_beforehand_exists(name: str) -> None:
    module, _, function = name.partition(":")
    assert find_spec(module) is not None
    assert not function or callable(getattr(import_module(module), function))

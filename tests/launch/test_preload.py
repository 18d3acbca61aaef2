"""What a fork server imports: a wrong name only makes forks slow, so that nothing else shows it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

from distributed.registry.catalog import get_catalog
from distributed.testing import preload
from tests.support import commands

NAMES = sorted(
    {*preload._MODULES, *(name for spec in get_catalog().backends.values() for name in spec.preload)}
)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_imported_beforehand_exists(name: str) -> None:
    module, _, function = name.partition(":")
    assert find_spec(module) is not None
    assert not function or callable(getattr(import_module(module), function))


@pytest.mark.starts_processes
def test_other_frameworks_do_not_take_memory_in_every_fork() -> None:
    heavy = "{'tensorflow', 'deepspeed', 'horovod', 'ray', 'mlflow'}"
    code = f"import sys; print('torch' in sys.modules, {heavy} & set(sys.modules))"
    done = commands.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True set()\n"

"""Python imports this module at its start, so every process of a test has the fault that REVERSION names."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def _table() -> dict[str, Any]:
    """The faults; tests are no package of the environment."""
    spec = spec_from_file_location("reversion_table", Path(__file__).with_name("table.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = module.REVERSIONS
    return found


class _Reverting(MetaPathFinder):
    """Applies a fault as soon as its module is imported."""

    def __init__(self, fault: Any) -> None:
        self.fault = fault

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.fault.module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None
        spec.loader = _Loader(spec.loader, self.fault)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Any, fault: Any) -> None:
        self.loader, self.fault = loader, fault

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self.loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.fault.apply()


if "REVERSION" in os.environ:
    sys.meta_path.insert(0, _Reverting(_table()[os.environ["REVERSION"]]))

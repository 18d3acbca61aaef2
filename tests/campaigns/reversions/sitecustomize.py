"""Python imports this module at its start, so every process of a test has the faults that REVERSION names.

Names are divided by semicolons. They are keys of `REVERSIONS`, of `GROUP_MUTANTS` behind `PREFIX`, or of
`ANSWERS`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc imports half of the standard library, and tests look at what a process has imported
    Loader = MetaPathFinder = object


class _OppositeFp16:
    """CPUs with instructions for fp16 deny them, and others claim them."""

    module = "deepspeed.accelerator.cpu_accelerator"

    def apply(self) -> None:
        accelerator: Any = import_module(self.module).CPU_Accelerator
        present = accelerator.is_fp16_supported
        accelerator.is_fp16_supported = lambda own: not present(own)


ANSWERS = {"opposite fp16": _OppositeFp16()}
"""Answers of other processors, under which every test has to pass; no faults. The tables, which import
more, are not read for them."""


def _fault(name: str) -> Any:
    if name in ANSWERS:
        return ANSWERS[name]
    package = "tests.campaigns.reversions"
    groups = import_module(f"{package}.group_mutants")
    table: dict[str, Any] = import_module(f"{package}.table").REVERSIONS
    return (table | {f"{groups.PREFIX}{key}": fault for key, fault in groups.GROUP_MUTANTS.items()})[name]


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


for _name in filter(None, os.environ.get("REVERSION", "").split(";")):
    sys.meta_path.insert(0, _Reverting(_fault(_name)))

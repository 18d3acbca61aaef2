"""Import DeepSpeed for the device of this rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from distributed.system.processes import environment, filtered_stderr

__all__ = ["import_deepspeed"]


def import_deepspeed(device: str) -> None:
    """Import DeepSpeed, which detects its accelerator at import, without its log lines."""
    if "deepspeed" in sys.modules:
        return
    kind = os.environ.get("DS_ACCELERATOR", device.partition(":")[0])
    with environment({"DS_ACCELERATOR": kind}), filtered_stderr(_is_of_linker), _missing("mlflow"):
        import_module("deepspeed")


@contextmanager
def _missing(name: str) -> Iterator[None]:
    """Hide a package that is not in use: DeepSpeed's autotuner, which no rank runs, would import MLflow,
    which takes three times as long as DeepSpeed itself."""
    # By Python's reference ("The module cache") None stands for what cannot be found.
    modules: dict[str, Any] = sys.modules
    if name in modules:
        yield
        return
    modules[name] = None
    try:
        yield
    finally:
        del modules[name]


def _is_of_linker(line: bytes) -> bool:
    # DeepSpeed probes at import whether it can offload to disks.
    return b"-laio" in line or b"ld returned 1" in line

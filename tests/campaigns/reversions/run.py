"""Run tests in a process of their own, with a fault put back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["FAILED", "NONE", "PASSED", "run_under"]

ROOT = Path(__file__).parents[3]
PASSED, FAILED, NONE = 0, 1, 5
"""Exit codes of pytest: all passed, one failed, none was selected."""


def run_under(fault: str, words: Iterable[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """pytest with `words`, while the fault of that name is put back, beside those of this process.

    Args:
        fault: name of a fault, as `sitecustomize` knows it.
        words: ids of tests, and options.
        timeout: seconds.
    """
    names = [*os.environ.get("REVERSION", "").split(";"), fault]
    environment = {
        **os.environ,
        "REVERSION": ";".join(filter(None, names)),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT)]),
        # Rewritten assertions would import our modules past the hook in sitecustomize, here and in a pytest
        # that a test starts.
        "PYTEST_ADDOPTS": "--assert=plain",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )

"""Modules of tests as scripts on ranks that torchrun started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import commands
from tests.support.forking_python import PRELOAD
from tests.support.ports import free_port

__all__ = ["under_torchrun"]

ROOT = Path(__file__).parents[2]


def under_torchrun(
    python: Path, module: str, *words: str, ranks: int = 2, preload: str = "torch", code: int | None = 0
) -> tuple[str, str]:
    """Run `module` with the arguments `words` on each rank; output and errors of all.

    Args:
        python: the fixture `forking_python`.
        preload: modules that the fork server imports first, with blanks between them.
        code: exit code that torchrun has to have; None for any.
    """
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port", str(free_port())]
    running = commands.start(
        [sys.executable, *torchrun, "-m", module, *words],
        env={**os.environ, "PYTHON_EXEC": str(python), PRELOAD: preload},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    (found,) = commands.finish([running], timeout=300, code=code)
    return found

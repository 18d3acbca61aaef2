"""Run a user's script in this process, as ``python script.py`` would."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from distributed.errors import UserError, did_you_mean


def bundled_script() -> Path:
    """The example that ``train`` runs without ``--script``."""
    return Path(__file__).parent / "bundled" / "digits.py"


def find_script(name: str) -> Path:
    """The absolute path of the script called `name`.

    Raises:
        UserError: no such file; names the nearest one in that folder.
    """
    path = Path(name)
    if path.is_file():
        return path.absolute()
    if path.is_dir():
        raise UserError("is a directory", field="--script", got=name, allowed="a Python file")
    if not path.parent.is_dir():
        raise UserError(f"no such directory {path.parent}", field="--script", got=name)
    files = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    guess = did_you_mean(path.name, files)
    raise UserError(f"no such file.{guess}", field="--script", got=name, remedy="Check the path")


def execute(script: Path, arguments: Sequence[str]) -> None:
    """Run `script` as ``__main__`` with `arguments`; its exceptions and SystemExit come out."""
    with _as_python_would(script, arguments):
        runpy.run_path(str(script), run_name="__main__")


@contextmanager
def _as_python_would(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    argv, path = sys.argv.copy(), list(sys.path)
    sys.argv[:] = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path


def script_traceback(trace: TracebackType | None) -> TracebackType | None:
    """The part of `trace` below runpy, as python itself would print it; all of it without runpy."""
    frame = trace
    while frame is not None and not _in_runpy(frame):
        frame = frame.tb_next
    if frame is None:
        return trace
    while frame is not None and _in_runpy(frame):
        frame = frame.tb_next
    return frame


def _in_runpy(trace: TracebackType) -> bool:
    return bool(trace.tb_frame.f_globals.get("__name__") == "runpy")

"""Lines for the user whose loss does not end a run."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any

from distributed.redaction import redact_text

__all__ = ["flush_output", "print_line", "tolerated", "write_text"]

logger = logging.getLogger("distributed")

_reported: set[str] = set()
"""Names of the streams whose failure is reported."""


def print_line(text: object, stream: IO[str] | None = None) -> bool:
    """Print `text` without secrets and a line break to `stream`, by default stderr, and flush it; whether
    that worked.

    Nothing is raised where the stream is closed or what it leads to is full: the first such failure of a
    stream is logged.
    """
    return write_text(redact_text(f"{text}\n"), stream)


def write_text(text: str, stream: IO[str] | None = None) -> bool:
    """Write what may be the user's own, such as a rank's output, as `print_line` does: as it is."""
    out = sys.stderr if stream is None else stream
    if out is None:  # a program without a terminal, such as pythonw
        return False
    with tolerated(out):
        out.write(text)
        out.flush()
        return True
    return False


@contextmanager
def tolerated(stream: Any) -> Iterator[None]:
    """The block writes to `stream`, and is left without an error where that fails."""
    try:
        yield
    except (OSError, ValueError) as error:
        _report(stream, error)


def flush_output() -> None:
    """Flush stdout and stderr at the end of a process; what cannot be written is lost."""
    for stream in (sys.stdout, sys.stderr):
        write_text("", stream)


def _report(stream: Any, error: Exception) -> None:
    if isinstance(error, OSError):
        _discard(stream)
    name = getattr(stream, "name", None)
    # The log usually goes to stderr; a stream that the program has closed is no news.
    if stream is sys.stderr or not isinstance(error, OSError) or name in _reported:
        return
    _reported.add(str(name))
    logger.warning(
        "%s cannot be written: %s. Training continues, and further output there may be lost. Redirect it to a"
        " file on a disk with free space",
        str(name).strip("<>"),
        error,
    )


def _discard(stream: Any) -> None:
    """Empty the stream's buffer. Python would write it once more at exit, and replace the exit code."""
    with suppress(OSError, ValueError, AttributeError):
        number = stream.fileno()
        kept = os.dup(number)
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, number)
            stream.flush()
        finally:
            os.dup2(kept, number)
            os.close(kept)
            os.close(null)

"""Import TensorFlow without the dozen lines that it prints about the machine before logging can be
configured. Import this before anything that imports TensorFlow.

What is no line of that kind (an error, a warning of Python's, another thread's print) is shown.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_stderr"]

# absl's lines: I0000 00:00:1795184254.499336    7876 port.cc:153] ... Without a GPU there is one of level E.
_CHATTER = re.compile(
    rb"[IW]\d{4} \d\d:\d\d:|E\d{4} \d\d:\d\d:.*cuInit|WARNING: All log messages before absl::"
)


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Keep back what is written to file descriptor 2, and show what is not chatter at the end."""
    sys.stderr.flush()
    try:
        shown = os.dup(2)
    except OSError:  # Standard error is closed: there is nothing to suppress.
        yield
        return
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            kept.seek(0)
            for line in kept:
                if not _CHATTER.match(line):
                    os.write(2, line)


if "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow

        tensorflow.config.list_physical_devices()  # logs once that there is no GPU

"""Import TensorFlow without the dozen lines that it prints about the machine before logging can be
configured. Import this before anything that imports TensorFlow.

What is no line of that kind (an error, a warning of Python's, another thread's print) is shown.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import AbstractContextManager

from distributed.system.processes import filtered_stderr

# absl's lines: I0000 00:00:1795184254.499336    7876 port.cc:153] ... Without a GPU there is one of level E.
_CHATTER = re.compile(
    rb"[IW]\d{4} \d\d:\d\d:|E\d{4} \d\d:\d\d:.*cuInit|WARNING: All log messages before absl::"
)


def quiet_stderr() -> AbstractContextManager[None]:
    """Drop TensorFlow's chatter from what is written to file descriptor 2 inside the ``with``."""
    return filtered_stderr(_CHATTER.match)


if "tensorflow" not in sys.modules:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with quiet_stderr():
        import tensorflow

        tensorflow.config.list_physical_devices()  # logs once that there is no GPU

"""Let one process of a host do what all its ranks would do at the same time, and give them its result."""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

__all__ = ["once_per_host"]


def once_per_host(key: str, work: Callable[[], str]) -> str:
    """The text that `work` returns in the first process of this host that asks for `key`. Processes that ask
    meanwhile wait for it; one whose predecessor was killed does the work itself.

    Args:
        key: equal in the processes of one run, such as the launcher's process and its port.
        work: returns a text that is not empty.

    Raises:
        Exception: what `work` has raised.
    """
    path = _path(key)
    try:
        file = _locked(path)
    except OSError:
        return work()  # no folder for temporary files, or one without locks
    with file:
        # The lock ends with the process that holds it.
        found = file.read().decode()
        if found:
            return found
        try:
            text = work()
            with suppress(OSError):
                file.write(text.encode())
            return text
        finally:
            # Those that wait have it open.
            path.unlink(missing_ok=True)


def _locked(path: Path) -> BinaryIO:
    """The file, after waiting for the processes that have it.

    Raises:
        OSError: it belongs to another user, or cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a file of this user")
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BaseException:
        os.close(descriptor)
        raise
    return cast("BinaryIO", os.fdopen(descriptor, "r+b", buffering=0))


def _path(key: str) -> Path:
    name = hashlib.sha256(f"{os.geteuid()} {key}".encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"distributed-once-{name}")

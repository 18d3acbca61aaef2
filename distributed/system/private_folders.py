"""Temporary folders that name their owners, and the removal of those whose owners were killed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from distributed.system.private_files import write_private

__all__ = ["OWNER", "PrivateFolder", "add_owner", "owned_folder", "start_sweep", "sweep"]

OWNER = ".owner-"
"""Prefix of the files that name a folder's owners, one for each process."""

_PREFIX = "distributed-"
_BOOT = "/proc/sys/kernel/random/boot_id"
_LONGEST = 1000


class PrivateFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder that only this user may enter. If this process is killed, the next `sweep`
    removes it.

    Args:
        prefix: begins its name; ``distributed-`` begins the prefix.

    Raises:
        OSError: it cannot be made or written.
    """

    def __init__(self, prefix: str = _PREFIX) -> None:
        super().__init__(prefix=prefix)
        try:
            add_owner(self.name)
        except BaseException:
            self.cleanup()
            raise


def owned_folder(prefix: str) -> str:
    """As `PrivateFolder`, for a process that leaves the removal to another one, which it makes an owner, too.

    Raises:
        OSError: it cannot be made or written.
    """
    folder = tempfile.mkdtemp(prefix=prefix)
    try:
        add_owner(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def add_owner(folder: str | os.PathLike[str]) -> None:
    """Make this process an owner of `folder`: it is not swept while one of its owners lives.

    Raises:
        OSError: the folder cannot be written.
    """
    owner = {"pid": os.getpid(), "start": _start_of(os.getpid()), **_kernel()}
    write_private(Path(folder, f"{OWNER}{os.getpid()}"), json.dumps(owner).encode())


def start_sweep() -> threading.Thread | None:
    """Sweep the folder of temporary files in a thread, so that nothing waits for a slow disk.

    Returns:
        The thread; None if the process can have no further one.
    """
    thread = threading.Thread(
        target=sweep, args=(tempfile.gettempdir(), _PREFIX), daemon=True, name="sweep-private-folders"
    )
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def sweep(parent: str | os.PathLike[str], prefix: str) -> None:
    """Remove the folders in `parent` whose name begins with `prefix`, that belong to this user, and all of
    whose owners have ended.

    A folder stays if that is not proven: it names no owner, or one of another boot, another host or another
    container, whose processes this one cannot see. Never raises an OSError.
    """
    for folder in _own_folders(parent, prefix):
        with suppress(OSError, ValueError):
            owners = [entry for entry in os.listdir(folder) if entry.startswith(OWNER)]
            if owners and all(_has_ended(_read_owner(Path(folder, name))) for name in owners):
                _remove(folder)


def _own_folders(parent: str | os.PathLike[str], prefix: str) -> Iterator[str]:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(prefix) and entry.is_dir(follow_symlinks=False):
                with suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                        yield entry.path


def _remove(folder: str) -> None:
    """The owners' files last: a removal that is interrupted is completed by the next sweep."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            elif not entry.name.startswith(OWNER):
                os.unlink(entry.path)
    shutil.rmtree(folder)


def _read_owner(path: Path) -> dict[str, Any]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is no file")
        owner = json.loads(file.read(_LONGEST))
    if not isinstance(owner, dict):
        raise ValueError(f"{path} names no owner")
    return owner


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether it is proven that the process has ended; pids are used again, start times are not."""
    pid, start = owner.get("pid"), owner.get("start")
    here = {key: owner.get(key) for key in _kernel()} == _kernel()
    if not here or not isinstance(pid, int) or not isinstance(start, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # A /proc that hides processes shows nothing of one that lives.
    return _start_of(pid) not in (start, None)


def _start_of(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot: 0 of a zombie, None if it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *rest = fields.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[18])


def _kernel() -> dict[str, Any]:
    """What makes pids and start times comparable: the boot, and the namespaces of pids and of clocks."""
    return {
        "boot": Path(_BOOT).read_text(encoding="ascii").strip(),
        "namespaces": [_namespace("pid"), _namespace("time")],
    }


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0  # a kernel without this kind

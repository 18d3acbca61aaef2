"""File layers that fail at a chosen operation: once, from then on, or by ending the process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, BinaryIO, ClassVar

from distributed.checkpoint.filesystem import FileLayer
from distributed.checkpoint.object_store import ObjectLayer


def no_space(path: str) -> None:
    """The fault of a full disk. Raises OSError."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def end_process(path: str) -> None:
    """The fault of a process that is killed: nothing after it runs."""
    os._exit(9)


class CountedLayer(FileLayer):
    """Count the writing operations; the one numbered `fail_at` fails instead.

    A `write` fails when half of its bytes are written.

    Args:
        fail_at: number of the operation, from 0; beyond the last one, nothing fails.
        fault: function called there with the path, or the file's description.
        lasting: whether all later ones fail, too, as if the process or the store were gone.

    Attributes:
        done: operations so far, by name.
        failed: first operation that failed, if any.
    """

    OPERATIONS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, fail_at: int, *args: Any, fault: Callable[[str], None] = no_space, lasting: bool = False
    ) -> None:
        super().__init__(*args)
        self.fail_at, self.fault, self.lasting = fail_at, fault, lasting
        self.count, self.failed = 0, ""
        self.done: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in type(self).OPERATIONS:
            return found

        def counted(*args: Any) -> Any:
            number, self.count = self.count, self.count + 1
            self.done.append(name)
            if number == self.fail_at or (self.lasting and number > self.fail_at):
                self.failed = self.failed or name
                if name == "write":
                    found(args[0], bytes(args[1])[: len(args[1]) // 2])
                    args[0].flush()
                self.fault(str(args[0]))
            return found(*args)

        return counted


class FaultyLayer(CountedLayer):
    """A disk with a fault."""

    OPERATIONS = ("make_directory", "open", "write", "fsync", "fsync_directory", "rename", "remove")


class UnsyncedLayer(FaultyLayer):
    """A disk that loses power: of files that were not synced, half of what the system has is lost,
    and the process ends."""

    def __init__(self, fail_at: int) -> None:
        super().__init__(fail_at, fault=self._lose_power)
        self._unsynced: dict[int, str] = {}

    def open(self, path: str) -> BinaryIO:
        """As `FileLayer.open`."""
        file = super().open(path)
        self._unsynced[file.fileno()] = path
        return file

    def fsync(self, file: BinaryIO) -> None:
        """As `FileLayer.fsync`."""
        super().fsync(file)
        self._unsynced.pop(file.fileno(), None)

    def _lose_power(self, path: str) -> None:
        for name in filter(os.path.exists, self._unsynced.values()):
            os.truncate(name, os.stat(name).st_size // 2)
        os._exit(9)


class FaultyObjects(CountedLayer, ObjectLayer):
    """A store with a fault."""

    OPERATIONS = ("open", "write", "put", "copy", "remove")

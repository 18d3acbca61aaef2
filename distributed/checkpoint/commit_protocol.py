"""Commit and remove checkpoints: by renaming a directory, or by its manifest.

A file system that renames writes into a hidden sibling and renames it when every byte is on the disk.
A store that does not writes into a folder of its own below the checkpoint's name, and puts the
manifest, which names the folder, last: no checkpoint is there before it, and none is once it is gone.

A checkpoint whose step is saved again in another state is replaced in both in the second way: the new
manifest takes the place of the old one in one operation, and the old files are removed behind it.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from abc import ABC, abstractmethod

from distributed.checkpoint.file_names import LEFTOVER, MANIFEST, STEP
from distributed.checkpoint.filesystem import FileLayer, unseal
from distributed.checkpoint.object_store import ObjectLayer
from distributed.checkpoint.reader import verify

__all__ = ["Commits", "commits_of"]

logger = logging.getLogger("distributed")

_ATTEMPT = re.compile(r"attempt-[0-9a-f]{16}")


class Commits(ABC):
    """Commits and removes the checkpoints of one directory. Every method raises OSError."""

    def __init__(self, files: FileLayer, directory: str) -> None:
        self.files, self.directory = files, directory

    @abstractmethod
    def staging(self, final: str, replaces: bool = False) -> str:
        """A unique staging path for the checkpoint `final`.

        Args:
            replaces: `final` is committed and good, and `replace` will take it.
        """

    def folder(self, staging: str) -> str:
        """Where `staging` will lie below the checkpoint; empty when it becomes the checkpoint."""
        name = os.path.basename(staging)
        return name if _ATTEMPT.fullmatch(name) else ""

    @abstractmethod
    def commit(self, staging: str, final: str, manifest: bytes) -> None:
        """Make the files in `staging` the checkpoint `final`; a damaged one there is replaced."""

    def replace(self, staging: str, final: str, manifest: bytes) -> None:
        """Make the files in `staging` the checkpoint `final` instead of those of the good one there."""
        target, draft = os.path.join(final, MANIFEST), os.path.join(staging, MANIFEST)
        # Other folders may be those of a process that is still writing: they are left to the sweep.
        own = self._folder_of(final)
        old = [name for name in self._parts(final) if name == own or not _ATTEMPT.fullmatch(name)]
        self.files.fsync_directory(staging)
        self.files.fsync_directory(final)
        self.files.publish(target, manifest, draft)
        self.files.fsync_directory(final)
        for name in old:
            self.discard(os.path.join(final, name))

    def _parts(self, path: str) -> list[str]:
        """Names of what lies beside a checkpoint's manifest."""
        return [name for name in self.files.names(path) if name != MANIFEST]

    def _folder_of(self, path: str) -> str | None:
        """The folder that a checkpoint's manifest names; empty when there is none, None when it cannot
        be read."""
        try:
            name = str(unseal(self.files.read(os.path.join(path, MANIFEST))).get("folder", ""))
        except FileNotFoundError:
            return ""
        except ValueError:
            return None
        return name if not name or _ATTEMPT.fullmatch(name) else None

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the checkpoints that were committed, in any order, damaged ones included."""

    @abstractmethod
    def exists(self, final: str) -> bool:
        """Whether a checkpoint was committed at `final`; it may be damaged."""

    @abstractmethod
    def drop(self, path: str) -> None:
        """Remove a checkpoint, so that no moment of it looks like one. Logs instead of raising."""

    @abstractmethod
    def move(self, path: str, directory: str) -> None:
        """Move a checkpoint into another directory, keeping its name."""

    @abstractmethod
    def move_file(self, path: str, directory: str) -> None:
        """Move one file into another directory, keeping its name."""

    def leftovers(self) -> list[str]:
        """Paths of what interrupted saves and removals left."""
        found = []
        for name in self.files.names(self.directory):
            path = os.path.join(self.directory, name)
            if LEFTOVER.fullmatch(name):
                found.append(path)
            elif STEP.fullmatch(name):
                found += self._interrupted(path)
        return found

    @abstractmethod
    def _interrupted(self, path: str) -> list[str]:
        """What an interrupted save left inside the checkpoint at `path`."""

    def discard(self, path: str) -> None:
        """Remove what is no checkpoint. Logs instead of raising."""
        try:
            self.files.remove(path)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("a leftover cannot be removed and stays until the next run: %s", error)

    def hidden(self, kind: str, name: str) -> str:
        """A path beside the checkpoints that readers pass over."""
        return os.path.join(self.directory, f".{kind}-{name}-{secrets.token_hex(8)}")


class RenameCommits(Commits):
    """A directory is renamed when it is complete."""

    def staging(self, final: str, replaces: bool = False) -> str:
        return _attempt(final) if replaces else self.hidden("tmp", os.path.basename(final))

    def commit(self, staging: str, final: str, manifest: bytes) -> None:
        self.files.write_file(os.path.join(staging, MANIFEST), manifest)
        self.files.fsync_directory(staging)
        if self.exists(final):
            refuse_good(final)
            self.drop(final)
        # Fails where a complete one has appeared since.
        self.files.rename(staging, final)
        self.files.fsync_directory(self.directory)

    def names(self) -> list[str]:
        return [name for name in self.files.names(self.directory) if STEP.fullmatch(name)]

    def exists(self, final: str) -> bool:
        return self.files.exists(final)

    def drop(self, path: str) -> None:
        doomed = self.hidden("gc", os.path.basename(path))
        try:
            self.files.rename(path, doomed)
        except OSError as error:
            logger.warning("an old checkpoint cannot be removed: %s", error)
        else:
            self.discard(doomed)

    def move(self, path: str, directory: str) -> None:
        self.files.rename(path, os.path.join(directory, os.path.basename(path)))

    move_file = move

    def _interrupted(self, path: str) -> list[str]:
        """What a replacement of the checkpoint at `path` left that was interrupted before or behind its
        commit."""
        parts = self._parts(path)
        attempts = [name for name in parts if _ATTEMPT.fullmatch(name)]
        kept = self._folder_of(path) if attempts else None
        if kept is None:
            return []
        return [os.path.join(path, name) for name in (parts if kept else attempts) if name != kept]


class ManifestCommits(Commits):
    """The manifest is put last, and only where there is none; it is removed first."""

    def __init__(self, files: ObjectLayer, directory: str) -> None:
        super().__init__(files, directory)
        self.files: ObjectLayer = files

    def staging(self, final: str, replaces: bool = False) -> str:
        return _attempt(final)

    def commit(self, staging: str, final: str, manifest: bytes) -> None:
        target = os.path.join(final, MANIFEST)
        try:
            self.files.put(target, manifest, True)
        except FileExistsError:
            # A put that was answered too late is tried again, and then meets itself.
            if self.files.read(target) != manifest:
                self._replace(target, final, manifest)

    def _replace(self, target: str, final: str, manifest: bytes) -> None:
        """Put `manifest` where another one is, unless that one is good: someone else was first."""
        refuse_good(final)
        # Other folders may be those of a process that is still writing: they are left to the sweep.
        old = self._folder_of(final)
        self.files.remove(target)
        self.files.put(target, manifest, True)
        if old:
            self.discard(os.path.join(final, old))

    def names(self) -> list[str]:
        return [
            name
            for name in self.files.names(self.directory)
            if STEP.fullmatch(name) and self.exists(os.path.join(self.directory, name))
        ]

    def exists(self, final: str) -> bool:
        return self.files.exists(os.path.join(final, MANIFEST))

    def drop(self, path: str) -> None:
        try:
            self.files.remove(os.path.join(path, MANIFEST))
        except FileNotFoundError:
            pass  # An earlier removal was interrupted; remove the rest.
        except OSError as error:
            logger.warning("an old checkpoint cannot be removed: %s", error)
            return
        self.discard(path)

    def move(self, path: str, directory: str) -> None:
        target = os.path.join(directory, os.path.basename(path))
        for folder in self.files.names(path):
            for name in self.files.sizes(os.path.join(path, folder)) if folder != MANIFEST else ():
                self.files.copy(os.path.join(path, folder, name), os.path.join(target, folder, name))
        self.files.copy(os.path.join(path, MANIFEST), os.path.join(target, MANIFEST))
        self.drop(path)

    def move_file(self, path: str, directory: str) -> None:
        self.files.copy(path, os.path.join(directory, os.path.basename(path)))
        self.files.remove(path)

    def _interrupted(self, path: str) -> list[str]:
        """Folders of a checkpoint that its manifest does not name; none when it cannot be read."""
        own = self._folder_of(path)
        if own is None:
            return []
        names = [name for name in self.files.names(path) if _ATTEMPT.fullmatch(name) and name != own]
        return [os.path.join(path, name) for name in names]


def _attempt(final: str) -> str:
    return os.path.join(final, f"attempt-{secrets.token_hex(8)}")


def refuse_good(final: str) -> None:
    """Raise FileExistsError unless the checkpoint at `final` is damaged and may be replaced."""
    if not verify(final):
        raise FileExistsError(f"another process has committed {final}")
    logger.warning("replacing %s, which is damaged", final)


def commits_of(files: FileLayer, directory: str) -> Commits:
    """The rule that `files` can follow."""
    if isinstance(files, ObjectLayer):
        return ManifestCommits(files, directory)
    return RenameCommits(files, directory)

"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """A path in the same folder. The file written there replaces `path` when the block ends without an
    error, and is removed otherwise."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_whole(path: Path, data: bytes, mode: int) -> None:
    """Write `path` whole or not at all, with `mode` less the user's umask; it is not flushed to disk."""
    with draft_of(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


def write_private(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `path` whole or not at all, readable by this user only."""
    write_whole(Path(path), data, 0o600)

"""What a target renders, and how it reaches the disk: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributed.errors import UserError
from distributed.system.private_files import write_whole

__all__ = ["Rendered", "write"]


@dataclass(frozen=True)
class Rendered:
    """What a target makes of a job.

    Attributes:
        files: contents by path relative to the output directory.
        submit: the one command that hands the job to the cluster.
        notes: what the user should know, one sentence each.
        executable: those of `files` that are programs.
    """

    files: Mapping[str, str]
    submit: str
    notes: list[str] = field(default_factory=list)
    executable: frozenset[str] = frozenset()


def write(rendered: Rendered, output: Path, force: bool) -> list[Path]:
    """Write the files below `output`, which is made when missing; returns their paths.

    Raises:
        UserError: a file exists and `force` was not given, or the directory cannot be written to.
    """
    paths = [output / name for name in rendered.files]
    existing = [str(path) for path in paths if path.exists() or path.is_symlink()]
    if existing and not force:
        raise UserError(
            f"there is already {', '.join(existing)}; nothing was written",
            field="--output",
            got=str(output),
            remedy="Choose another directory, or overwrite with --force",
        )
    try:
        for path, (name, text) in zip(paths, rendered.files.items(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, text.encode("utf-8"), 0o777 if name in rendered.executable else 0o666)
    except OSError as error:
        raise UserError(f"cannot write there: {error}", field="--output", got=str(output)) from None
    return paths

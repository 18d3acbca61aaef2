"""The files that a target renders, written all or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from distributed.errors import UserError
from distributed.system.private_files import write_whole


@dataclass(frozen=True)
class Rendered:
    """The files of a job for one target.

    Attributes:
        files: contents by path relative to the output directory.
        submit: command that submits the job to the cluster.
        notes: notes for the user, one sentence each.
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
            f"{', '.join(existing)} already exists; nothing was written",
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

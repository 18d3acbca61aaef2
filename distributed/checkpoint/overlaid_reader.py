"""A checkpoint whose model, optimizer and scheduler are those of another one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.schema import EXTRA_STATE

__all__ = ["OverlaidReader"]


class OverlaidReader(PortableReader):
    """Reads progress, random numbers and what ranks hold for themselves from one checkpoint, and from another
    what the caller's objects hold.

    Args:
        path: of the checkpoint.
        over: path of the other one. Without an optimizer, that of `path` is read.

    Raises:
        UserError: as `PortableReader`.
    """

    def __init__(self, path: str, over: str) -> None:
        super().__init__(path)
        self._over = PortableReader(over)
        self._prefixes = ("model", EXTRA_STATE, *(["optimizer."] if self._over.groups else []))
        self.aliases, self.omitted = self._over.aliases, {}
        if self._over.groups:
            self.groups, self.scalars = self._over.groups, self._over.scalars
        self.extra = {**self.extra, **self._over.extra["given"]}

    def tensors(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        saved, over = super().tensors(), self._over.tensors()
        return {tensor: shape for tensor, shape in saved.items() if not self._is_over(tensor[0])} | dict(over)

    def dtype(self, key: str, name: str) -> str:
        return self._over.dtype(key, name) if self._is_over(key) else super().dtype(key, name)

    def read(self, key: str, name: str, start: int = 0, length: int | None = None) -> Any:
        if self._is_over(key):
            return self._over.read(key, name, start, length)
        return super().read(key, name, start, length)

    def read_box(self, key: str, name: str, offsets: tuple[int, ...], lengths: tuple[int, ...]) -> Any:
        if self._is_over(key):
            return self._over.read_box(key, name, offsets, lengths)
        return super().read_box(key, name, offsets, lengths)

    def close(self) -> None:
        super().close()
        self._over.close()

    def _is_over(self, key: str) -> bool:
        return key.startswith(self._prefixes)

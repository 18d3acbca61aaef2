"""Which sampled parameters a trial reads: of one that nothing reads, a search would report a best value."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, SupportsIndex

__all__ = ["SampledParameters", "watched_arguments"]


class SampledParameters(dict[str, Any]):
    """The parameters of a trial. What takes them all, such as ``**parameters``, has read them all.

    Attributes:
        unread: names of parameters whose values were not read yet.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        super().__init__(parameters)
        self.unread = set(parameters)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.unread.discard(name)
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return super().setdefault(name, default)

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        self.unread.discard(name)
        return name, value

    def __iter__(self) -> Iterator[str]:
        # Its presence alone makes dict(...) and ** call __getitem__.
        return super().__iter__()

    def items(self) -> Any:
        self.unread.clear()
        return super().items()

    def values(self) -> Any:
        self.unread.clear()
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)


class _Arguments(list[str]):
    """A `sys.argv` that notes whether anything but the name of the program was read."""

    read = False

    def __getitem__(self, index: Any) -> Any:
        self.read = self.read or index != 0
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.read = True
        return super().__iter__()

    def __contains__(self, word: object) -> bool:
        self.read = True
        return super().__contains__(word)

    def pop(self, index: SupportsIndex = -1) -> str:
        self.read = True
        return super().pop(index)


@contextmanager
def watched_arguments(flags: Mapping[str, str]) -> Iterator[set[str]]:
    """Watch what a script in this process does with its arguments.

    Args:
        flags: name of a parameter -> the flag that carries it.

    Yields:
        A set that holds, at the end, the names that the script did not read: all of them if it never read
        ``sys.argv``, and those that a parser returned as unknown.
    """
    unread: set[str] = set()
    known = argparse.ArgumentParser.parse_known_args

    def parse(*args: Any, **kwargs: Any) -> Any:
        found, rest = known(*args, **kwargs)
        unread.update(name for name, flag in flags.items() if flag in rest)
        return found, rest

    before, sys.argv = sys.argv, _Arguments(sys.argv)
    # argparse has no hook for the arguments that a parser does not know.
    argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    try:
        yield unread
    finally:
        argparse.ArgumentParser.parse_known_args = known  # type: ignore[method-assign]
        if not getattr(sys.argv, "read", True):
            unread.update(flags)
        sys.argv = before

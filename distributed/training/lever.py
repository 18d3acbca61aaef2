"""Lever: a setting of memory or speed that has changed a model in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

__all__ = ["Forwards", "Lever"]


class Lever(ABC):
    """What was changed, to be undone."""

    @abstractmethod
    def undo(self) -> None:
        """Give the model back as it was."""

    def explained(self) -> AbstractContextManager[None]:
        """Raise errors that it causes in backward as errors of the configuration."""
        return nullcontext()


class Forwards(Lever):
    """Modules whose forward was replaced.

    Args:
        forwards: by module.
    """

    def __init__(self, forwards: Sequence[tuple[nn.Module, Any]]) -> None:
        self._before = [(module, vars(module).get("forward")) for module, _ in forwards]
        for module, forward in forwards:
            module.forward = forward

    def undo(self) -> None:
        for module, forward in self._before:
            vars(module).pop("forward", None)
            if forward is not None:
                module.forward = forward

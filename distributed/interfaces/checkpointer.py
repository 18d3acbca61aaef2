"""Checkpointer: where committed states live. A checkpoint exists only when it is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.state import StateReader

__all__ = ["Checkpointer"]


class Checkpointer(ABC):
    """Saves and finds portable checkpoints under one directory."""

    @abstractmethod
    def save(self, backend: Backend, extra: dict[str, Any], rank_extra: dict[str, Any]) -> str:
        """Write and commit one checkpoint; every rank calls. Returns its path.

        Args:
            backend: exports this rank's share and provides the barrier.
            extra: JSON-able state that is the same on all ranks: progress, scheduler, config.
            rank_extra: JSON-able state of this rank: random number generators.

        Raises:
            OSError: the directory cannot be written. What was committed before stays.
        """

    @abstractmethod
    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, None when there is none."""

    @abstractmethod
    def open(self, path: str) -> StateReader:
        """Open a committed checkpoint.

        Raises:
            UserError: the checkpoint is missing, incomplete or damaged; the message names the file.
        """

"""Launcher: starts the ranks of one node and watches over them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from distributed.plan import RunPlan

__all__ = ["Launcher", "RankCommand"]


@dataclass(frozen=True)
class RankCommand:
    """What every rank runs.

    Attributes:
        argv: the command, the same for all ranks.
        env: variables besides those that tell a rank its place.
        folder: the run's private folder: ranks leave ``error_<rank>.json`` there.
    """

    argv: Sequence[str]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)


class Launcher(ABC):
    """Starts `plan.local_size` ranks of this node and returns when all have ended."""

    @abstractmethod
    def run(self, plan: RunPlan, command: RankCommand) -> None:
        """Run `command` on every rank; leaves no process behind, however it ends.

        Raises:
            WorkerError: a rank failed; names the first one that did.
            UserError: a rank failed on a user's mistake.
        """

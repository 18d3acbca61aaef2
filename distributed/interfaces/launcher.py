"""Launcher: starts and monitors the ranks of one node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan

__all__ = ["Launcher", "RankCommand", "Supervisor"]


@dataclass(frozen=True)
class RankCommand:
    """The command of every rank.

    Attributes:
        argv: command line, the same for all ranks.
        env: variables besides those of the rank's number and address.
        folder: the run's private folder: ranks leave ``error_<rank>.json`` there.
        target: ``package.module:function``, which does the same as `argv` for a launcher whose
            processes run already: called with the folder once a rank's variables are set, it
            returns the exit status.
    """

    argv: Sequence[str]
    folder: Path
    env: Mapping[str, str] = field(default_factory=dict)
    target: str = "distributed.launch.rank_process:run_folder"


class Supervisor(Protocol):
    """Runs this host's ranks once.

    Attributes:
        received_signal: name of the signal that this process received; None without one.
    """

    received_signal: str | None

    def run(self) -> None:
        """As `Launcher.run`."""

    def request_stop(self) -> None:
        """Make all ranks save at the same step and end."""


class Launcher(ABC):
    """Starts `plan.local_size` ranks of this node and returns when all have ended."""

    @abstractmethod
    def run(self, plan: RunPlan, command: RankCommand) -> None:
        """Run `command` on every rank; leaves no process behind, however it ends.

        Raises:
            WorkerError: a rank failed; names the first one that did.
            UserError: a rank failed on a user's mistake.
        """

    def prepare(self, plan: RunPlan) -> None:
        """Begin what `run` will need, while the task is packed. `run` may follow or not."""
        return

    def num_gpus(self, config: DistributedConfig) -> int | None:
        """GPUs that its ranks can have, over all nodes; None for those that this host shows.

        Raises:
            UserError: they are on a cluster that does not answer.
        """
        return None

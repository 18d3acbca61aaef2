"""SearchEngine: runs the trials of a search over hyperparameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Search", "SearchEngine", "TrialEnd"]


@dataclass(frozen=True)
class Search:
    """What is asked of an engine.

    Attributes:
        folder: the search's own, absolute; every node that runs trials sees it.
        space: name -> a value, the engine's own object, or a `Range` of
            `distributed.operations.tuning.search_space`.
        num_samples: how often the space is sampled; a grid multiplies it.
        num_gpus: GPUs for all trials together, or as many CPU slots where there is none; None is all.
        num_cpus: number of CPU slots; None derives it from `num_gpus`.
        trials_per_gpu: trials that share a GPU or slot.
        ranks_per_trial: ranks that each trial may start, all on one node.
        max_concurrent: most trials at a time; None is as many as fit.
        scheduler: ``asha``, ``pbt``, the engine's own object, or None.
        scheduler_options: for the scheduler's constructor, by the engine's names.
        grace_period: epochs before ``asha`` may stop a trial, and between the changes of ``pbt``.
        seed: of the samples.
        time_limit: seconds for all trials together; None is no limit.
        address: of the cluster; None for the one connected to, or one of this host's own.
        resume: whether to resume the search in `folder`.
    """

    folder: str
    space: Mapping[str, Any]
    num_samples: int
    num_gpus: int | None = None
    num_cpus: int | None = None
    trials_per_gpu: int = 1
    ranks_per_trial: int = 1
    max_concurrent: int | None = None
    scheduler: Any = None
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    grace_period: int = 1
    seed: int = 0
    time_limit: float | None = None
    address: str | None = None
    resume: bool = False


@dataclass(frozen=True)
class TrialEnd:
    """How the engine saw a trial end.

    Attributes:
        name: of the trial, and of its folder.
        parameters: what it was last given.
        failed: it ended by an error.
        error: failure as seen by the engine, for a trial that could not report it.
    """

    name: str
    parameters: dict[str, Any]
    failed: bool = False
    error: str | None = None


class SearchEngine(ABC):
    """Runs trials where there is room for them, and stops the poor ones early."""

    @abstractmethod
    def describe(self, space: Mapping[str, Any]) -> dict[str, str]:
        """Each parameter of `space` in words, the same for the same ranges.

        Raises:
            UserError: a range that cannot be sampled; names the parameter.
        """

    @abstractmethod
    def hands_over(self, search: Search) -> int:
        """Number of epochs between checkpoints of a trial, from which it or another trial resumes; 0 if
        the scheduler needs none.

        Raises:
            UserError: it knows no such scheduler.
        """

    @abstractmethod
    def num_trials(self, search: Search) -> int:
        """How many trials it comes to."""

    @abstractmethod
    def run(self, search: Search) -> list[TrialEnd]:
        """Run every trial by `distributed.operations.tuning.trial.run_trial`, and return how they ended:
        those that were made before a time limit, or a hopeless trial, ended the search.

        Raises:
            UserError: a trial exceeds the resources, or the address does not respond.
        """

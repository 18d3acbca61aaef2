"""TrainState: everything besides model and optimizer that a checkpoint and a second `fit` hold."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.data import Feed
from distributed.interfaces.backend import Backend
from distributed.interfaces.task import Progress
from distributed.training.callback_runner import CallbackRunner
from distributed.training.loss_sum import as_floats
from distributed.training.schedule import Schedule

BEFORE_ORDERS = {"name": "randperm"}
"""The order of a run whose checkpoints name none."""


def mean(total: float, count: float) -> float:
    """``total / count``; `total` if nothing counted, as with masked tokens. A count may be below 1."""
    return total / count if count else total


@dataclass(frozen=True)
class Snapshot:
    """A copy of a `TrainState` as plain data.

    Attributes:
        common: equal on all ranks: ``progress``, ``order`` of the samples, ``batch``, ``scheduler``,
            ``lineage``, ``frozen``, ``hyperparameters``, and rank 0's ``callbacks`` and what other objects
            have ``held``.
        rank: of this rank: ``rng``, ``records`` and ``stream``.
    """

    common: dict[str, Any]
    rank: dict[str, Any]


class OpenEpoch:
    """The losses of the current epoch, so that a resumed epoch has the mean of an uninterrupted one.

    Attributes:
        sums: loss and count over all ranks, of the steps that were reduced.
        steps: (loss sum, count, learning rate) of this rank, of each step since; possibly on the device.
    """

    def __init__(self) -> None:
        self.sums = [0.0, 0.0]
        self.steps: list[tuple[Any, Any, float]] = []
        self._resumed = False

    def begin(self) -> None:
        """Start an epoch: empty, unless `restore` has just loaded its first part."""
        if not self._resumed:
            self.sums, self.steps = [0.0, 0.0], []
        self._resumed = False

    def close_interval(self, loss: float, count: float) -> None:
        """Add the reduced sums of the open steps, and begin a new interval."""
        self.sums[0] += loss
        self.sums[1] += count
        self.steps = []

    def capture(self) -> dict[str, Any]:
        """``sums``, and ``steps`` as numbers."""
        losses, counts = as_floats([s[0] for s in self.steps]), as_floats([s[1] for s in self.steps])
        rates = [float(s[2]) for s in self.steps]
        return {"sums": list(self.sums), "steps": list(zip(losses, counts, rates, strict=True))}

    def restore(self, saved: Sequence[Mapping[str, Any]], rank: int, size: int) -> None:
        """Load the records of all ranks that saved. A different number of ranks adds them up on rank 0."""
        own = saved[rank : rank + 1] if len(saved) == size else saved if rank == 0 else []
        together = zip(*(state["steps"] for state in own), strict=True)
        steps = [(sum(s[0] for s in step), sum(s[1] for s in step), step[0][2]) for step in together]
        if not own:
            steps = [(0.0, 0.0, step[2]) for step in saved[0]["steps"]]
        self.sums, self.steps, self._resumed = list(saved[0]["sums"]), steps, True


class TrainState:
    """What a checkpoint, a second `fit` and an elastic round hold besides model and optimizer.

    Args:
        progress: cursor and counters; `restore` overwrites it in place.
        feed: the training data, None when the caller brings each batch.
        model_axes: `ParallelDims.model_axes` of the run.

    Attributes:
        lineage: identifies the run over restarts; None before its first checkpoint.
        frozen_at_start: digests of the parameters that were frozen when the run began; None if none may be
            left out of checkpoints.
        hyperparameters: with which each parameter group was built.
        open_epoch: the records of the current epoch.
    """

    def __init__(
        self,
        progress: Progress,
        schedule: Schedule,
        callbacks: CallbackRunner,
        feed: Feed | None,
        model_axes: str = "",
    ) -> None:
        self.model_axes = model_axes
        self.progress, self.schedule, self.callbacks, self.feed = progress, schedule, callbacks, feed
        self.lineage: str | None = None
        self.frozen_at_start: dict[str, str] | None = None
        self.hyperparameters: list[dict[str, Any]] = []
        self.open_epoch = OpenEpoch()

    def capture(self) -> Snapshot:
        """Copy the state. Not collective."""
        inside = bool(self.progress.samples)
        return Snapshot(
            {
                "progress": asdict(self.progress),
                "order": None if self.feed is None else self.feed.order,
                "batch": None if self.feed is None else self.feed.batch,
                "scheduler": self.schedule.state_dict(),
                "lineage": self.lineage,
                "frozen": self.frozen_at_start,
                "hyperparameters": self.hyperparameters,
                "callbacks": self.callbacks.states(),
                "held": self.callbacks.held_state(),
                "model_axes": self.model_axes,
            },
            {
                "rng": capture_rng(),
                "records": self.open_epoch.capture() if inside else {"sums": [0.0, 0.0], "steps": []},
                # At the last step taken, whatever was read ahead; None for data with indices.
                "stream": self.feed.state if self.feed is not None and inside else None,
            },
        )

    def restore(self, common: Mapping[str, Any], rank: Mapping[str, Any]) -> None:
        """Load both halves of a `Snapshot`, except for records. What is missing stays as it is.

        Args:
            rank: `Snapshot.rank`; without ``rng`` when another number of ranks saved it.
        """
        saved = common.get("progress", {})
        for item in fields(Progress):
            if item.name in saved:
                setattr(self.progress, item.name, saved[item.name])
        self.lineage = common.get("lineage")
        if self.frozen_at_start is not None:
            self.frozen_at_start |= common.get("frozen") or {}
        self.schedule.load_state_dict(common.get("scheduler"))
        self.callbacks.restore(common.get("callbacks", []))
        self.callbacks.restore_held(common.get("held", {}))
        if self.feed is not None:
            inside = self.progress.epoch if self.progress.samples else None
            self.feed.continue_order(common.get("order", BEFORE_ORDERS), inside)
        if self.feed is not None and rank.get("stream") is not None:
            self.feed.restore(rank["stream"])
        # Last, because the lines above may draw random numbers.
        if "rng" in rank:
            restore_rng(rank["rng"])

    def keep_frozen(self, digests: dict[str, str]) -> None:
        """Keep the digests of frozen parameters; those that `restore` loads take precedence."""
        self.frozen_at_start = digests

    def keep_hyperparameters(self, groups: list[dict[str, Any]]) -> None:
        """Keep the hyperparameters with which the optimizer was built."""
        self.hyperparameters = groups

    def name_run(self, backend: Backend, name: str = "") -> str:
        """The run's lineage: where there is none yet, `name` on rank 0, or drawn there. Collective."""
        if self.lineage is None:
            self.lineage = str(backend.broadcast_object(name or secrets.token_hex(16)))
        return self.lineage

    @property
    def shares_stream(self) -> bool:
        """Whether every rank reads the same stream, so that rank 0's position is that of all."""
        return self.feed is not None and not self.feed.source.shards_itself

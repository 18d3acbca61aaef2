"""RecordingMixin: what a step leaves behind, reduced and logged once an interval."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from distributed.errors import UserError, WorkerError
from distributed.resilience.divergence import checksum, explain_divergence
from distributed.resilience.preemption import asked
from distributed.training.phase_timers import PHASES, find_straggler, gpu_utilisation, memory_metrics

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.backend import Backend
    from distributed.interfaces.history import History
    from distributed.interfaces.placement import World
    from distributed.interfaces.task import Progress
    from distributed.training.phase_timers import PhaseTimers

__all__ = ["RecordingMixin", "not_finite"]

logger = logging.getLogger("distributed")

_SENT = (*PHASES, "other", "checksum")
_TIMED = tuple(phase for phase in PHASES if phase not in ("communication", "validation"))


class RecordingMixin:
    """Per-step records for the training loop's per-rank class.

    Losses stay on the device until the interval ends; then one collective reduces them, the
    phase times of every rank and the wish to stop.
    """

    backend: Backend
    config: DistributedConfig
    history: History
    optimizer: Any
    progress: Progress
    timers: PhaseTimers
    world: World
    _stop_reason: str | None
    next_ask = 1
    _first_step = 0
    _pace: int | None = None
    _met: float | None = None
    _steps: list[tuple[Any, Any, float]]
    _epoch_sums: list[float]
    _resumed: tuple[list[float], list[tuple[Any, Any, float]]] | None = None
    _suspect: int | None = None
    _compared = 0
    _differed = False
    _start_samples: int
    _notify: Callable[..., None]
    track_metrics: Callable[..., None]
    news_of_saving: Callable[[], float]
    finish_saving: Callable[[], str | None]
    reached_goal: Callable[[], bool]

    def begin_interval(self) -> None:
        """Start an epoch's records."""
        self._interval_samples = 0
        self._interval_start = perf_counter()
        self._epoch_sums, self._steps, self._resumed = *(self._resumed or ([0.0, 0.0], [])), None
        self._logged: dict[str, float] = {}
        self.timers.snapshot_and_reset()
        self._met = self._met or self._interval_start

    def record_step(self, loss_sum: Any, count: Any, num_samples: int) -> None:
        """Keep a step's loss as it is: on the device, unreduced."""
        self._steps.append((loss_sum, count, self.optimizer.param_groups[0]["lr"]))
        self._interval_samples += num_samples

    def log(self, name: str, value: float) -> None:
        """Add a number to the next log record."""
        self._logged[name] = float(value)

    def end_interval(self, norm: Any = None) -> None:
        """Reduce, remember and report what happened since the last log step. Collective."""
        seconds = max(perf_counter() - self._interval_start, 1e-9)
        losses, phases = self._reduce_interval()
        first = self.progress.step - len(losses) + 1
        for offset, (loss, (_, _, rate)) in enumerate(zip(losses, self._steps, strict=True)):
            if first + offset > self._first_step:  # Earlier ones are an interrupted run's own.
                self._append_step(first + offset, loss, float(rate))
        record = {
            "step": float(self.progress.step),
            "epoch": float(self.progress.epoch),
            "loss": self._interval_loss,
            "learning_rate": float(self._steps[-1][2]),
            "samples_per_second": self._interval_samples / seconds,
            **memory_metrics(self.world.device),
            **self._logged,
        }
        if norm is not None:
            record["grad_norm"] = float(norm)
        utilisation = gpu_utilisation(self.world.device)
        if utilisation is not None:
            record["gpu_utilisation"] = utilisation
        if self.config.tracking.phase_timers:
            record |= self._phase_shares(phases[0], seconds)
            self._warn_of_stragglers(phases)
        self.history.logs.append(record)
        self._notify("on_log", self, record)
        self.track_metrics({k: v for k, v in record.items() if k != "step"}, self.progress.step)
        self._steps, self._interval_samples, self._logged = [], 0, {}
        self._interval_start = perf_counter()

    def _reduce_interval(self) -> tuple[list[float], list[dict[str, float]]]:
        """(mean loss of every step over all ranks, phase seconds of every rank)."""
        sums, counts = _numbers([s[0] for s in self._steps]), _numbers([s[1] for s in self._steps])
        self._check_finite(sums)
        seconds = self.timers.snapshot_and_reset()
        seconds["communication"] = self.backend.communication_seconds() * len(sums)
        seconds["other"] = perf_counter() - (self._met or 0.0) - sum(seconds[phase] for phase in _TIMED)
        seconds["checksum"] = self._checksum()
        slots = [0.0] * (len(_SENT) * self.world.size)
        begin = self.world.rank * len(_SENT)
        slots[begin : begin + len(_SENT)] = [seconds[phase] for phase in _SENT]
        wishes = [self.news_of_saving(), *self._wishes()]
        reduced = self.backend.all_reduce([*sums, *counts, *slots, *wishes])
        self._met = perf_counter()
        number = len(sums)
        totals, parts = reduced[:number], reduced[number : 2 * number]
        slots = reduced[2 * number : -len(wishes)]
        # A step skipped for its NaN is no part of a mean.
        skips = self.config.on_nan == "skip"
        taken = [pair for pair in zip(totals, parts, strict=True) if math.isfinite(pair[0]) or not skips]
        loss, count = sum(pair[0] for pair in taken), sum(pair[1] for pair in taken)
        self._epoch_sums[0] += loss
        self._epoch_sums[1] += count
        self._interval_loss = _mean(loss, count)
        if reduced[-len(wishes)] > 0:
            self.finish_saving()
        starts = range(0, len(slots), len(_SENT))
        phases = [dict(zip(_SENT, slots[at : at + len(_SENT)], strict=True)) for at in starts]
        self._compare([phase.pop("checksum") for phase in phases])
        walls = [sum(phase[name] for name in (*_TIMED, "other")) for phase in phases]
        self._pace = max(1, int(number / max(*walls, 1e-9)))
        self._settle(reduced[-2] > 0, reduced[-1] > 0)
        return [_mean(t, c) for t, c in zip(totals, parts, strict=True)], phases

    def _checksum(self) -> float:
        """Of this rank's replica, when it is time to compare; else 0. It costs one pass over the
        parameters and travels with what is reduced anyway."""
        every, step = self.config.divergence_check_steps, self.progress.step
        if every is None or self.world.size == 1 or step - self._compared < every:
            return 0.0
        self._compared = step
        return checksum(self.backend.replicated() or {})

    def _compare(self, checksums: list[float]) -> None:
        """Stop when replicas differ. Every rank sees the same numbers."""
        if len(set(checksums)) == 1:
            return
        found = explain_divergence(self.backend, self.progress.step)
        if isinstance(found, WorkerError):
            raise found
        if self.world.rank == 0 and not self._differed:
            logger.warning("%s", found)
        self._differed = True

    def end_epoch_record(self) -> dict[str, float]:
        """Close the last interval; returns the epoch's training figures. Collective."""
        self.timers.enter("epoch end", self.progress.step)
        if self._steps and not self.history.preempted:  # The resumed run closes the interval.
            self.end_interval()
        total, count = self._epoch_sums
        return {
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "train_loss": _mean(total, count),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
        }

    def record_state(self) -> dict[str, Any]:
        """This rank's records of the epoch under way: ``sums`` (loss and count, of all ranks) and
        ``steps`` since then (loss and count of its own, learning rate)."""
        if not self.progress.samples:
            return {"sums": [0.0, 0.0], "steps": []}
        # What was resumed waits there until the epoch goes on.
        sums, steps = self._resumed or (self._epoch_sums, self._steps)
        losses, counts = _numbers([s[0] for s in steps]), _numbers([s[1] for s in steps])
        rates = [float(s[2]) for s in steps]
        return {"sums": list(sums), "steps": list(zip(losses, counts, rates, strict=True))}

    def restore_records(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on with the records of all ranks that saved, so that the epoch's figures are those of an
        uninterrupted epoch."""
        own = saved[self.world.rank : self.world.rank + 1] if len(saved) == self.world.size else saved
        if own is saved and self.world.rank:
            own = []
        together = zip(*(state["steps"] for state in own), strict=True)
        steps = [(sum(s[0] for s in step), sum(s[1] for s in step), step[0][2]) for step in together]
        if not own:
            steps = [(0.0, 0.0, step[2]) for step in saved[0]["steps"]]
        self._resumed = (list(saved[0]["sums"]), steps)

    def agree_to_stop(self) -> None:
        """Make one rank's wish to stop, or to go, everybody's. Collective."""
        stop, go = self.backend.all_reduce(self._wishes())
        self._settle(stop > 0, go > 0)
        self._met = perf_counter()

    def agree_to_go(self) -> None:
        """Between log steps: whether a signal asks any rank to save and go. Collective.

        A callback's wish to stop waits for the log step, for when this is called depends on time.
        """
        self._settle(False, self.backend.all_reduce([1.0 if asked() else 0.0])[0] > 0)

    def _wishes(self) -> list[float]:
        return [1.0 if self._stop_reason else 0.0, 1.0 if asked() else 0.0]

    def _settle(self, stop: bool, go: bool) -> None:
        """Act on what all ranks know, and choose the next step at which signals are asked for:
        about a second from now, and at steps 1, 2, 4, ... until an interval was timed."""
        step, history = self.progress.step, self.history
        self.next_ask = step + (self._pace or max(1, step - self._first_step))
        if stop and history.stop_reason is None:
            reasons = self.backend.gather_objects(self._stop_reason)
            history.stop_reason = next(reason for reason in reasons if reason)
        if go and history.stop_reason is None and not self.reached_goal():
            names = self.backend.gather_objects(asked())
            history.stop_reason = history.preempted = next(name for name in names if name)

    def stop_on_nan(self, loss: Any, step: int) -> None:
        """Refuse a loss that is not finite, before it reaches the weights.

        Raises:
            UserError: always.
        """
        place = f"at step {step + 1} (epoch {self.progress.epoch}) on rank {self.world.rank}"
        raise not_finite(loss, place, self.optimizer)

    def _check_finite(self, sums: list[float]) -> None:
        """On a GPU losses are only looked at here, at log steps."""
        if self.config.on_nan != "stop":
            return
        for offset, value in enumerate(sums):
            if not math.isfinite(value):
                self.stop_on_nan(value, self.progress.step - len(sums) + offset)

    def _append_step(self, step: int, loss: float, rate: float) -> None:
        for name, value in (("step", step), ("loss", loss), ("learning_rate", rate)):
            self.history.steps.setdefault(name, []).append(value)
        self.history.num_samples = self.progress.total_samples - self._start_samples

    def _phase_shares(self, phases: Mapping[str, float], seconds: float) -> dict[str, float]:
        # The waiting is DDP's estimate, taken out of what was measured.
        waited = min(phases["communication"], phases["backward"])
        shares = {**phases, "backward": phases["backward"] - waited, "communication": waited}
        return {f"time_{phase}": shares[phase] / seconds for phase in PHASES}

    def _warn_of_stragglers(self, phases: list[dict[str, float]]) -> None:
        # Once is chance: on a busy machine any rank may have to wait for a core.
        before, found = self._suspect, find_straggler(phases)
        self._suspect = found[0] if found else None
        if found is None or found[0] != before:
            return
        # All ranks are here: they judge by the same numbers.
        several = self.world.num_nodes > 1
        host = f" (host {self.backend.gather_objects(self.world.host)[found[0]]})" if several else ""
        if self.world.rank == 0:
            name = f"rank {found[0]}"
            said = found[1].replace(name, f"{name}{host}", 1)
            logger.warning("%s (steps up to %d)", said, self.progress.step)


def not_finite(loss: Any, place: str, optimizer: Any) -> UserError:
    """The error for a loss that is NaN or infinite under ``on_nan=stop``."""
    rate = float(optimizer.param_groups[0]["lr"])
    return UserError(
        f"the loss is {float(loss)} {place}, with learning rate {rate:g}",
        field="on_nan",
        got="stop",
        allowed="stop, skip (leave such steps out), ignore",
        remedy="Lower learning_rate, set gradient_clipping, or look for a division or logarithm"
        " of zero in the model and for NaN in the data",
    )


def _mean(total: float, count: float) -> float:
    """The mean over nothing is 0: a batch of masked tokens has no loss. Counts may be below 1."""
    return total / count if count else total


def _numbers(values: list[Any]) -> list[float]:
    """Tensors and numbers as numbers, with one transfer from the device."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return [float(value) for value in values]
    found = iter(torch.stack([t.double() for t in tensors]).tolist())
    return [next(found) if isinstance(value, torch.Tensor) else float(value) for value in values]

"""StepRecords: losses, times and checksums of steps, reduced and logged once an interval."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple

from distributed.config import DistributedConfig
from distributed.errors import UserError, WorkerError
from distributed.interfaces.backend import Backend, SharedSettings
from distributed.interfaces.history import History
from distributed.resilience.divergence import checksum, explain_divergence
from distributed.training.loss_sum import as_floats
from distributed.training.phase_timers import PHASES, find_straggler, gpu_utilisation, memory_metrics
from distributed.training.reduced_interval import TIMED, ReducedInterval
from distributed.training.state import TrainState, mean

logger = logging.getLogger("distributed")

_MANY = 64
"""Ranks from which on the phases of every rank are sent once in `_TIMES` seconds, and not at every log step,
since the message grows with their number."""
_TIMES = 60.0


class StepRecord(NamedTuple):
    """One optimizer step of this rank.

    Attributes:
        step: its number in the whole run, from 1.
        loss_sum: sum of the losses of this rank's samples: a number, or a tensor or `LossSum` that may still
            be on the device.
        count: how many samples (or unmasked tokens) that is.
        num_samples: samples of the global batch, over all ranks.
        learning_rate: that the step used.
        norm: global L2 norm of the gradient before clipping, None unless clipped or logged.
        skipped: the step was not taken, because gradients were not finite.
        logged: the step ends a log interval.
    """

    step: int
    loss_sum: Any
    count: Any
    num_samples: int
    learning_rate: float
    norm: Any
    skipped: bool
    logged: bool

    @property
    def loss(self) -> float:
        """The mean loss of this rank's samples. Waits for the device."""
        return float(self.loss_sum) / (float(self.count) or 1.0)


class StepRecords:
    """Keeps losses on the device until a log step; then one collective reduces them, the phase times of
    every rank and the flags that ranks exchange.

    Args:
        state: its cursor and open epoch.
        history: receives series and log records.
    """

    def __init__(
        self, config: DistributedConfig, backend: Backend, state: TrainState, history: History
    ) -> None:
        self.config, self.backend, self.state, self.history = config, backend, state, history
        self._shared: SharedSettings | None = None
        self._logged: dict[str, float] = {}
        self._tracked = True
        self._interval_samples = 0
        self._interval_start = 0.0
        self._mean_loss = 0.0
        self._last_meeting: float | None = None
        self._suspect: int | None = None
        self._sends_times = False
        self._times_at = perf_counter()
        self._compared_at = 0
        self._reported_difference = False
        self.start()

    def start(self) -> None:
        """Training begins at the current step: earlier ones are an interrupted run's own."""
        self._first_step, self._first_sample = self.state.progress.step, self.state.progress.total_samples

    def compare(self, settings: SharedSettings | None) -> None:
        """From now on, compare `settings` over the ranks at each log step."""
        self._shared = settings

    # -- intervals -------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Start an epoch's records."""
        self.begin_interval()
        self.state.open_epoch.begin()
        self.backend.timers.snapshot_and_reset()
        self._last_meeting = self._last_meeting or self._interval_start

    def begin_interval(self) -> None:
        """Start the next log record. What was logged before it was closed is part of it."""
        self._interval_samples, self._interval_start = 0, perf_counter()
        self._tracked = True

    def add(self, record: StepRecord) -> None:
        """Keep a step's loss as it is: on the device, unreduced."""
        self.state.open_epoch.steps.append((record.loss_sum, record.count, record.learning_rate))
        self._interval_samples += record.num_samples

    def log(self, name: str, value: float) -> bool:
        """Add a number to the log record that the current step belongs to.

        After a step that is the next record. Once that record is closed (in `on_log`, `on_validation_end`,
        `on_epoch_end` and later) it is the last one.

        Returns:
            Whether trackers have got that record already, so that they need the number by itself.
        """
        logs, step = self.history.logs, self.state.progress.step
        closed = not self.state.open_epoch.steps and bool(logs) and logs[-1]["step"] == step
        (logs[-1] if closed else self._logged)[name] = float(value)
        return closed and self._tracked

    def note_meeting(self) -> None:
        """All ranks have just met in a collective; time is measured from here."""
        self._last_meeting = perf_counter()

    def reduce(self, saved: bool, stop: bool, go: bool) -> ReducedInterval:
        """Sum the open interval over the ranks. One collective. Above `_MANY` ranks, its message grows with
        their number only once in `_TIMES` seconds.

        Args:
            saved: this rank has finished its part of a save.
            stop: this rank asks for a stop.
            go: this rank was preempted.

        Raises:
            UserError: a loss is not finite and ``on_nan`` is ``stop``.
        """
        steps, world = self.state.open_epoch.steps, self.backend.world
        losses, counts = as_floats([s[0] for s in steps]), as_floats([s[1] for s in steps])
        self._check_finite(losses)
        seconds = self.backend.timers.snapshot_and_reset()
        seconds |= self._communication(seconds["backward"], len(losses))
        seconds["other"] = (
            perf_counter() - (self._last_meeting or 0.0) - sum(seconds[phase] for phase in TIMED)
        )
        seconds["checksum"] = self._checksum()
        compares = self._shared is None or self._shared.is_known
        seconds["settings"] = self._shared.digest() if self._shared and compares else 0.0
        flags = (self._wants_times(), saved, stop, go)
        num_slots = world.size if self._sends_times or world.size <= _MANY else 1
        own_set = self.backend.replica_set
        own = ReducedInterval.pack(losses, counts, seconds, flags, world.rank, num_slots, own_set, compares)
        sums = self.backend.all_reduce(own)
        reduced = ReducedInterval.unpack(sums, len(losses), world.size, own_set[1])
        self._sends_times = reduced.wants_times
        self.note_meeting()
        return reduced

    def _communication(self, backward: float, num_steps: int) -> dict[str, float]:
        """Seconds of exposed communication and its hidden share; NaN if they are not known.

        Args:
            backward: seconds in backward of the interval.
        """
        times = self.backend.communication_times()
        if times is None:
            return {"communication": math.nan, "hidden": math.nan}
        hidden = times.hidden_share(backward / num_steps)
        return {
            "communication": times.exposed * num_steps,
            "hidden": math.nan if hidden is None else hidden,
        }

    def _wants_times(self) -> bool:
        """Whether every rank should send its phases in the next interval: rank 0 decides by its clock."""
        due = self.backend.world.rank == 0 and perf_counter() - self._times_at >= _TIMES
        if due:
            self._times_at = perf_counter()
        return due

    def close_interval(self, reduced: ReducedInterval, norm: Any = None) -> dict[str, float]:
        """Append the steps of the interval to the history and return its log record.

        Args:
            reduced: from `reduce`.
            norm: gradient norm of the last step, None when unknown.
        """
        seconds = max(perf_counter() - self._interval_start, 1e-9)
        progress, device = self.state.progress, self.backend.world.device
        rates = [float(step[2]) for step in self.state.open_epoch.steps]
        self._append_steps(reduced, rates)
        self._sum_up(reduced)
        record = {
            "step": float(progress.step),
            "epoch": float(progress.epoch),
            "loss": self._mean_loss,
            "learning_rate": rates[-1],
            "samples_per_second": self._interval_samples / seconds,
            **memory_metrics(device),
            **self.backend.interval_metrics(),
            **self._logged,
        }
        if norm is not None:
            record["grad_norm"] = float(norm)
        utilisation = gpu_utilisation(device)
        if utilisation is not None:
            record["gpu_utilisation"] = utilisation
        if self.config.times_phases:
            record |= _phase_shares(reduced.phases[0], seconds)
            if self.backend.world.size > 1:
                record |= _communication_figures(reduced.phases[0], len(rates))
            if len(reduced.phases) == self.backend.world.size:
                self._warn_of_stragglers(reduced.phases)
        self.history.logs.append(record)
        self._logged, self._tracked = {}, False
        return record

    def epoch_metrics(self) -> dict[str, float]:
        """The training metrics of the epoch so far, equal on all ranks."""
        progress = self.state.progress
        return {
            "epoch": progress.epoch,
            "step": progress.step,
            "train_loss": mean(*self.state.open_epoch.sums),
            "learning_rate": float(self.backend.optimizer.param_groups[0]["lr"]),
        }

    def _sum_up(self, reduced: ReducedInterval) -> None:
        """Move the interval's losses into the epoch's sums."""
        # A step that was skipped for its NaN is left out of the mean.
        skips = self.config.on_nan == "skip"
        pairs = zip(reduced.losses, reduced.counts, strict=True)
        taken = [pair for pair in pairs if math.isfinite(pair[0]) or not skips]
        loss, count = sum(pair[0] for pair in taken), sum(pair[1] for pair in taken)
        self.state.open_epoch.close_interval(loss, count)
        self._mean_loss = mean(loss, count)

    def _append_steps(self, reduced: ReducedInterval, rates: list[float]) -> None:
        progress, series = self.state.progress, self.history.steps
        step = progress.step - len(rates)
        for loss, count, rate in zip(reduced.losses, reduced.counts, rates, strict=True):
            step += 1
            if step > self._first_step:
                for name, value in (("step", step), ("loss", mean(loss, count)), ("learning_rate", rate)):
                    series[name].append(value)
                self.history.num_samples = progress.total_samples - self._first_sample

    # -- checks ----------------------------------------------------------------------

    def _check_finite(self, losses: list[float]) -> None:
        """On a GPU losses are checked only here, at log steps."""
        if self.config.on_nan != "stop":
            return
        progress = self.state.progress
        for offset, value in enumerate(losses):
            if not math.isfinite(value):
                step = progress.step - len(losses) + offset + 1
                raise not_finite(value, step, progress.epoch, self.backend)

    def _checksum(self) -> float:
        """Of this rank's replica, when it is time to compare; else 0.0. It costs one pass over the
        parameters and is reduced together with the losses."""
        every, step = self.config.divergence_check_steps, self.state.progress.step
        written = self._shared is not None and self._shared.is_written
        if every is None or self.backend.world.size == 1:
            return 0.0
        if step - self._compared_at < every and not written:
            return 0.0
        self._compared_at = step
        return checksum(self.backend.replicated() or {})

    def check_replicas(self, reduced: ReducedInterval) -> None:
        """Stop when replicas differ. Collective when they do; every rank sees the same numbers.

        Raises:
            WorkerError: a replica has diverged.
        """
        if reduced.same_replicas:
            return
        found = explain_divergence(self.backend, self.state.progress.step)
        if isinstance(found, WorkerError):
            raise found
        if self.backend.world.rank == 0 and not self._reported_difference:
            logger.warning("%s", found)
        self._reported_difference = True

    def check_settings(self, reduced: ReducedInterval) -> None:
        """Stop when ranks train with different settings. Collective when they do.

        Raises:
            UserError: they do; names the first difference.
        """
        if self._shared is not None and not reduced.same_settings:
            self._shared.check_equal(self.backend)

    def _warn_of_stragglers(self, phases: list[dict[str, float]]) -> None:
        # Once may be chance: on a busy machine any rank may have to wait for a core.
        before, found = self._suspect, find_straggler(phases)
        self._suspect = found[0] if found else None
        if found is None or found[0] != before:
            return
        # Collective: all ranks have the same numbers and decide the same.
        world = self.backend.world
        several = world.num_nodes > 1
        host = f" (host {self.backend.broadcast_object(world.host, found[0])})" if several else ""
        if world.rank == 0:
            name = f"rank {found[0]}"
            text = found[1].replace(name, f"{name}{host}", 1)
            logger.warning("%s (steps up to %d)", text, self.state.progress.step)


def not_finite(loss: Any, step: int, epoch: int, backend: Backend) -> UserError:
    """The error for a loss that is NaN or infinite under ``on_nan=stop``."""
    rate = float(backend.optimizer.param_groups[0]["lr"])
    return UserError(
        f"the loss is {float(loss)} at step {step} (epoch {epoch}) on rank {backend.world.rank},"
        f" with learning rate {rate:g}",
        field="on_nan",
        got="stop",
        allowed="stop, skip (leave such steps out), ignore",
        remedy="Lower learning_rate, set gradient_clipping, or look for a division or logarithm"
        " of zero in the model and for NaN in the data",
    )


def _phase_shares(phases: Mapping[str, float], seconds: float) -> dict[str, float]:
    # The waiting time is part of what was measured as backward.
    known = not math.isnan(phases["communication"])
    waited = min(phases["communication"], phases["backward"]) if known else 0.0
    shares = {**phases, "backward": phases["backward"] - waited, "communication": waited}
    names = (phase for phase in PHASES if known or phase != "communication")
    return {f"time_{phase}": shares[phase] / seconds for phase in names}


def _communication_figures(phases: Mapping[str, float], num_steps: int) -> dict[str, float]:
    """Exposed communication per step, and the hidden share, where they are known."""
    found = {
        "exposed_communication_seconds": phases["communication"] / num_steps,
        "hidden_communication_share": phases["hidden"],
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}

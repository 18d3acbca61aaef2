"""Monitors for manual use, in a custom loop or around a trainer.

The training loop logs the same metrics by itself: seconds per phase, memory, metrics reduced
over all ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distributed.errors import UserError, did_you_mean
from distributed.training.phase_timers import memory_metrics

__all__ = ["DistributedMetricsCollector", "PerformanceMonitor", "monitor_memory"]


class PerformanceMonitor:
    """Named timers that keep every measurement.

    Args:
        synchronize: wait for the CUDA device at both ends of a timer, so that it measures
            the work and not its launch. Costs the overlap of host and device: not for
            production. Without CUDA it has no effect.

    Attributes:
        timings: name -> seconds of every measurement, in order.
    """

    def __init__(self, synchronize: bool = False) -> None:
        self.synchronize = synchronize
        self.timings: dict[str, list[float]] = {}
        self._started: dict[str, float] = {}

    def start_timer(self, name: str) -> None:
        """Start (or restart) the timer `name`. Timers of other names may be running."""
        self._wait()
        self._started[name] = time.perf_counter()

    def end_timer(self, name: str) -> float:
        """Stop the timer and return its seconds.

        Raises:
            UserError: it was not started.
        """
        self._wait()
        now = time.perf_counter()
        if name not in self._started:
            raise UserError(
                f"the timer '{name}' was not started.{did_you_mean(name, self._started)}",
                field="end_timer",
                allowed=", ".join(self._started) or None,
                remedy=f"Call start_timer({name!r}) first",
            )
        seconds = now - self._started.pop(name)
        self.timings.setdefault(name, []).append(seconds)
        return seconds

    def monitor_training(
        self, trainer: Any, data_loader: Iterable[Any], num_steps: int = 100
    ) -> dict[str, float]:
        """Train `num_steps` steps and time them.

        Args:
            trainer: an object with ``train_step(*batch)``, whose calls are timed one by one as
                ``forward_backward``, and the waits for a batch as ``data``; or one with
                ``fit(data_loader, max_steps=...)``, timed as a whole.
            data_loader: batches; a tuple or list is spread over `train_step`'s arguments.
            num_steps: steps to take at most; fewer when `data_loader` ends.

        Returns:
            `medians()`, which also holds ``total_training``.

        Raises:
            UserError: `trainer` has neither method.
        """
        if not hasattr(trainer, "train_step") and not hasattr(trainer, "fit"):
            raise UserError(
                "the trainer has neither train_step nor fit",
                field="trainer",
                got=type(trainer).__name__,
                allowed="an object with train_step(*batch) or fit(data_loader, max_steps=...)",
            )
        self.start_timer("total_training")
        if hasattr(trainer, "train_step"):
            self._time_steps(trainer, data_loader, num_steps)
        else:
            trainer.fit(data_loader, max_steps=num_steps)
        self.end_timer("total_training")
        return self.medians()

    def medians(self) -> dict[str, float]:
        """Median seconds per name."""
        return {name: statistics.median(values) for name, values in self.timings.items()}

    def table(self) -> str:
        """Name, number of measurements, median, smallest, largest (ms) and sum (s), as text."""
        width = max((len(name) for name in self.timings), default=4)
        heads = f"{'count':>7}  {'median ms':>10}  {'min ms':>10}  {'max ms':>10}  {'sum s':>9}"
        lines = [f"{'name':<{width}}  {heads}"]
        for name, values in self.timings.items():
            median, least, most = (1e3 * f(values) for f in (statistics.median, min, max))
            lines.append(
                f"{name:<{width}}  {len(values):>7}  {median:>10.3f}  {least:>10.3f}  {most:>10.3f}"
                f"  {sum(values):>9.3f}"
            )
        return "\n".join(lines)

    def _time_steps(self, trainer: Any, loader: Iterable[Any], num_steps: int) -> None:
        batches, end = iter(loader), object()
        for _ in range(num_steps):
            self.start_timer("data")
            batch = next(batches, end)
            if batch is end:
                del self._started["data"]
                return
            self.end_timer("data")
            self.start_timer("forward_backward")
            trainer.train_step(*(batch if isinstance(batch, tuple | list) else (batch,)))
            self.end_timer("forward_backward")

    def _wait(self) -> None:
        if self.synchronize:
            import torch

            if torch.cuda.is_available():
                torch.cuda.synchronize()


class DistributedMetricsCollector:
    """Means over all ranks, right when ranks hold different counts or different names.

    Args:
        rank: rank of this process.
        world_size: number of ranks.
        group: a torch process group; None is the default one. Needed only when
            `world_size` is above 1.
    """

    def __init__(self, rank: int, world_size: int, group: Any = None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group
        self._sums: dict[str, tuple[float, int]] = {}

    def update_metric(self, name: str, value: Any, count: int = 1) -> None:
        """Add the mean `value` of `count` samples. A tensor is read at once (synchronises)."""
        total, num = self._sums.get(name, (0.0, 0))
        self._sums[name] = (total + float(value) * count, num + count)

    def compute_global_metrics(self) -> dict[str, float]:
        """Mean of each metric over all samples of all ranks. Collective: every rank calls.

        One object all-gather, which also exchanges the names. Bitwise equal on all ranks;
        a metric without any sample is NaN.

        Raises:
            UserError: `world_size` does not fit the process group.
        """
        parts = self._gather()
        names = sorted({name for part in parts for name in part})
        return {name: _mean([part[name] for part in parts if name in part]) for name in names}

    def print_metrics(self) -> dict[str, float]:
        """Compute on every rank, print on rank 0. Collective: every rank calls."""
        metrics = self.compute_global_metrics()
        if self.rank == 0:
            print(
                "\n".join(["Global metrics:", *(f"  {name}: {value:.6f}" for name, value in metrics.items())])
            )
        return metrics

    def reset(self) -> None:
        """Clear all metrics, for the next epoch."""
        self._sums.clear()

    def _gather(self) -> Sequence[Mapping[str, tuple[float, int]]]:
        if self.world_size == 1:
            return [self._sums]
        import torch.distributed as dist

        size = dist.get_world_size(self.group) if dist.is_available() and dist.is_initialized() else 0
        if size != self.world_size:
            raise UserError(
                f"the process group has {size} ranks" if size else "there is no process group to reduce over",
                field="world_size",
                got=self.world_size,
                allowed=str(size) if size else "1 without a process group",
            )
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, self._sums, group=self.group)
        return parts


def _mean(parts: Sequence[tuple[float, int]]) -> float:
    count = sum(num for _, num in parts)
    return math.fsum(total for total, _ in parts) / count if count else math.nan


def monitor_memory(device: str | None = None, *, show: bool = False) -> dict[str, float]:
    """Memory of this process, in MiB, as `distributed.training.phase_timers.memory_metrics` names it.

    Args:
        device: e.g. ``cuda:1``; None is the current CUDA device, or the CPU without one.
        show: also print it, one line per value.
    """
    if device is None:
        import torch

        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    metrics = memory_metrics(device)
    if show:
        print("\n".join(f"{name}: {value:.1f}" for name, value in metrics.items()))
    return metrics

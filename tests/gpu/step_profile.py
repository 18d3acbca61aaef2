"""Profile of the Trainer's steps and of a hand-written loop: launches, synchronisations, host time."""

from __future__ import annotations

import cProfile
import io
import pstats
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from time import perf_counter
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.gpu.checks import Measured, Settings
from tests.gpu.product import Callback
from tests.gpu.step_loops import LOG_EVERY, Workload, synchronize

__all__ = ["FIGURES", "step_profile"]

_CALLS = {
    "launches": ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
    "synchronisations": ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
    "copies": ("cudaMemcpyAsync", "cudaMemcpy"),
    "memsets": ("cudaMemsetAsync",),
    "events": ("cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventQuery", "cudaStreamWaitEvent"),
    "allocations": ("cudaMalloc", "cudaHostAlloc", "cudaFree", "cudaHostRegister"),
}
"""What is counted -> names of the runtime's functions."""

FIGURES = ("launches", "synchronisations", "copies", "host")
"""Of a step, beyond those of the hand-written loop; ``host`` in microseconds."""

_STEPS, _TRACED, _TOP = 20, 40, 25
"""Steps in a profile and in a trace of Python's functions, and lines of a table."""
_RUNS, _FEW = 10, 4
"""Short runs whose host time is taken, and their steps: so few that the launches fit into the device's queue
and the host waits for nothing."""


def step_profile(setting: Settings, milliseconds: int) -> Iterator[Measured]:
    """`FIGURES`; the whole text goes to ``profile-<milliseconds>ms.txt`` beside the results."""
    work = Workload(setting, milliseconds)
    work.fill(4 * LOG_EVERY)
    record = _Record(work)
    work.train(record, max_steps=4 * LOG_EVERY)
    path = setting.kept(f"profile-{milliseconds}ms.txt")
    path.write_text(record.text(), encoding="utf-8")
    base, ours = record.figures["by hand"], record.figures["Trainer"]
    for name in FIGURES:
        yield Measured(ours[name] - base[name], f"{base[name]:.4g} by hand, {ours[name]:.4g}; {path.name}")


class _Record(Callback):
    """Profiles both loops in one thread while the Trainer trains.

    Attributes:
        figures: of each profile: what `_CALLS` names per step, and ``host``: microseconds of the host.
    """

    def __init__(self, work: Workload) -> None:
        self.work, self.setting = work, work.setting
        self.figures: dict[str, dict[str, float]] = {}
        self._tables: list[str] = []

    def on_run_start(self, context: Any) -> None:
        self._script = self._all()

    def on_step_end(self, context: Any) -> None:
        next(self._script, None)

    def _all(self) -> Iterator[None]:
        """Every measurement; the Trainer takes a step at each ``yield``."""
        base = self.work.by_hand()
        yield from _repeated(LOG_EVERY)  # 1 to 50; the record of step 50 is written before step 51 ends
        for _ in range(LOG_EVERY):
            next(base)
        with self._profiled("by hand"):
            for _ in range(_STEPS):
                next(base)
        with self._profiled("Trainer"):
            yield from _repeated(_STEPS)  # to 71
        yield from _repeated(_STEPS)  # to 91
        with self._profiled("Trainer, with a log step"):
            yield from _repeated(_STEPS)  # to 111
        yield from self._times("Trainer", lambda: None)  # to 151, the first of a run that is not counted
        for _ in self._times("by hand", lambda: next(base)):
            pass
        with self._traced("by hand"):
            for _ in range(_TRACED):
                next(base)
        with self._traced("Trainer"):
            yield from _repeated(_TRACED)  # to 191

    def _times(self, name: str, step: Callable[[], None]) -> Iterator[None]:
        """Microseconds that the host takes for a step if the device is idle before."""
        found = []
        for _ in range(_RUNS):
            synchronize(self.setting)
            start = perf_counter()
            for _ in range(_FEW):
                step()
                yield
            found.append(1e6 * (perf_counter() - start) / _FEW)
        self.figures[name]["host"] = median(found)

    @contextmanager
    def _profiled(self, name: str) -> Iterator[None]:
        activities = [ProfilerActivity.CPU]
        if self.setting.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        synchronize(self.setting)
        with profile(activities=activities) as profiled:
            yield
        averages = profiled.key_averages()
        self.figures[name] = _counts({row.key: row.count for row in averages})
        table = averages.table(sort_by="self_cpu_time_total", row_limit=_TOP, max_name_column_width=60)
        self._tables.append(f"== {name}: {_STEPS} steps, operations by their own host time\n{table}")

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        traced = cProfile.Profile()
        traced.enable()
        try:
            yield
        finally:
            traced.disable()
        text = io.StringIO()
        pstats.Stats(traced, stream=text).sort_stats("tottime").print_stats(_TOP)
        self._tables.append(f"== {name}: {_TRACED} steps, functions of Python\n{text.getvalue()}")

    def text(self) -> str:
        """The figures of all profiles, and what takes the host most time."""
        work, names = self.work, [*_CALLS, "host"]
        lines = [f"depth {work.depth}, width {work.width}, batch {work.batch}", ""]
        lines.append(f"{'per step':<26}" + "".join(f"{name:>18}" for name in names))
        for name, found in self.figures.items():
            cells = (f"{found[kind]:>18.2f}" if kind in found else f"{'-':>18}" for kind in names)
            lines.append(f"{name:<26}" + "".join(cells))
        return "\n".join([*lines, "", *self._tables, ""])


def _repeated(steps: int) -> Iterator[None]:
    for _ in range(steps):
        yield


def _counts(calls: Mapping[str, int]) -> dict[str, float]:
    """Calls per step of each of `_CALLS`. The synchronisation at the end of a profile is among them."""
    return {kind: sum(calls.get(name, 0) for name in names) / _STEPS for kind, names in _CALLS.items()}

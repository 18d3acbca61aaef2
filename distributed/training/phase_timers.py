"""Where the time and the memory of a rank go, measured cheaply enough for 1 ms steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from statistics import median_low
from typing import TYPE_CHECKING

from distributed.resilience.phase_journal import no_op

if TYPE_CHECKING:
    import psutil


PHASES = ("data", "forward", "backward", "communication", "optimizer", "save", "validation")
OWN_WORK = ("data", "forward", "backward", "optimizer")

STRAGGLER_SHARE = 0.25
STRAGGLER_SECONDS = 0.010
MIB = 1024.0**2


class PhaseTimers:
    """Seconds per phase since the last snapshot.

    What is measured is the host's time: nothing is synchronised. On CUDA a forward pass
    takes the time that launching its kernels takes, and the wait for the device shows in
    whichever phase first needs a value. `torch.profiler` (``profile.enabled``) shows the
    device's own time.

    Not thread-safe: one rank's loop owns it.

    Attributes:
        enter: notes for others which phase begins: `journal.Journal.enter`.
        describe: notes what the rank does within it: `journal.Journal.describe`.
    """

    __slots__ = ("_seconds", "describe", "enter")

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self.enter: Callable[..., str] = no_op
        self.describe: Callable[[str], object] = no_op

    def add(self, phase: str, seconds: float) -> None:
        """Add `seconds` to one of `PHASES`.

        Raises:
            KeyError: no such phase.
        """
        self._seconds[phase] += seconds

    def snapshot_and_reset(self) -> dict[str, float]:
        """Seconds of every phase since the last call (or since the start), then zero."""
        seconds, self._seconds = self._seconds, dict.fromkeys(PHASES, 0.0)
        return seconds


def find_straggler(per_rank: Sequence[Mapping[str, float]]) -> tuple[int, str] | None:
    """(rank, a sentence about it) of the rank that holds the others up, None when there is none.

    A rank that is late into a collective makes the others wait *inside* it, in backward
    under DDP, in forward already under FSDP, and so the ranks' totals come out even. That is why
    the work up to each phase is compared (data; data and forward; and so on) and not
    the total alone: the first excess is the cause, what follows is waiting.

    Args:
        per_rank: seconds per phase of one log interval, in rank order, backward with its waiting.
            ``other`` is what else a rank did since the ranks last met, such as writing logs: the
            wait for it is no work, and the rank itself is not reported.

    Returns:
        A sentence when some rank's own work up to a phase exceeds the median rank's by more
        than 25 % of the median rank's whole own work, and by at least 10 ms.
    """
    if len(per_rank) < 2:
        return None
    # The lower median, because of two ranks the faster one is the measure.
    tolerated = STRAGGLER_SHARE * median_low(_work(seconds, OWN_WORK) for seconds in per_rank)
    for end in range(1, len(OWN_WORK) + 1):
        work = [_work(seconds, OWN_WORK[:end]) for seconds in per_rank]
        spent = [own + seconds.get("other", 0.0) for own, seconds in zip(work, per_rank, strict=True)]
        rank = max(range(len(work)), key=spent.__getitem__)
        excess = min(values[rank] - median_low(values) for values in (work, spent))
        if excess > tolerated and excess >= STRAGGLER_SECONDS:
            return rank, _sentence(rank, per_rank, OWN_WORK[:end])
    return None


def _work(seconds: Mapping[str, float], phases: Sequence[str]) -> float:
    return sum(seconds.get(phase, 0.0) for phase in phases)


def _sentence(rank: int, per_rank: Sequence[Mapping[str, float]], phases: Sequence[str]) -> str:
    """Blame the phase in which `rank` is furthest beyond the rank whose work up to there is the median."""
    ordered = sorted(per_rank, key=lambda seconds: _work(seconds, phases))
    usual = ordered[(len(ordered) - 1) // 2]
    phase = max(phases, key=lambda name: per_rank[rank].get(name, 0.0) - usual.get(name, 0.0))
    own, median = per_rank[rank].get(phase, 0.0), usual.get(phase, 0.0)
    if own > 10 * median:  # a percentage of almost zero is noise
        return f"rank {rank} spends {own * 1e3:.0f} ms in {phase}, the median rank {median * 1e3:.0f} ms"
    return f"rank {rank} spends {(own / median - 1) * 100:.0f} % more time in {phase} than the median rank"


@cache
def _process() -> psutil.Process:
    import psutil

    return psutil.Process()


def memory_metrics(device: str) -> dict[str, float]:
    """Memory of this process, in MiB.

    Args:
        device: where this rank computes, e.g. ``cpu`` or ``cuda:1``.

    Returns:
        ``memory_rss_mb`` (resident set of the process), and on CUDA ``memory_allocated_mb``,
        ``memory_reserved_mb`` and ``memory_peak_mb`` (highest allocation so far) of PyTorch's
        allocator. Reads counters only; synchronises nothing.
    """
    metrics = {"memory_rss_mb": _process().memory_info().rss / MIB}
    if device.startswith("cuda"):
        import torch

        # `memory_stats` would name, sort and copy all of some hundred counters.
        counters = torch.cuda.memory_stats_as_nested_dict(device)
        for name, kind, value in (
            ("memory_allocated_mb", "allocated_bytes", "current"),
            ("memory_reserved_mb", "reserved_bytes", "current"),
            ("memory_peak_mb", "allocated_bytes", "peak"),
        ):
            metrics[name] = counters[kind]["all"][value] / MIB if counters else 0.0
    return metrics


_without_utilisation: set[str] = set()


def gpu_utilisation(device: str) -> float | None:
    """Share of the last sample period in which the GPU was busy, in percent (0 to 100).

    None on a CPU, and where NVML (the ``nvidia-ml-py`` package and a driver) is not to be
    had; that is remembered, so that the next call costs nothing. Never raises.
    """
    if not device.startswith("cuda") or device in _without_utilisation:
        return None
    try:
        import torch

        return float(torch.cuda.utilization(device))
    except Exception:  # noqa: BLE001 - NVML's errors have no common base, and a gauge stops no training
        _without_utilisation.add(device)
        return None

"""ReducedInterval: the vector that the ranks sum in one collective at a log step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.training.phase_timers import PHASES

TIMED = tuple(phase for phase in PHASES if phase not in ("communication", "validation"))
"""Phases that do not overlap; with ``other`` they make up a rank's time."""

_SENT = (*PHASES, "other", "checksum", "settings")


@dataclass(frozen=True)
class ReducedInterval:
    """What all ranks know after a log step.

    Attributes:
        losses: sum of losses of each step.
        counts: samples or tokens of each step.
        phases: seconds of each phase (`PHASES` and ``other``), one mapping per rank.
        checksums: of each rank's parameters; 0.0 when none were taken.
        settings: digest of each rank's `Backend.settings`; 0.0 without.
        saved: a rank has finished writing the checkpoint in progress.
        stop: a rank asks for a stop.
        go: a rank was preempted.
    """

    losses: list[float]
    counts: list[float]
    phases: list[dict[str, float]]
    checksums: list[float]
    settings: list[float]
    saved: bool
    stop: bool
    go: bool

    @staticmethod
    def pack(
        losses: Sequence[float],
        counts: Sequence[float],
        seconds: Mapping[str, float],
        flags: tuple[bool, bool, bool],
        rank: int,
        size: int,
    ) -> list[float]:
        """One rank's addend: losses, counts, a slot per rank and phase, and the flags.

        Args:
            losses: this rank's sum of losses, one per step.
            counts: as many.
            seconds: per phase, ``other`` included, the ``checksum`` and the digest of ``settings``.
            flags: saved, stop and go.
            rank: whose slot to fill.
            size: number of slots.
        """
        slots = [0.0] * (len(_SENT) * size)
        slots[rank * len(_SENT) : (rank + 1) * len(_SENT)] = [seconds[name] for name in _SENT]
        return [*losses, *counts, *slots, *map(float, flags)]

    @classmethod
    def unpack(cls, values: Sequence[float], num_steps: int) -> ReducedInterval:
        """The inverse of `pack`, of the sum over all ranks."""
        totals, flags = list(values[:-3]), values[-3:]
        slots = totals[2 * num_steps :]
        starts = range(0, len(slots), len(_SENT))
        phases = [dict(zip(_SENT, slots[at : at + len(_SENT)], strict=True)) for at in starts]
        checksums = [phase.pop("checksum") for phase in phases]
        settings = [phase.pop("settings") for phase in phases]
        losses, counts = totals[:num_steps], totals[num_steps : 2 * num_steps]
        return cls(losses, counts, phases, checksums, settings, *(flag > 0 for flag in flags))

    @property
    def steps_per_second(self) -> float:
        """Of the slowest rank."""
        walls = [sum(phase[name] for name in (*TIMED, "other")) for phase in self.phases]
        return len(self.losses) / max(*walls, 1e-9)

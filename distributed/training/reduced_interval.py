"""ReducedInterval: the vector that the ranks sum in one collective at a log step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distributed.communication.equal_values import NUM_TERMS, are_equal, equality_terms
from distributed.training.phase_timers import PHASES

TIMED = tuple(phase for phase in PHASES if phase not in ("communication", "validation"))
"""Phases that do not overlap; with ``other`` they make up a rank's time."""

SENT = (*PHASES, "other", "hidden")
"""What a slot holds of a rank: seconds of its phases, and the share of communication that was hidden behind
backward. ``communication`` and ``hidden`` are NaN if they are not known."""
_NUM_FLAGS = 4


@dataclass(frozen=True)
class ReducedInterval:
    """What all ranks know after a log step.

    Attributes:
        losses: sum of losses of each step.
        counts: samples or tokens of each step.
        phases: what ranks have sent of `SENT`, one mapping per rank, or rank 0's alone.
        same_replicas: all ranks with copies of the same have the same checksum of their parameters.
        same_settings: all ranks that compare them have the same digest of their `Backend.settings`.
        wants_times: rank 0 asks for the phases of every rank in the next interval.
        saved: a rank has finished writing the checkpoint in progress.
        stop: a rank asks for a stop.
        go: a rank was preempted.
    """

    losses: list[float]
    counts: list[float]
    phases: list[dict[str, float]]
    same_replicas: bool
    same_settings: bool
    wants_times: bool
    saved: bool
    stop: bool
    go: bool

    @staticmethod
    def pack(
        losses: Sequence[float],
        counts: Sequence[float],
        seconds: Mapping[str, float],
        flags: tuple[bool, bool, bool, bool],
        rank: int,
        num_slots: int,
        replica_set: tuple[int, int] = (0, 1),
        compares: bool = True,
    ) -> list[float]:
        """One rank's addend: losses, counts, slots of phases, checksums and the flags.

        Args:
            losses: this rank's sum of losses, one per step.
            counts: as many.
            seconds: what `SENT` names, the ``checksum`` and the digest of ``settings``.
            flags: wants_times, saved, stop and go.
            rank: whose slot to fill, if there is one.
            num_slots: ranks whose phases are sent: all, or rank 0 alone.
            replica_set: `Backend.replica_set`.
            compares: this rank knows its settings.
        """
        slots = [0.0] * (len(SENT) * num_slots)
        if rank < num_slots:
            slots[rank * len(SENT) : (rank + 1) * len(SENT)] = [seconds[name] for name in SENT]
        number, sets = replica_set
        replicas = [0.0] * (NUM_TERMS * sets)
        replicas[number * NUM_TERMS : (number + 1) * NUM_TERMS] = equality_terms(seconds["checksum"])
        compared = [*replicas, *equality_terms(seconds["settings"])]
        return [*losses, *counts, *slots, *compared, float(compares), *map(float, flags)]

    @classmethod
    def unpack(cls, values: Sequence[float], num_steps: int, size: int, sets: int = 1) -> ReducedInterval:
        """The inverse of `pack`, of the sum over all `size` ranks with their `sets` of replicas."""
        totals, flags = list(values[:-_NUM_FLAGS]), values[-_NUM_FLAGS:]
        num_compared = int(totals.pop())
        end = -(1 + sets) * NUM_TERMS
        replicas, settings = totals[end:-NUM_TERMS], totals[-NUM_TERMS:]
        slots = totals[2 * num_steps : end]
        starts = range(0, len(slots), len(SENT))
        phases = [dict(zip(SENT, slots[at : at + len(SENT)], strict=True)) for at in starts]
        losses, counts = totals[:num_steps], totals[num_steps : 2 * num_steps]
        by_set = (replicas[at : at + NUM_TERMS] for at in range(0, len(replicas), NUM_TERMS))
        same = all(are_equal(terms, size // sets) for terms in by_set), are_equal(settings, num_compared)
        return cls(losses, counts, phases, *same, *(flag > 0 for flag in flags))

    @property
    def steps_per_second(self) -> float:
        """Of the slowest rank whose phases were sent. The ranks wait for each other in this interval's
        collectives, so that they differ little."""
        walls = [sum(phase[name] for name in (*TIMED, "other")) for phase in self.phases]
        return len(self.losses) / max(*walls, 1e-9)

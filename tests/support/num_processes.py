"""Number of processes of `make test`; ``python -m tests.support.num_processes`` prints it."""

from __future__ import annotations

from distributed.system.host_memory import total_memory

__all__ = ["num_processes"]

_FOR_THREE = 20 << 30
"""Bytes: with three, the programs of the whole machine were measured at up to 15.2 GB."""


def num_processes(memory: int | None = None) -> int:
    """Three, one more than the usual two cores, because a process waits half of its time; two on hosts or in
    control groups with less memory.

    Args:
        memory: bytes; default: of the host, or of its control group.
    """
    return 3 if (total_memory() if memory is None else memory) >= _FOR_THREE else 2


if __name__ == "__main__":
    print(num_processes())

"""Number of threads that ``OMP_NUM_THREADS`` gives to a process."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["omp_threads"]


def omp_threads(environment: Mapping[str, str], cores: int) -> int | None:
    """Threads of the outermost parallel region; None where the variable is not set, or empty.

    The value is a list with a number for each level of nested regions, such as ``4,2`` (OpenMP 5.2, section
    21.1.2). OpenMP ignores a list in which one is not positive, and uses all `cores`.
    """
    value = environment.get("OMP_NUM_THREADS")
    if not value:
        return None
    levels = [level.strip() for level in value.split(",")]
    if all(level.isdecimal() and int(level) for level in levels):
        return int(levels[0])
    return cores

"""The bound of asynchronous SGD: which worker may read parameters, and whose update may be applied, when.

Bounded staleness: Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter
server". Here it bounds updates, and not rounds, so that it is exact for each of them.
"""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["StalenessBound"]


class StalenessBound:
    """Counts updates of shared parameters. The staleness of an update is the number of others that were
    applied after its worker had read the parameters.

    As long as only what `may_read` and `may_apply` allow is done, no update is above `limit`, and one of the
    updates that are being computed may always be applied.

    Args:
        limit: the largest staleness.

    Attributes:
        version: number of updates applied.
        reading: version that each worker has read whose update is not applied yet.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.version = 0
        self.reading: dict[Hashable, int] = {}

    def may_read(self) -> bool:
        """Whether one more worker may read: at most `limit` others compute updates meanwhile."""
        return len(self.reading) <= self.limit

    def read(self, worker: Hashable) -> int:
        """Record that a worker reads the parameters, and return their version."""
        self.reading[worker] = self.version
        return self.version

    def may_apply(self, worker: Hashable) -> bool:
        """Whether all other updates stay within the limit if they are applied after that of `worker`, those
        of the oldest parameters first."""
        others = sorted(version for other, version in self.reading.items() if other != worker)
        return all(
            self.version + 1 + position - version <= self.limit for position, version in enumerate(others)
        )

    def apply(self, worker: Hashable) -> int:
        """Record that a worker's update is applied, and return its staleness."""
        staleness = self.version - self.reading.pop(worker)
        self.version += 1
        return staleness

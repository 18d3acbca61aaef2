"""Size: a number of bytes or operations that grows with the samples of a micro-batch."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Size"]


class Size(NamedTuple):
    """Bytes of a tensor, or operations, as a function of the samples of a micro-batch.

    Attributes:
        fixed: bytes for any number of samples.
        per_sample: further bytes for each sample.
    """

    fixed: float
    per_sample: float = 0.0

    def at(self, num_samples: int) -> int:
        """Bytes for a micro-batch of `num_samples` samples."""
        return round(self.fixed + self.per_sample * num_samples)

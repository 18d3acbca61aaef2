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

    @classmethod
    def through(cls, small: float, large: float, samples: tuple[int, int]) -> Size:
        """The line through `small` and `large`, recorded at two numbers of samples."""
        each = (large - small) / (samples[1] - samples[0])
        return cls(small - each * samples[0], each)

    def at(self, num_samples: int) -> int:
        """Bytes for a micro-batch of `num_samples` samples."""
        return round(self.fixed + self.per_sample * num_samples)

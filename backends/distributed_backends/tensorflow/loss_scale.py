"""LossScale: the factor that keeps fp16 gradients from vanishing; grows and shrinks as torch's does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LossScale"]

GROWTH, BACKOFF = 2.0, 0.5


class LossScale:
    """Halves after a step whose summed gradients overflowed, doubles after `interval` good ones.

    All ranks see the same sums and keep the same scale (C8). The saved form is torch's GradScaler's.

    Args:
        scale: initial scale.
        interval: good steps before it doubles.
    """

    def __init__(self, scale: float, interval: int) -> None:
        self.scale, self.interval, self._good = scale, interval, 0

    def update(self, overflowed: bool) -> None:
        """Update the scale after a step."""
        if overflowed:
            self.scale, self._good = self.scale * BACKOFF, 0
            return
        self._good += 1
        if self._good == self.interval:
            self.scale, self._good = self.scale * GROWTH, 0

    def state_dict(self) -> dict[str, Any]:
        """In the form of `torch.amp.GradScaler.state_dict`."""
        return {
            "scale": self.scale,
            "growth_factor": GROWTH,
            "backoff_factor": BACKOFF,
            "growth_interval": self.interval,
            "_growth_tracker": self._good,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.scale, self._good = float(state["scale"]), int(state["_growth_tracker"])

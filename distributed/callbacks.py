"""Callbacks for common needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from distributed.errors import UserError
from distributed.interfaces.callback import Band, Callback, Context
from distributed.interfaces.metric import larger_is_better


class EarlyStopping(Callback):
    """Stops when a validation metric no longer improves.

    All ranks get the same reduced metric, so all decide in the same way (C8).

    Args:
        metric: name of an epoch's metric, e.g. ``val_loss`` or ``val_accuracy``.
        patience: epochs without improvement before the run stops.
        mode: ``max`` or ``min``; ``auto`` minimises names with ``loss`` or ``error``.
        min_delta: smallest change that counts as an improvement, in the metric's unit.

    Raises:
        UserError: unknown `mode`, `patience` is no number of epochs, or (when an epoch ends) no such metric.
    """

    band = Band.DECIDE
    all_ranks = True

    def __init__(
        self, metric: str = "val_loss", patience: int = 3, mode: str = "auto", min_delta: float = 0.0
    ) -> None:
        if mode not in ("auto", "max", "min"):
            raise UserError("unknown mode", field="mode", got=mode, allowed="auto, max, min")
        if not isinstance(patience, int) or patience < 0:
            raise UserError(
                "not a number of epochs",
                field="EarlyStopping.patience",
                got=patience,
                allowed="a whole number at least 0",
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self._sign = 1.0 if larger_is_better(mode, metric) else -1.0
        self._best, self._waited = -math.inf, 0

    def state_dict(self) -> dict[str, Any]:
        """The best score so far, and the number of epochs since."""
        return {"best": self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from that score and number of epochs."""
        self._best, self._waited = state["best"], state["waited"]

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Compare with the best so far."""
        if self.metric not in metrics:
            raise UserError(
                "no such metric was reported this epoch",
                field="EarlyStopping.metric",
                got=self.metric,
                allowed=", ".join(sorted(metrics)),
                remedy="Metrics that begin with val_ need validation data: fit(train_loader, val_loader)",
            )
        score = self._sign * metrics[self.metric]
        if score > self._best + self.min_delta:
            self._best, self._waited = score, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            context.request_stop(
                f"{self.metric} has not improved for {self._waited} epochs"
                f" (best {self._sign * self._best:.6g})"
            )

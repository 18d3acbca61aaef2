"""AccumulationMixin: gradient accumulation without communication between micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()
"""A context that does nothing and need not be entered: three of them cost as much as a small operation."""


class AccumulationMixin:
    """Holds gradient communication back until a window's last micro-batch.

    Attributes:
        model: what is called in a step; used if it has `no_sync`, as DDP's wrapper does.
    """

    model: Any

    def sync_when(self, last: bool) -> AbstractContextManager[Any]:
        """The context of one micro-batch: reduces gradients in its backward only if `last`."""
        if last or not hasattr(self.model, "no_sync"):
            return NO_CONTEXT
        held: AbstractContextManager[Any] = self.model.no_sync()
        return held

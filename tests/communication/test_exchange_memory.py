"""Tensors that were added up are free as soon as their sums have been read."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from distributed.communication.exchange import DenseSum
from distributed.communication.wire import Reply


class OwnWire:
    """The wire of one rank, which remembers what it was given."""

    rank, size = 0, 1

    def sum(self, values: Tensor) -> Reply:
        self.sent = weakref.ref(values)
        return Reply(lambda: values, lambda: True)

    def gather(self, payload: Tensor) -> Reply:
        raise NotImplementedError

    def scatter(self, parts: Tensor) -> Reply:
        raise NotImplementedError


def test_what_was_sent_is_free_without_a_garbage_collection() -> None:
    wire = OwnWire()
    pending = DenseSum(wire).begin({"a": torch.ones(3), "b": torch.ones(2)})
    assert pending.is_completed is not None
    assert pending.is_completed()
    gc.disable()
    try:
        pending.finish()
        del pending
        assert wire.sent() is None
    finally:
        gc.enable()

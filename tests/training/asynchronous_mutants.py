"""Deliberately broken forms of asynchronous SGD: each differs from the sound one by a line."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from distributed.training.low_communication.asynchronous import AsynchronousMerging
from distributed.training.low_communication.parameter_server import ParameterServer
from distributed.training.low_communication.staleness import StalenessBound
from tests.training.low_communication_mutants import BrokenMerging

__all__ = ["MUTANTS", "OF_THE_BOUND"]


class LosesUpdates(BrokenMerging):
    """The server takes a worker's parameters over, and with them loses what others have updated meanwhile."""

    class merging_class(AsynchronousMerging):
        class server_class(ParameterServer):
            def _apply(self, rank: int, step: int) -> None:
                channel = self._workers[rank]
                with self._changed:
                    for name, value in channel.values.tensors.items():
                        self._parameters[name].copy_(value)
                super()._apply(rank, step)


class ReadsOnce(BrokenMerging):
    """A worker reads the parameters before its first step alone, and goes on from its own ones."""

    class merging_class(AsynchronousMerging):
        def before_step(self, has_samples: bool) -> None:
            own = {name: p.detach().clone() for name, p in self.parameters.items()}
            super().before_step(has_samples)
            if self.step:
                for name, parameter in self.parameters.items():
                    parameter.data.copy_(own[name])


class SendsGradientsTwice(BrokenMerging):
    """An update is added twice."""

    class merging_class(AsynchronousMerging):
        def after_step(self, count: Any) -> None:
            for name, value in self._values.tensors.items():
                own: Tensor = self.parameters[name].data
                own.add_(own - value)
            super().after_step(count)


class EndsEarly(BrokenMerging):
    """Where an epoch ends, the parameters are those that rank 0 has computed last."""

    class merging_class(AsynchronousMerging):
        def _take_anchors(self, source: Any) -> None:
            super()._take_anchors(self.parameters)


class MiscountsStaleness(BrokenMerging):
    """The log says that an update is staler than it is."""

    class merging_class(AsynchronousMerging):
        class server_class(ParameterServer):
            def _apply(self, rank: int, step: int) -> None:
                with self._changed:
                    self.bound.reading[rank] = max(0, self.bound.reading[rank] - 1)
                super()._apply(rank, step)


class ReadsWhileAnyNumberDoes(StalenessBound):
    """Any number of workers may compute at the same time."""

    def may_read(self) -> bool:
        return True


class AppliesAtOnce(StalenessBound):
    """An update is applied when it arrives, however stale it makes others."""

    def may_apply(self, worker: Any) -> bool:
        return True


class AppliesTheOldestAlone(StalenessBound):
    """The bound is kept for the next update, and not for those after it."""

    def may_apply(self, worker: Any) -> bool:
        others = [version for other, version in self.reading.items() if other != worker]
        return all(self.version + 1 - version <= self.limit for version in others)


class CountsReadersAsOne(StalenessBound):
    """One worker too many may compute at the same time."""

    def may_read(self) -> bool:
        return len(self.reading) <= self.limit + 1


OF_THE_BOUND = [ReadsWhileAnyNumberDoes, AppliesAtOnce, AppliesTheOldestAlone, CountsReadersAsOne]
_CLASSES = [LosesUpdates, ReadsOnce, SendsGradientsTwice, EndsEarly, MiscountsStaleness]
MUTANTS = [kind.__name__ for kind in _CLASSES]

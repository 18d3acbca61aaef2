"""Deliberately broken forms of low-communication training: each differs from the sound one by a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distributed.communication.broadcast import broadcast_values
from distributed.communication.coded_sum import CodedSum
from distributed.interfaces.backend import StepResult
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import StateReader
from distributed.registry.catalog import get_catalog
from distributed.training.low_communication.backend import LowCommunicationBackend
from distributed.training.low_communication.merging import Fragment, Merging
from distributed.training.step_module import StepModule

__all__ = ["BrokenMerging", "MUTANTS", "OF_CODECS", "OF_RESUMING", "OF_STREAMING", "registered"]


class BrokenMerging(LowCommunicationBackend):
    """The sound backend with another class of `Merging`."""

    merging_class: type[Merging] = Merging

    def wrap(self, step: StepModule) -> StepModule:
        wrapped = super().wrap(step)
        self.merging.__class__ = self.merging_class
        return wrapped


class ForgetsOuterMomentum(BrokenMerging):
    """The outer momentum begins at zero at each outer step."""

    class merging_class(Merging):
        def _end(self, fragment: Fragment, mixing: float) -> None:
            for velocity in self.velocities.values():
                velocity.zero_()
            super()._end(fragment, mixing)


class AveragesUnweighted(BrokenMerging):
    """Each rank counts the same, whatever it has consumed."""

    class merging_class(Merging):
        def _shares(self, weights: Sequence[Any]) -> list[float]:
            return super()._shares([1.0] * len(weights))


class WrongSign(BrokenMerging):
    """The outer optimizer climbs."""

    class merging_class(Merging):
        def _delta(self, name: str) -> Tensor:
            return -super()._delta(name)


class OldAnchor(BrokenMerging):
    """Changes are measured from the parameters with which training began."""

    class merging_class(Merging):
        first: dict[str, Tensor] | None = None

        def _delta(self, name: str) -> Tensor:
            self.first = self.first or {n: a.clone() for n, a in self.anchors.items()}
            return self.first[name] - self.parameters[name].detach()


class TakesInLate(BrokenMerging):
    """A part takes effect one step after it is due."""

    class merging_class(Merging):
        def after_step(self, count: Any) -> None:
            self.rule = replace(self.rule, overlap=3)
            super().after_step(count)


class AveragesInnerState(LowCommunicationBackend):
    """The momentum of the inner optimizers is averaged at outer steps."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        if self.merging.step == 0:
            for state in self.optimizer.state.values():
                torch.distributed.all_reduce(state["momentum_buffer"])
                state["momentum_buffer"] /= self.world.size
        return result


class ResetsInnerState(LowCommunicationBackend):
    """The inner optimizers are reset after outer steps."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        result = super().optimizer_step(max_norm, want_norm)
        if self.merging.step == 0:
            self.optimizer.state.clear()
        return result


class StepsWithoutSamples(LowCommunicationBackend):
    """A rank without samples steps with a gradient of zero, so that momentum moves it."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self.module.parameters() if not self._own_samples else ():
            parameter.grad = torch.zeros_like(parameter)
        self._own_samples = 1
        return super().optimizer_step(max_norm, want_norm)


class DividesByTheWholeBatch(LowCommunicationBackend):
    """A rank's gradient is divided by the samples of the global batch, as in data parallelism."""

    def run_window(self, window: Any) -> tuple[Any, Any]:
        result = super().run_window(window)
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad *= self._own_samples / window.num_samples
        return result


class _ForgetfulSum(CodedSum):
    def _keep(self, name: str, residual: Tensor | None, state: dict[str, Tensor]) -> None:
        super()._keep(name, None, state)


class ForgetsTheResidual(LowCommunicationBackend):
    """What a codec has not sent at an outer step is dropped."""

    def adopt(self, plan: RunPlan) -> None:
        super().adopt(plan)
        assert self._codec is not None
        self._codec.exchange = _ForgetfulSum


class ForgetsTheResidualWhereAllAreEqual(LowCommunicationBackend):
    """What a codec has not sent is dropped at the end of an epoch, with the rest of the period."""

    def synchronize(self) -> None:
        super().synchronize()
        assert self._codec is not None
        for summed in self._codec.leave():
            summed.residuals.clear()


class DrawsByTheStepOfTheRun(LowCommunicationBackend):
    """The codec's random numbers are those of the optimizer step, and not of the outer step."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        assert self._codec is not None
        for summed in self._codec.leave():
            summed.step += self.merging.step > 0
        return super().optimizer_step(max_norm, want_norm)


class ResumesWithRankZerosMoments(LowCommunicationBackend):
    """A resumed rank has the inner optimizer state of rank 0."""

    def import_state(self, reader: StateReader) -> None:
        super().import_state(reader)
        for state in self.optimizer.state.values():
            broadcast_values(value for value in state.values() if value.dim())


class ResumesWithoutOuterMomentum(LowCommunicationBackend):
    """A resumed run has no outer momentum."""

    def import_state(self, reader: StateReader) -> None:
        super().import_state(reader)
        for velocity in self.merging.velocities.values():
            velocity.zero_()


class ResumesFromTheAnchors(LowCommunicationBackend):
    """A resumed rank has lost its steps since the last outer step."""

    def import_state(self, reader: StateReader) -> None:
        super().import_state(reader)
        for name, parameter in self.merging.parameters.items():
            parameter.data.copy_(self.merging.anchors[name])


class BeginsThePeriodAnew(LowCommunicationBackend):
    """A resumed run counts the steps of the period from where it resumed."""

    def import_state(self, reader: StateReader) -> None:
        super().import_state(reader)
        self.merging.step = 0


_OF_RESUMING = [
    ResumesWithRankZerosMoments,
    ResumesWithoutOuterMomentum,
    ResumesFromTheAnchors,
    BeginsThePeriodAnew,
]
OF_RESUMING = [kind.__name__ for kind in _OF_RESUMING]
_CLASSES = [
    ForgetsOuterMomentum,
    AveragesUnweighted,
    WrongSign,
    OldAnchor,
    TakesInLate,
    AveragesInnerState,
    ResetsInnerState,
    StepsWithoutSamples,
    DividesByTheWholeBatch,
]
MUTANTS = [kind.__name__ for kind in _CLASSES]
OF_CODECS = {
    ForgetsTheResidual.__name__: "int8",
    ForgetsTheResidualWhereAllAreEqual.__name__: "top-k",
    DrawsByTheStepOfTheRun.__name__: "random-k",
}
"""Broken forms of compressed outer steps, and a codec under which each shows."""
OF_STREAMING = [TakesInLate.__name__]


@contextmanager
def registered(name: str, module: str = __name__) -> Iterator[None]:
    """Within the block, a mutant of `module` is a backend, called as its class."""
    backends = get_catalog().backends
    target = f"{module}:{name}"
    backends[name] = replace(backends["pytorch-ddp"], name=name, low_communication=target)
    try:
        yield
    finally:
        del backends[name]

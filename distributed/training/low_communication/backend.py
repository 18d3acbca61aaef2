"""LowCommunicationBackend: a replica per rank, which takes optimizer steps with its own samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.rank_local import Replica
from distributed.checkpoint.torch_state import canonical_name, export_replicated
from distributed.communication.broadcast import broadcast_values
from distributed.communication.exchange import DenseSum
from distributed.communication.wire import GroupWire
from distributed.errors import UserError
from distributed.interfaces.backend import Backend, CommunicationTimes, StepResult, Window
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.training.compression import Compression, report_dropped
from distributed.training.low_communication.arrivals import ArrivalRecord
from distributed.training.low_communication.asynchronous import AsynchronousMerging
from distributed.training.low_communication.merging import Merging
from distributed.training.low_communication.outer_step import OuterRule
from distributed.training.low_communication.saved_state import add_own_state, restore_own_state
from distributed.training.low_communication.sums import ByCodec, NamedSum
from distributed.training.process_group_backend import ProcessGroupBackend
from distributed.training.step_module import StepModule

__all__ = ["LowCommunicationBackend"]


class LowCommunicationBackend(ProcessGroupBackend):
    """Each rank steps with its own optimizer and the mean loss over its own samples of a global batch.
    `Merging` exchanges parameters after some of the steps. A rank without samples in a global batch does not
    step.

    Attributes:
        merging: schedule and state of the exchanges, from `prepare` on.
    """

    follows_requires_grad = False
    counts_with_gradients = False
    sums_gradients = True
    reads_own_parameters = True
    repeats_windows = False
    merging: Merging
    _codec: Compression | None = None
    _own_samples = 0
    _own_count: Any = 0
    _waited, _steps = 0.0, 0

    def adopt(self, plan: RunPlan) -> None:
        super().adopt(plan)
        # A codec sends changes of parameters at outer steps, and not the gradients of each step.
        self._codec, self.compression = self.compression, None
        self.follows_requires_grad, self._plan = False, plan

    @property
    def num_contributors(self) -> int:
        return 1

    # -- the model -------------------------------------------------------------------

    def prepare(self, task: Task) -> None:
        velocities, summed = (task.run_state or {}).get("backend") or ({}, None)
        if self._codec is not None:
            self._codec.left = summed
        super().prepare(task)
        for name, velocity in velocities.items():
            if name in self.merging.velocities:
                self.merging.velocities[name].copy_(velocity)

    def wrap(self, step: StepModule) -> StepModule:
        several = self.world.size > 1
        if several:
            broadcast_values([*step.parameters(), *step.buffers()])
        trained = {canonical_name(n): p for n, p in self.module.named_parameters() if p.requires_grad}
        _check_real(trained)
        wire = GroupWire() if several else None
        self.merging = self._merging(wire, trained)
        return step

    def _merging(self, wire: GroupWire | None, trained: Mapping[str, Tensor]) -> Merging:
        section, shared = self.config.low_communication, (trained, self.module.buffers(), self.all_reduce)
        if section.max_staleness is None:
            return Merging(OuterRule.of(section), *shared, self._summed(wire, trained), wire)
        arrivals = ArrivalRecord(section.arrival_log) if self.world.rank == 0 else None
        timeout = self.config.collective_timeout
        return AsynchronousMerging(section.max_staleness, timeout, arrivals, *shared, wire)

    def _summed(self, wire: GroupWire | None, trained: Mapping[str, Tensor]) -> NamedSum:
        spec = self._plan.codec
        if wire is None or spec is None or self._codec is None:
            return DenseSum(wire)
        return ByCodec(self._codec.over(wire, trained), spec, self.config.compression, wire.size)

    # -- one step --------------------------------------------------------------------

    @property
    def placeholders(self) -> str:
        return "skipped"

    def run_window(self, window: Window) -> tuple[Any, Any]:
        self._own_samples = sum(number for _, number in window.micro_batches)
        with self._waiting():
            self.merging.before_step(self._own_samples > 0)
        own = Window(window.micro_batches, self._own_samples or 1)
        total, self._own_count = super().run_window(own)
        return total, self._own_count

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        if self._own_samples:
            result = super().optimizer_step(max_norm, want_norm)
        else:
            self.clear_gradients()
            result = StepResult(0.0, skipped=False)
        with self._waiting():
            self.merging.after_step(self._own_count)
        self._steps += 1
        return result

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the time of the block as that of exchanges with other ranks."""
        start = perf_counter()
        yield
        seconds = perf_counter() - start
        self._waited += seconds
        self.timers.add("backward", seconds)  # of which the record takes what was waited

    def communication_times(self) -> CommunicationTimes | None:
        """Exchanges of steps, with what is computed for them; not known on GPUs, whose streams the host does
        not see wait."""
        seconds, self._waited = self._waited / max(1, self._steps), 0.0
        self._steps = 0
        return CommunicationTimes(seconds) if self.world.device == "cpu" else None

    def synchronize(self) -> None:
        self.merging.merge()

    def replicated(self) -> Mapping[str, Any]:
        """The parameters after the last outer step, which are equal on all ranks."""
        return self.merging.anchors

    def interval_metrics(self) -> Mapping[str, float]:
        return self.merging.take_metrics()

    # -- state -----------------------------------------------------------------------

    def export_state(self) -> BackendState:
        self.merging.settle()
        place = Replica(self.world.data_parallel_rank, self.world.data_parallel_size)
        with self._anchors_in_place():
            state = export_replicated(
                self.module, None, None, place.index, place.number, held=self.exports, leads=self.leads
            )
        add_own_state(state, self.merging, self.module, self.optimizer, place)
        if self._codec is not None:
            state.chunks += self._codec.export(self._exchanged(), self.world.rank == 0)
        return state

    @contextmanager
    def _anchors_in_place(self) -> Iterator[None]:
        """Within the block, the model has the values of the anchors."""
        own = {name: parameter.data for name, parameter in self.merging.parameters.items()}
        for name, anchor in self.merging.anchors.items():
            self.merging.parameters[name].data = anchor
        try:
            yield
        finally:
            for name, data in own.items():
                self.merging.parameters[name].data = data

    def import_state(self, reader: StateReader) -> None:
        place = Replica(self.world.data_parallel_rank, self.world.data_parallel_size)
        restore_own_state(reader, self.merging, self.module, self.optimizer, place)
        if self._codec is not None:
            self._codec.restore(reader, self._exchanged())
        elif self.world.rank == 0:
            report_dropped(reader)

    def release(self) -> None:
        self.merging.close()
        super().release()

    def leftover_state(self) -> Any:
        """The outer momentum and what the codec has kept, for a second `fit` in this process."""
        velocities = {name: velocity.cpu() for name, velocity in self.merging.velocities.items()}
        return velocities, None if self._codec is None else self._codec.leave()

    def alone(self) -> Backend:
        single = super().alone()
        if self._codec is not None and isinstance(single, LowCommunicationBackend):
            self._codec.report_unreturned()
            single._codec = None
        return single


def _check_real(trained: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in trained.items():
        if torch.is_complex(parameter):
            raise UserError(
                f"parameter '{name}' is complex, and ranks that train on their own average real numbers",
                field="low_communication.mode",
                got=str(parameter.dtype),
                allowed="real parameters",
                remedy="Set low_communication.mode=none",
            )

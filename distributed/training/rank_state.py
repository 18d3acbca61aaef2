"""RankState: what a rank of a torch backend holds of the run's state, saved and loaded by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, own_copies
from distributed.checkpoint.rank_local import Replica
from distributed.checkpoint.staging_buffers import to_host
from distributed.checkpoint.torch_state import (
    canonical_name,
    export_replicated,
    import_replicated,
    named_tensors,
    report_differences,
)
from distributed.checkpoint.weight_digests import weight_digests
from distributed.config import DistributedConfig
from distributed.interfaces.backend import Backend
from distributed.interfaces.state import BackendState, Chunk, StateReader
from distributed.training.compression import Compression, Held, report_dropped
from distributed.training.mixins.stepping import SteppingMixin

__all__ = ["RankState"]

BUFFER = "buffer"
"""Key of the buffers that a ``state_dict`` leaves out."""


class RankState(SteppingMixin, Backend):
    """Model, optimizer, gradient scaler and what a codec keeps. Without an override, each rank holds all of
    it; a subclass that divides the model overrides `held` and what follows from it.

    Attributes:
        module: the user's module, unwrapped.
        optimizer: the optimizer in use, whose groups hold the learning rates. The user's own
            object when one was given, for a scheduler may drive it.
        pieces: what the optimizer holds instead of whole parameters, as `export_replicated`
            takes it; empty unless a subclass shards the optimizer.
        compression: the codec by which this rank sends gradients; None as they are.
    """

    config: DistributedConfig
    module: nn.Module
    optimizer: torch.optim.Optimizer
    compression: Compression | None = None

    def __init__(self) -> None:
        super().__init__()
        self.pieces: dict[Tensor, tuple[str, int]] = {}
        self._buffers_at_start: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}

    def held(self, name: str) -> bool:
        """Whether this rank holds the tensor or module of that canonical name."""
        return True

    def exports(self, name: str) -> bool:
        """Whether this rank holds the tensor of that canonical name, and `export_state` saves it."""
        return name not in self.omitted and self.held(name)

    @property
    def parts(self) -> Mapping[Tensor, Any]:
        """Ranges of parameters that this rank holds, as `export_replicated` takes them."""
        return {}

    @property
    def holders(self) -> tuple[int, int]:
        """Index of this rank among those that hold a tensor that is not sharded, and their number."""
        return self.world.data_parallel_rank, self.world.data_parallel_size

    def copies(self, name: str, tensor: Tensor) -> tuple[int, int]:
        """The same of the tensor of a canonical name: among the ranks that hold the same elements of it."""
        return own_copies(tensor) if is_sharded(tensor) else self.holders

    def leads(self, name: str) -> bool:
        """Whether this rank, of those that hold the tensor or module of a canonical name, saves what is not
        cut."""
        return self.holders[0] == 0

    def weight_digests(self, names: Collection[str]) -> Mapping[str, int] | None:
        tensors = {n: t for n, t in named_tensors(self.module)[0].items() if n in names and self.held(n)}
        return weight_digests(tensors, *self.holders, self.parts, self.copies)

    def place_of(self, name: str, parameter: Tensor) -> Held:
        """Where this rank is among those that hold the parameter of a canonical name."""
        return Held(parameter, Replica(self.world.data_parallel_rank, self.world.data_parallel_size))

    def _exchanged(self) -> dict[str, Held]:
        """The parameters whose gradients a codec sends, by canonical name."""
        named = ((canonical_name(n), p) for n, p in self.module.named_parameters())
        return {n: self.place_of(n, p) for n, p in named if p.requires_grad and not p.is_meta}

    def mark_buffers(self) -> None:
        """Take buffers as they are now for those that any model of the class has."""
        self._buffers_at_start = {(m, name): (b, b._version) for _, m, name, b in _volatile(self.module)}

    def changed_buffers(self) -> list[Chunk]:
        """Buffers that a ``state_dict`` leaves out, as far as they were changed since `mark_buffers`."""
        return [
            Chunk(name, BUFFER, tuple(buffer.shape), 0, to_host(buffer.detach().reshape(-1)))
            for name, module, key, buffer in _volatile(self.module)
            if self.held(name)
            and self.leads(name)
            and _differs(self._buffers_at_start.get((module, key)), buffer)
        ]

    @torch.no_grad()
    def restore_buffers(self, reader: StateReader) -> None:
        saved = {name: shape for (key, name), shape in reader.tensors().items() if key == BUFFER}
        for name, module, key, buffer in list(_volatile(self.module)):
            if name in saved and self.held(name):
                value = reader.read(BUFFER, name).reshape(saved[name]).to(buffer.device, buffer.dtype)
                if value.shape == buffer.shape:
                    buffer.copy_(value)
                else:
                    module._buffers[key] = value

    def export_state(self) -> BackendState:
        with self.optimizer_in_evaluation():
            state = self._export_model()
            state.chunks += self.changed_buffers()
        if self.compression is not None:
            state.chunks += self.compression.export(self._exchanged(), self.world.rank == 0)
        return state

    def _export_model(self) -> BackendState:
        return export_replicated(
            self.module,
            self.optimizer,
            self.scaler_state(),
            *self.holders,
            pieces=self.pieces,
            held=self.exports,
            copies=self.copies,
            leads=self.leads,
        )

    def import_state(self, reader: StateReader) -> None:
        self.report_differences(reader)
        import_replicated(reader, self.module, self.optimizer, pieces=self.pieces, held=self.held)
        self.restore_buffers(reader)
        if self.config.optimizer_bits != 32:
            from distributed.training.low_bit import pack_state

            pack_state(self.optimizer)
        if self.scaler is not None and reader.scaler:
            self.scaler.load_state_dict(reader.scaler)
        if self.compression is not None:
            self.compression.restore(reader, self._exchanged())
        elif self.world.rank == 0:
            report_dropped(reader)

    def report_differences(self, reader: StateReader) -> None:
        """Warn once of what is not the same in the checkpoint and in this model."""
        if self.world.rank == 0:
            report_differences(reader, self.module, self.parts)

    def leftover_state(self) -> Any:
        return None if self.compression is None else self.compression.leave()

    def alone(self) -> Backend:
        single = super().alone()
        if self.compression is not None and isinstance(single, RankState):
            self.compression.report_unreturned()
            single.compression = None
        return single

    def scaler_state(self) -> dict[str, Any] | None:
        return self.scaler.state_dict() if self.scaler is not None else None


def _volatile(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """(canonical name, module, name in it, buffer) of the buffers that are not persistent."""
    for prefix, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and key in module._non_persistent_buffers_set and not buffer.is_meta:
                yield canonical_name(f"{prefix}.{key}".lstrip(".")), module, key, buffer


def _differs(mark: tuple[Tensor, int] | None, buffer: Tensor) -> bool:
    return mark is None or mark[0] is not buffer or mark[1] != buffer._version

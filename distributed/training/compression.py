"""Compression: the codec of a run on one rank, and its state in checkpoints."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from distributed.checkpoint.rank_local import Replica, export_rank_local, read_rank_local, saved_kinds
from distributed.checkpoint.staging_buffers import to_host
from distributed.communication.codecs.base import Codec
from distributed.communication.coded_sum import CodedSum
from distributed.communication.wire import Wire
from distributed.config import DistributedConfig
from distributed.interfaces.codec import CodecSpec
from distributed.interfaces.state import Chunk, StateReader
from distributed.registry.catalog import load_target
from distributed.system.output import print_line
from distributed.training.model_traits import COMPLEX, SPARSE

__all__ = ["CANNOT_SEND", "RESIDUAL", "Compression", "Held", "report_dropped"]

logger = logging.getLogger("distributed")

CANNOT_SEND = {
    COMPLEX: "codecs send gradients of real numbers",
    SPARSE: "codecs send dense gradients",
}
"""Traits of a parameter with which its gradient cannot be sent by a codec, and why."""

RESIDUAL = "compression.residual"
_STEP = "compression.step"
_DROPPED = (
    "note: the checkpoint holds parts of gradients that its codec had still to send; this run has no codec"
    " (compression.codec=none), and leaves them out"
)
_STATE = re.compile(r"compression\.state\.([a-z_]{1,64})\.part\.(\d{1,9})\.of\.(\d{1,9})")


class Held:
    """A parameter whose gradient is exchanged, and the position of this rank among those that hold it.

    Args:
        parameter: the elements of the parameter that this rank holds.
        replica: index of this rank's replica of these elements, and the number of replicas.
        part: index of these elements among the parts into which ranks cut the parameter.
        parts: number of these parts.
    """

    def __init__(self, parameter: Tensor, replica: Replica, part: int = 0, parts: int = 1) -> None:
        self.parameter, self.replica, self.part, self.parts = parameter, replica, part, parts

    def key(self, state: str) -> str:
        """The key under which a tensor of the codec's own is saved."""
        return f"compression.state.{state}.part.{self.part}.of.{self.parts}"


class Compression:
    """The codec of a run, and what is kept of gradients until it is sent.

    A checkpoint holds the residual of each replica of each parameter, the codec's own tensors and its number
    of steps. As many replicas resume with the same bits; another number shares the sum of the residuals, so
    that the update that is pending stays the same.

    Attributes:
        name: name of the codec.
        codec: the codec, one instance for all parameters.
        exchange: class of the exchange over one wire.
        left: what an earlier `fit` in this process has left by `leave`; None without one.
    """

    exchange: type[CodedSum] = CodedSum

    def __init__(self, spec: CodecSpec, config: DistributedConfig) -> None:
        options = config.compression
        self.name = spec.name
        self.codec: Codec = load_target(spec.target)(options, spec.feeds_back(options))
        self._seed, self._revocable = config.seed, config.on_nan == "skip"
        self._sums: list[CodedSum] = []
        self.left: list[CodedSum] | None = None

    def over(self, wire: Wire, names: Collection[str]) -> CodedSum:
        """The exchange over `wire` of the gradients of the parameters `names`."""
        made = self.exchange(self.codec, wire, self._seed, self._revocable, names)
        if self.left:
            before = self.left.pop(0)
            made.load(before.residuals, before.states, before.step)
        self._sums.append(made)
        return made

    def settle(self, skipped: bool) -> None:
        """End a step; see `CodedSum.settle`."""
        for summed in self._sums:
            summed.settle(skipped)

    def leave(self) -> list[CodedSum]:
        """The exchanges, with whose state a later `fit` in this process continues."""
        return list(self._sums)

    def begin_again(self) -> None:
        """Let the next exchanges continue these, for other parameters."""
        self.left, self._sums = self._sums or self.left, []

    def kept(self) -> list[Tensor]:
        """What this rank keeps between steps: residuals, and tensors of the codec."""
        states = (tensors for summed in self._sums for tensors in summed.states.values())
        residuals = (tensor for summed in self._sums for tensor in summed.residuals.values())
        return [*residuals, *(tensor for tensors in states for tensor in tensors.values())]

    def report_unreturned(self) -> None:
        """Log that the caller does not get what is pending on other hosts."""
        if any(summed.residuals for summed in self._sums):
            logger.warning(
                "what the codec '%s' has still to send stays with the ranks of each host, and a second fit()"
                " begins without it. Set checkpoint_dir, and resume from a checkpoint instead",
                self.name,
            )

    def export(self, held: Mapping[str, Held], first: bool) -> Iterator[Chunk]:
        """What a checkpoint holds of this rank. Without collectives.

        Args:
            held: by name of a parameter.
            first: this rank saves what is the same on all.
        """
        parameters = {name: one.parameter for name, one in held.items()}
        replicas = {name: one.replica for name, one in held.items()}
        for summed in self._sums:
            yield from export_rank_local(RESIDUAL, summed.residuals, parameters, replicas)
            for name, tensors in summed.states.items():
                one = held[name]
                if one.replica.index == one.replica.copy == 0:
                    for state, tensor in tensors.items():
                        yield _whole_chunk(name, one.key(state), tensor)
        if first and self._sums:
            yield _whole_chunk("step", _STEP, torch.tensor(max(summed.step for summed in self._sums)))

    def restore(self, reader: StateReader, held: Mapping[str, Held]) -> None:
        """Load what a run with the same codec saved; without it, begin with nothing pending.

        Raises:
            UserError: the saved state is incomplete.
        """
        parameters = {name: one.parameter for name, one in held.items()}
        replicas = {name: one.replica for name, one in held.items()}
        saved = reader.tensors()
        step = int(reader.read(_STEP, "step").item()) if (_STEP, "step") in saved else 0
        residuals, _ = read_rank_local(RESIDUAL, reader, parameters, replicas, keep="sum")
        residuals = {name: tensor.to(parameters[name].device) for name, tensor in residuals.items()}
        states = dict(_own_states(reader, held))
        for summed in self._sums:
            summed.load(residuals, states, step)


def report_dropped(reader: StateReader) -> None:
    """Print a note if a saved state holds what a codec was still to send, which a run without one drops."""
    if RESIDUAL in saved_kinds(reader):
        print_line(_DROPPED, sys.stdout)


def _own_states(reader: StateReader, held: Mapping[str, Held]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    found: dict[str, dict[str, Tensor]] = {}
    for (key, name), shape in reader.tensors().items():
        match = _STATE.fullmatch(key)
        if match is not None and name in held and key == held[name].key(match[1]):
            device = held[name].parameter.device
            found.setdefault(name, {})[match[1]] = reader.read(key, name).reshape(shape).to(device)
    yield from found.items()


def _whole_chunk(name: str, key: str, tensor: Tensor) -> Chunk:
    data: Any = to_host(tensor.detach().reshape(-1))
    return Chunk(name, key, tuple(tensor.shape), 0, data)

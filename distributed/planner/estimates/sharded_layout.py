"""ShardedUnits: the memory of FSDP2."""

from __future__ import annotations

from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import ModelFacts, ParameterFacts
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import LOOPED, ONE_STAGE

__all__ = ["ShardedUnits"]


class ShardedUnits(Layout):
    """FSDP2: rows of every parameter divided over the ranks, each block gathered for its forward and again
    for its backward, and the rest of the model for the whole step.

    The staging memory of an all-gather lives until the next one in forward, and until its values are copied
    out in backward; that of the next block is allocated before the current one computes. The staging memory
    of a reduction lives until the next one. Source: torch/distributed/fsdp/_fully_shard (2.13),
    ``_fsdp_param_group`` and ``_fsdp_collectives``.
    """

    axes = ("data", "shard", "tensor", "pipeline", "context")
    schedules = (*ONE_STAGE, *LOOPED)
    gathers_once = True
    can_offload = False

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        dims = split.dims
        # Ranks along ``data`` hold copies of the shards, unless there are no others.
        self.ranks = dims.shard if dims.shard > 1 else dims.data
        self.shards = dims.data_parallel_size > 1
        self._units: dict[int, list[int]] = {block: [] for block in range(len(facts.blocks))}
        for number, parameter in enumerate(facts.parameters):
            if parameter.shape and parameter.numel:
                self._units[parameter.block].append(number)
        self._gathered: set[int] = set()
        self._staged: dict[int, int] = {}
        self._previous: int | None = None
        self._reduced: int | None = None
        self._order: list[int] = []
        self._pending: dict[int, list[int]] = {}
        self._unit_of = {n: unit for unit, members in self._units.items() for n in members}

    def held(self, parameter: ParameterFacts) -> int:
        return parameter.shard_bytes(self.ranks) if self.shards else parameter.nbytes

    # -- gathering --------------------------------------------------------------------

    def _padded(self, unit: int) -> int:
        return sum(self.held(self.facts.parameters[n]) for n in self._units[unit]) * self.ranks

    def _stage(self, unit: int) -> None:
        """Allocate the output of a unit's all-gather."""
        if unit not in self._staged and unit not in self._gathered and self._units[unit]:
            self._staged[unit] = self._padded(unit)
            self.ledger.take("framework", self._staged[unit])
            self.collective(self._staged[unit])

    def _copy_out(self, unit: int) -> None:
        self._gathered.add(unit)
        for number in self._units[unit]:
            self.ledger.take("parameters", self.held(self.facts.parameters[number]) * self.ranks)

    def _unstage(self, unit: int) -> None:
        self.ledger.give("framework", self._staged.pop(unit, 0))

    def _reshard(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.remove(unit)
            for number in self._units[unit]:
                self.ledger.give("parameters", self.held(self.facts.parameters[number]) * self.ranks)

    def begin(self) -> None:
        if self._order:
            self._order.append(0)  # the forward pass of the whole model has ended before
        if self.shards:
            self._forward_gather(0)

    def _forward_gather(self, unit: int) -> None:
        if unit in self._gathered:
            return
        self._stage(unit)
        if self._previous is not None:
            self._unstage(self._previous)
        self._copy_out(unit)
        self._previous = unit

    def enter_forward(self, block: int) -> None:
        if self.shards and block:
            self._forward_gather(block)

    def leave_forward(self, block: int) -> None:
        if self.shards and block:
            self._order.append(block)
            self._reshard(block)

    def backward(self, _: int) -> None:
        if not self.shards:
            return
        if self._previous is not None:
            self._unstage(self._previous)
            self._previous = None
        if 0 not in self._gathered:  # in a pipeline, backward of an earlier micro-batch has freed it
            self._stage(0)
            self._copy_out(0)
            self._unstage(0)
        if self._order:
            self._stage(self._order[-1])

    def enter_backward(self, block: int) -> None:
        if not self.shards or not block:
            return
        self._stage(block)
        if block not in self._gathered:
            self._copy_out(block)
        self._unstage(block)
        if block in self._order:
            at = len(self._order) - 1 - self._order[::-1].index(block)
            if at:
                self._stage(self._order[at - 1])

    # -- reducing ---------------------------------------------------------------------

    def gradient(self, parameter: int) -> None:
        tensor = self._timeline.gradients.get(parameter)
        super().gradient(parameter)
        unit = self._unit_of.get(parameter)
        if self.shards and unit is not None and tensor is not None and tensor in self._parts:
            del self._parts[tensor]  # it may outlive the micro-batch
            self._pending.setdefault(unit, []).append(self.size(tensor))

    def leave_backward(self, block: int) -> None:
        if self.shards and block:
            self._reduce(block)

    def finish(self) -> None:
        if not self.shards:
            return
        for unit in reversed(range(len(self.facts.blocks))):
            self._reduce(unit)
        self._order.clear()
        if self._reduced is not None:
            self.ledger.give("framework", self._reduced)
            self._reduced = None

    def end_window(self) -> None:
        """Add up the gradients of shards over the slices of sequences."""
        if self.split.dims.context > 1:
            nbytes = sum(self.held(self.facts.parameters[number]) for number in self.trained)
            self.ledger.take("gradients", nbytes)
            self.sum_over(nbytes, "context")
            self.ledger.give("gradients", nbytes)

    def _reduce(self, unit: int) -> None:
        self._reshard(unit)
        if not self.is_last or unit not in self._pending:
            return
        if self._reduced is not None:
            self.ledger.give("framework", self._reduced)
            self._reduced = None
        trained = [n for n in self._units[unit] if self.facts.parameters[n].trained]
        shards = sum(self.held(self.facts.parameters[n]) for n in trained)
        self._reduced = shards * self.ranks
        self.ledger.take("framework", self._reduced)
        for nbytes in self._pending.pop(unit):
            self.ledger.give("gradients", nbytes)
        self.ledger.take("gradients", shards)
        self.collective(self._reduced)
        if self.split.dims.shard > 1:
            self.sum_over(shards, "data")

"""Layouts that are wrong by one line each; the oracle of test_memory.py has to notice each of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.layout import Layout, MicroBatch
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import ModelFacts, ParameterFacts
from distributed.planner.estimates.replicated_layout import Buckets, CodedGradients, FlatGradients
from distributed.planner.estimates.sharded_layout import ShardedUnits
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.zero3_layout import ParameterShards
from distributed.planner.estimates.zero_layout import ZeroStages
from distributed.planner.stage_order import BACKWARD, FORWARD, rank_order, rank_stages

__all__ = ["MUTANTS", "ORDERS"]


class ForgetsOptimizerWorkspace(Layout):
    """The temporary memory of the update is not counted."""

    def update(self, tensors: list[int]) -> None:
        return None


class CarriesNothing(Layout):
    """The update of a parameter ends with all its temporary memory free."""

    def workspace(self, tensors: list[int]) -> list[int]:
        return super().workspace(sorted(tensors)[-1:])


class KeepsTheStateOfAnOffloadedOptimizer(Layout):
    """The state of the optimizer is on the device in any case."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, replace(split, offload=False), ledger, device)


class KeepsActivations(Layout):
    """Nothing of a micro-batch is freed before its end."""

    def free(self, tensor: int) -> None:
        return None


class ForgetsBuckets(Buckets):
    """Gradients are reduced where they are."""

    def place(self) -> None:
        Layout.place(self)


class CopiesGradients(Buckets):
    """Gradients stay beside their buckets, as without gradient_as_bucket_view."""

    def gradient(self, parameter: int) -> None:
        Layout.gradient(self, parameter)


class GathersWithoutStaging(ShardedUnits):
    """All-gathers write into the parameters."""

    def _stage(self, unit: int) -> None:
        return None


class KeepsGathered(ShardedUnits):
    """Blocks stay gathered between forward and backward."""

    def leave_forward(self, block: int) -> None:
        self._order.append(block)


class GathersPastBlocks(ShardedUnits):
    """Blocks of a stage that has ended are gathered ahead of another one."""

    def finish(self) -> None:
        before = list(self._order)
        super().finish()
        self._order = before


class ReducesInPlace(ShardedUnits):
    """The input of a reduce-scatter is not a copy."""

    def _reduce(self, unit: int) -> None:
        self._reshard(unit)


class KeepsWholeParameters(ShardedUnits):
    """Every rank keeps the whole model."""

    def held(self, parameter: ParameterFacts) -> int:
        return parameter.nbytes


class ForgetsMasters(ZeroStages):
    """The optimizer updates the flat tensor itself."""

    def place(self) -> None:
        super().place()
        if self.stage:
            self.ledger.give("optimizer", self._share)


class ReducesWithoutFlattening(ZeroStages):
    """A bucket is reduced where it is."""

    def _reduce(self) -> None:
        self._filled = 0


class KeepsOwnedGradients(ZeroStages):
    """The gradients that a rank owns stay beside their flat copy."""

    def step(self) -> None:
        self.ledger.take("gradients", self._owned)
        super().step()


class ShardsOverCopies(ShardedUnits):
    """Ranks along `data` have shards of their own beside those along `shard`."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self.ranks = split.dims.data_parallel_size


class AddsSlicesInPlace(ShardedUnits):
    """Gradients of slices are added up where they are."""

    def end_window(self) -> None:
        return None


class AddsUpInPlace(FlatGradients):
    """Buckets of a mesh are no copies."""

    def _send(self) -> None:
        self._sent.append(0)


class SendsAtTheEnd(FlatGradients):
    """Buckets of a mesh are sent when activations are gone."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self._early = False


class ForgetsScratch(FlatGradients):
    """An all-reduce needs no memory of its own."""

    def sum_over(self, nbytes: int, *axes: str) -> None:
        return None


class DropsWhatIsSent(FlatGradients):
    """A message is free as soon as the computation has ended."""

    def _enter(self, micro_batch: MicroBatch) -> None:
        micro_batch.held = frozenset()
        super()._enter(micro_batch)


class KeepsNothingOfHalves(FlatGradients):
    """Nothing but messages is live between the halves of backward."""

    def play_inputs(self, micro_batch: MicroBatch) -> None:
        super().play_inputs(micro_batch)
        self.drop(tensor for tensor in list(micro_batch.parts) if tensor not in micro_batch.held)


class KeepsNoResiduals(CodedGradients):
    """A codec keeps nothing between steps."""

    def place(self) -> None:
        Layout.place(self)


class DropsResults(CodedGradients):
    """The result of an exchange is free before the next one ends."""

    def end_window(self) -> None:
        while len(self._sent) < len(self._exchanges):
            self._send()
        for bucket in self._exchanges:
            self._exchange(bucket.sizes, bucket.finished)
            self._exchange(bucket.sizes, bucket.dropped)


class EncodesAtTheEnd(CodedGradients):
    """Gradients are encoded when activations are gone."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self._early = False


class EncodesInBackward(CodedGradients):
    """Gradients are encoded as soon as they are there, whatever the loss is divided by."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self._early = True


class GathersAllInPlace(ParameterShards):
    """All-gathers of ZeRO 3 write into the parameters."""

    def _gather(self, parameters: list[ParameterFacts]) -> None:
        for parameter in parameters:
            self.ledger.take("parameters", parameter.nbytes)


class ForgetsGradientShares(ParameterShards):
    """ZeRO 3 keeps no share of the gradients beside its bucket."""

    def place(self) -> None:
        super().place()
        self.ledger.give("gradients", self._share)


class FreesAfterForward(ParameterShards):
    """ZeRO 3 frees a block when its forward has ended."""

    def leave_forward(self, block: int) -> None:
        if block:
            self._free(block)


MUTANTS: tuple[tuple[str, type[Layout]], ...] = (
    ("serial", ForgetsOptimizerWorkspace),
    ("serial", CarriesNothing),
    ("serial", KeepsTheStateOfAnOffloadedOptimizer),
    ("serial", KeepsActivations),
    ("pytorch-ddp", ForgetsBuckets),
    ("pytorch-ddp", CopiesGradients),
    ("fsdp", GathersWithoutStaging),
    ("fsdp", KeepsGathered),
    ("fsdp", GathersPastBlocks),
    ("fsdp", ReducesInPlace),
    ("fsdp", KeepsWholeParameters),
    ("deepspeed", ForgetsMasters),
    ("deepspeed", ReducesWithoutFlattening),
    ("deepspeed", KeepsOwnedGradients),
    ("fsdp", ShardsOverCopies),
    ("fsdp", AddsSlicesInPlace),
    ("pytorch-ddp", AddsUpInPlace),
    ("pytorch-ddp", SendsAtTheEnd),
    ("pytorch-ddp", ForgetsScratch),
    ("pytorch-ddp", DropsWhatIsSent),
    ("pytorch-ddp", KeepsNothingOfHalves),
    ("pytorch-ddp", KeepsNoResiduals),
    ("pytorch-ddp", DropsResults),
    ("pytorch-ddp", EncodesAtTheEnd),
    ("pytorch-ddp", EncodesInBackward),
    ("deepspeed", GathersAllInPlace),
    ("deepspeed", ForgetsGradientShares),
    ("deepspeed", FreesAfterForward),
)
"""(backend, its wrong layout)."""


Order = Iterator[tuple[str, int, int]]


def one_stage_after_another(schedule: str, num_ranks: int, num_microbatches: int, rank: int) -> Order:
    """All micro-batches of a stage, backward included, before the next stage."""
    for stage in rank_stages(schedule, num_ranks, rank):
        yield from ((FORWARD, stage, m) for m in range(num_microbatches))
        yield from ((BACKWARD, stage, m) for m in range(num_microbatches))


def one_micro_batch_after_another(schedule: str, num_ranks: int, num_microbatches: int, rank: int) -> Order:
    """Backward of a micro-batch follows its forward."""
    for m in range(num_microbatches):
        for stage in rank_stages(schedule, num_ranks, rank):
            yield from ((FORWARD, stage, m), (BACKWARD, stage, m))


def breadth_first(schedule: str, num_ranks: int, num_microbatches: int, rank: int) -> Order:
    """All forward passes first, whatever the schedule."""
    yield from rank_order("looped-bfs", num_ranks, num_microbatches, rank)


ORDERS = (one_stage_after_another, one_micro_batch_after_another, breadth_first)
"""Wrong orders of a rank with several stages."""

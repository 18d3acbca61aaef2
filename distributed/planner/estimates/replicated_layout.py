"""Buckets and FlatGradients: the memory of ranks that hold copies of a model, or of the same part of it."""

from __future__ import annotations

from collections.abc import Sequence

from distributed.interfaces.codec import DENSE
from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import Event, Kind, ModelFacts, ParameterFacts
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import LOOPED, ONE_STAGE, SPLIT

__all__ = ["Buckets", "CodedGradients", "FlatGradients", "filled_buckets"]


class Buckets(Layout):
    """DistributedDataParallel with gradients as views of its buckets: a gradient is copied into its bucket as
    soon as it is complete. Micro-batches before the last one leave gradients of their own, because DDP's
    ``no_sync`` does not touch buckets. Source: torch/csrc/distributed/c10d/reducer.cpp,
    ``mark_variable_ready_dense``."""

    axes = ("data", "tensor", "pipeline", "context")
    schedules = (*ONE_STAGE, *LOOPED, *SPLIT)
    has_codecs = True

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self.reduces = split.dims.world_size > 1
        self._own: dict[int, int] = {}

    @classmethod
    def of(cls, split: Split) -> type[Layout]:
        """DDP, unless ranks share a model or send gradients by a codec."""
        if split.cut().codec != DENSE:
            return CodedGradients
        return FlatGradients if split.dims.model_parallel_size > 1 else cls

    def place(self) -> None:
        super().place()
        if self.reduces:
            self.ledger.take("gradients", sum(self.facts.parameters[n].nbytes for n in self.trained))

    def gradient(self, parameter: int) -> None:
        tensor = self._timeline.gradients.get(parameter)
        super().gradient(parameter)
        if not self.reduces:
            return
        if not self.is_last:
            if tensor is not None:
                self._own[parameter] = self.size(tensor)
        elif tensor is not None and tensor in self._parts:
            self.release(tensor)
        elif parameter in self._own:
            self.ledger.give("gradients", self._own.pop(parameter))


class FlatGradients(Layout):
    """`distributed.parallel.gradient_reducer.GradientReducer`: once the gradients of a bucket are complete in
    the last backward of a step, they are copied side by side into a tensor, which is added up. All of these
    tensors are live until the last of them has arrived. In a pipeline no bucket is sent before the end."""

    axes = Buckets.axes
    schedules = (*ONE_STAGE, *LOOPED, *SPLIT)
    has_codecs = True

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self._early = split.dims.pipeline == 1
        self._buckets = self._filled() if split.dims.size("data", "context") > 1 else []
        self._bucket_of = {n: at for at, bucket in enumerate(self._buckets) for n in bucket}
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[int] = []

    def _filled(self) -> list[list[int]]:
        return filled_buckets(self.facts.parameters, self.facts.bucket_bytes)

    def gradient(self, parameter: int) -> None:
        super().gradient(parameter)
        if self.is_last and self._early and parameter in self._bucket_of:
            self._missing[self._bucket_of[parameter]] -= 1
            while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
                self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        self._sent.append(sum(self.facts.parameters[number].nbytes for number in bucket))
        self.ledger.take("gradients", self._sent[-1])
        self.sum_over(self._sent[-1], "data", "context")

    def end_window(self) -> None:
        while len(self._sent) < len(self._buckets):
            self._send()
        for nbytes in self._sent:
            self.ledger.give("gradients", nbytes)


class CodedGradients(FlatGradients):
    """`distributed.communication.coded_sum.CodedSum`: residuals and what the codec keeps are live between
    steps. The exchanges of all buckets end one after another, and their results are live until the last of
    them has ended. Where the divisor of the mean is known after forward only, no bucket is sent before the
    end of backward."""

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        assert facts.exchange is not None
        self._members, self._exchanges = facts.exchange.members, facts.exchange.buckets
        super().__init__(facts, split, ledger, device)
        self._early = self._early and facts.exchange.early

    def _filled(self) -> list[list[int]]:
        return [list(bucket) for bucket in self._members]

    def place(self) -> None:
        super().place()
        for bucket in self._exchanges:
            for nbytes in bucket.sizes[: bucket.kept]:
                self.ledger.take("gradients", nbytes)

    def _send(self) -> None:
        number = len(self._sent)
        self._sent.append(number)
        self._exchange(self._exchanges[number].sizes, self._exchanges[number].begun)

    def _exchange(self, sizes: Sequence[int], events: Sequence[Event]) -> None:
        for kind, number in events:
            if kind == Kind.COLLECTIVE:
                self.sum_over(number, "data", "context")
            elif kind == Kind.ALLOCATE:
                self.ledger.take("gradients", sizes[number])
            else:
                self.ledger.give("gradients", sizes[number])

    def end_window(self) -> None:
        while len(self._sent) < len(self._exchanges):
            self._send()
        for bucket in self._exchanges:
            self._exchange(bucket.sizes, bucket.finished)
        for bucket in self._exchanges:
            self._exchange(bucket.sizes, bucket.dropped)


def filled_buckets(parameters: Sequence[ParameterFacts], limit: float) -> list[list[int]]:
    """Indices of trained parameters by bucket, in the order of
    `distributed.parallel.gradient_reducer.GradientReducer`: from the last parameter to the first.

    Args:
        limit: bytes of a bucket; a larger parameter has one of its own.
    """
    buckets: list[list[int]] = []
    size = 0
    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        if not parameter.trained:
            continue
        same = not buckets or parameters[buckets[-1][0]].itemsize == parameter.itemsize
        if not buckets or size + parameter.nbytes > limit or not same:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += parameter.nbytes
    return buckets

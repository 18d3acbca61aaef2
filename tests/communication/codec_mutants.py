"""Deliberately broken codecs and exchanges: each differs from the sound one by a line.

They prove that the kit for codecs can fail. The author of a codec can read in them what the kit catches.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from distributed_backends.ddp.backend import DDPBackend
from torch import Tensor, nn

from distributed.communication.codecs.base import (
    Gather,
    Message,
    Result,
    Rounds,
    Sum,
)
from distributed.communication.codecs.blocks import Int8Codec
from distributed.communication.codecs.power_sgd import PowerSGDCodec
from distributed.communication.codecs.sizes import eight_bit_traffic, number_sent
from distributed.communication.codecs.sparse import RandomKCodec, TopKCodec, largest_elements
from distributed.communication.coded_sum import CodedSum, PendingSum
from distributed.communication.wire import Wire
from distributed.config.compression import CompressionSection
from distributed.interfaces.codec import CodecSpec, Shape, Traffic
from distributed.interfaces.state import Chunk, StateReader
from distributed.registry.catalog import get_catalog
from distributed.training.compression import RESIDUAL, Compression, Held

__all__ = ["MUTANTS", "ClipsBeforeDecompression", "CodecMutant"]


class DropsTheOwnersRounding(Int8Codec):
    """The rounding of a sum is kept by no rank"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        total, own = yield from super().rounds(values, message)
        rows = self._rows(values)
        sent = self._summed(self._encoded(rows).unsqueeze(0), rows)
        return Result(total, sent.view(-1)[: own.numel()].view(values.shape))


class SumsIndices(TopKCodec):
    """The values that each rank has chosen are all-reduced, whichever elements they belong to"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        flat = values.reshape(-1)
        index = largest_elements(flat, number_sent(flat.numel(), self.options.ratio))
        total, own = torch.zeros_like(flat), torch.zeros_like(flat)
        own[index] = flat[index]
        total[index] = yield Sum(flat[index])
        return Result(total.view(values.shape), own.view(values.shape))


class AddsItsOwnFirst(TopKCodec):
    """Each rank begins the sum with its own payload"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        rounds = super().rounds(values, message)
        received = yield next(rounds)
        try:
            rounds.send(received.roll(-message.rank, 0))
        except StopIteration as end:
            result: Result = end.value
            return result
        raise AssertionError("top-k has a single request")


class SendsZeros(TopKCodec):
    """The elements that are not chosen are set to zero and sent"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        flat = values.reshape(-1)
        index = largest_elements(flat, number_sent(flat.numel(), self.options.ratio))
        own = torch.zeros_like(flat)
        own[index] = flat[index]
        received = yield Gather(own.view(torch.uint8))
        total = torch.stack([payload.clone().view(flat.dtype) for payload in received]).sum(0)
        return Result(total.view(values.shape), own.view(values.shape))


class DrawsOnEachRank(RandomKCodec):
    """Each rank draws elements of its own"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        return super().rounds(values, replace(message, seed=message.seed + message.rank))


class HidesWhatIsNotFinite(RandomKCodec):
    """A value that is not finite is sent when its element happens to be drawn"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        return super().rounds(values.nan_to_num(), message)


class WritesIntoItsState(PowerSGDCodec):
    """The factor of the step before is overwritten in place, also in a step that is skipped"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        before = dict(message.state)
        result = yield from super().rounds(values, message)
        for name, tensor in before.items():
            tensor.copy_(message.state[name])
            message.state[name] = tensor
        return result


class KeepsItsStateToItself(PowerSGDCodec):
    """The factor is kept in the codec, where no checkpoint finds it"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        own = self.__dict__.setdefault("own", {})
        message.state.update(own.get(message.name, {}))
        result = yield from super().rounds(values, message)
        own[message.name] = dict(message.state)
        message.state.clear()
        return result


class StatesHalf(Int8Codec):
    """States half of the bytes that it sends"""

    @staticmethod
    def alter(spec: CodecSpec) -> CodecSpec:
        return replace(spec, traffic=_half_of_eight_bits)


def _half_of_eight_bits(shape: Shape, itemsize: int, options: CompressionSection) -> Traffic:
    return Traffic(scattered=eight_bit_traffic(shape, itemsize, options).scattered / 2)


class DeclaresGather(Int8Codec):
    """Declares another collective than it uses"""

    @staticmethod
    def alter(spec: CodecSpec) -> CodecSpec:
        return replace(spec, exchanges=frozenset({"gather"}))


class RoundsToSixBits(Int8Codec):
    """Uses half of the 255 numbers"""

    largest = 63.0


class ForgetsTheFactor(PowerSGDCodec):
    """Each step begins with a random factor"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        message.state.clear()
        return super().rounds(values, message)


class ReadsMemoryInOrder(TopKCodec):
    """Takes the memory of a gradient for its rows, also of a transposed view"""

    def rounds(self, values: Tensor, message: Message) -> Rounds:
        total, own = yield from super().rounds(values.as_strided((values.numel(),), (1,)), message)
        return Result(total.view(values.shape), own.view(values.shape))


class _DropsResidual(CodedSum):
    def _keep(self, name: str, residual: Tensor | None, state: dict[str, Tensor]) -> None:
        super()._keep(name, residual * 0 if residual is not None else None, state)


class _MixesResiduals(CodedSum):
    def _keep(self, name: str, residual: Tensor | None, state: dict[str, Tensor]) -> None:
        super()._keep({"v": "w", "w": "v"}.get(name, name), residual, state)


class _KeepsSkipped(CodedSum):
    def settle(self, skipped: bool) -> None:
        super().settle(skipped=False)


class _DrawsForBuckets(CodedSum):
    def begin(self, gradients: Mapping[str, Tensor]) -> PendingSum:
        self._seed += len(gradients)
        return super().begin(gradients)


class _SharesOutInTheOrderOfUse(CodedSum):
    def first_row(self, name: str) -> int:
        used: dict[str, int] = self.__dict__.setdefault("used", {})
        return used.setdefault(name, len(used))


class DropsResidual(Compression):
    """What was not sent is forgotten"""

    exchange = _DropsResidual


class MixesResiduals(Compression):
    """What was not sent of one parameter is added to the gradient of another of the same shape"""

    exchange = _MixesResiduals


class KeepsSkippedSteps(Compression):
    """Residual and state of a skipped step are kept"""

    exchange = _KeepsSkipped


class DrawsForBuckets(Compression):
    """Which elements are sent depends on the parameters in the bucket"""

    exchange = _DrawsForBuckets


class SharesOutInTheOrderOfUse(Compression):
    """Which rank adds up a row depends on which parameters earlier steps have used"""

    exchange = _SharesOutInTheOrderOfUse


class SavesNoResidual(Compression):
    """A checkpoint holds no residual"""

    def export(self, held: Mapping[str, Held], first: bool) -> Iterator[Chunk]:
        return (chunk for chunk in super().export(held, first) if not chunk.key.endswith(RESIDUAL))


class SavesNoState(Compression):
    """A checkpoint holds no tensors of the codec's own"""

    def export(self, held: Mapping[str, Held], first: bool) -> Iterator[Chunk]:
        return (chunk for chunk in super().export(held, first) if ".state." not in chunk.key)


class SavesNoStep(Compression):
    """A resumed run draws the elements of the first steps again"""

    def export(self, held: Mapping[str, Held], first: bool) -> Iterator[Chunk]:
        return super().export(held, first=False)


class SharesTheMean(Compression):
    """Another number of ranks continues with the mean of the residuals on each, instead of equal shares of
    their sum"""

    def over(self, wire: Wire, names: Collection[str]) -> CodedSum:
        self.size = wire.size
        return super().over(wire, names)

    def restore(self, reader: StateReader, held: Mapping[str, Held]) -> None:
        super().restore(reader, held)
        (saved,) = {
            int(m[1]) for key, _ in reader.tensors() if (m := re.match(r"replica\.\d+\.of\.(\d+)", key))
        }
        for summed in self._sums:
            for residual in summed.residuals.values():
                residual *= self.size / saved


class ClipsBeforeDecompression(DDPBackend):
    """Each rank clips its own gradient, and the codec sends what is left"""

    def wrap(self, step: Any) -> nn.Module:
        module: nn.Module = super().wrap(step)
        assert self._reducer is not None
        self._reducer._early = False
        return module

    def reduce_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.module.parameters(), self.config.gradient_clipping or math.inf)
        super().reduce_gradients()


@dataclass(frozen=True)
class CodecMutant:
    """A broken codec, or a broken exchange with a sound one, and the test that is meant to catch it.

    Attributes:
        kind: class of the codec, or of the rank's side.
        of: the sound codec.
        caught_by: name of the conformance test.
        arguments: the test's parameters.
    """

    kind: type[Any]
    of: str
    caught_by: str
    arguments: tuple[Any, ...] = ()

    @property
    def name(self) -> str:
        """The name it is registered under."""
        return f"mutant-{self.kind.__name__}"

    @property
    def spec(self) -> CodecSpec:
        """What is registered of it."""
        sound = get_catalog().codecs[self.of]
        if issubclass(self.kind, Compression):
            return replace(sound, name=self.name)
        target = f"{self.kind.__module__}:{self.kind.__name__}"
        broken = replace(sound, name=self.name, target=target)
        return self.kind.alter(broken) if hasattr(self.kind, "alter") else broken


_ONE_TOTAL = "test_all_ranks_have_the_bits_of_one_total"
_NOTHING_LOST = "test_nothing_is_lost_with_error_feedback"
_SAME_BITS = "test_a_resumed_run_has_the_same_bits"
_SKIPS = "test_a_skipped_step_leaves_no_trace"
_BYTES, _FLOAT = "test_bytes_are_those_stated", (torch.float32,)
_REACHES = "test_a_value_that_is_not_finite_reaches_all_ranks"

MUTANTS = [
    CodecMutant(SumsIndices, "top-k", _ONE_TOTAL),
    CodecMutant(AddsItsOwnFirst, "top-k", _ONE_TOTAL),
    CodecMutant(DrawsOnEachRank, "random-k", _ONE_TOTAL),
    CodecMutant(DropsTheOwnersRounding, "int8", "test_contributions_add_up_to_the_total"),
    CodecMutant(DropsResidual, "top-k", _NOTHING_LOST),
    CodecMutant(MixesResiduals, "top-k", _NOTHING_LOST),
    CodecMutant(RoundsToSixBits, "int8", "test_rounding_stays_within_the_bound"),
    CodecMutant(ForgetsTheFactor, "powersgd", "test_each_total_is_the_oracles"),
    CodecMutant(DrawsForBuckets, "random-k", "test_buckets_do_not_matter"),
    CodecMutant(StatesHalf, "int8", _BYTES, _FLOAT),
    CodecMutant(SendsZeros, "top-k", _BYTES, _FLOAT),
    CodecMutant(DeclaresGather, "int8", "test_exchanges_are_those_declared"),
    CodecMutant(HidesWhatIsNotFinite, "random-k", _REACHES, (math.nan,)),
    CodecMutant(KeepsSkippedSteps, "top-k", _SKIPS),
    CodecMutant(WritesIntoItsState, "powersgd", _SKIPS),
    CodecMutant(SavesNoResidual, "int8", _SAME_BITS),
    CodecMutant(SavesNoState, "powersgd", _SAME_BITS),
    CodecMutant(KeepsItsStateToItself, "powersgd", _SAME_BITS),
    CodecMutant(SavesNoStep, "random-k", _SAME_BITS),
    CodecMutant(SharesOutInTheOrderOfUse, "int8", _SAME_BITS),
    CodecMutant(SharesTheMean, "top-k", "test_another_number_of_ranks_keeps_what_is_pending"),
    CodecMutant(ReadsMemoryInOrder, "top-k", "test_tensors_of_any_kind", _FLOAT),
]
"""Every mutant with its test."""

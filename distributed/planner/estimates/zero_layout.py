"""ZeroStages: the memory of DeepSpeed with ZeRO stages 0 to 2."""

from __future__ import annotations

from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import ModelFacts
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.zero3_layout import LARGEST_BUCKET, ParameterShards

__all__ = ["ZeroStages"]


class ZeroStages(Layout):
    """Parameters side by side in one flat tensor, of which each rank updates a range; it keeps a copy of that
    range for the optimizer.

    A gradient is copied into a bucket: in stage 2 as soon as it is complete, in stage 1 after the last
    backward. A full bucket is flattened into another tensor, reduced, and copied back; what the rank owns is
    copied out. Stage 0 flattens and reduces all gradients after the last backward. Source: DeepSpeed 0.19,
    deepspeed/runtime/zero/stage_1_and_2.py and engine.py, for parameters whose gradients have their own
    dtype.
    """

    axes = ("data",)
    zero_stages = (0, 1, 2)
    can_offload = False

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self.stage, self.ranks = split.zero_stage, split.dims.world_size
        self.adds_gradients = self.stage < 2
        trained = [facts.parameters[number] for number in self.trained]
        elements = sum(parameter.numel for parameter in trained)
        itemsize = trained[0].itemsize if trained else 1
        unit = 2 * self.ranks
        self._flat = -(-elements // unit) * unit * itemsize
        self._share = self._flat // self.ranks
        self._bucket = min(LARGEST_BUCKET, elements) * itemsize
        self._owned = self._largest_owned()
        self._waiting: dict[int, int] = {}
        self._filled = 0
        self._has_bucket = self._has_owned = self._accumulated = False

    @classmethod
    def of(cls, split: Split) -> type[Layout]:
        """Stages 0 to 2, or stage 3."""
        return ParameterShards if split.zero_stage == 3 else cls

    def _largest_owned(self) -> int:
        """Bytes of the parameters that lie in the range of one rank, wholly or in part; the most of any
        rank."""
        owned = [0] * self.ranks
        start = 0
        for number in self.trained:
            nbytes = self.facts.parameters[number].nbytes
            last = max(start, start + nbytes - 1)
            for rank in range(start // self._share, min(last // self._share, self.ranks - 1) + 1):
                owned[rank] += nbytes
            start += nbytes
        return max(owned, default=0)

    def place(self) -> None:
        if not self.stage:
            super().place()
            return
        for parameter in self.facts.parameters:
            if not parameter.trained:
                self.ledger.take("parameters", parameter.nbytes)
        self.ledger.take("parameters", self._flat)
        self.ledger.take("optimizer", self._share)
        for nbytes in self.facts.buffers:
            self.ledger.take("buffers", nbytes)
        for nbytes in self.state(self._share):
            self.ledger.take("optimizer", nbytes)

    def begin(self) -> None:
        self._has_owned = False

    # -- gradients --------------------------------------------------------------------

    def gradient(self, parameter: int) -> None:
        tensor = self._timeline.gradients.get(parameter)
        super().gradient(parameter)
        if not self.stage:
            return
        self._open_bucket()
        if tensor is not None:
            self._waiting[parameter] = self.size(tensor)
            self._parts.pop(tensor, None)
        if self.stage == 2:
            self._fill(parameter)

    def _open_bucket(self) -> None:
        if not self._has_bucket:
            self._has_bucket = True
            self.ledger.take("gradients", self._bucket)

    def _fill(self, parameter: int) -> None:
        """Copy a gradient into the bucket, which is reduced first if the gradient exceeds its end."""
        nbytes = self._waiting.pop(parameter, 0)
        if self._filled + nbytes > self._bucket:
            self._reduce()
        self.ledger.give("gradients", nbytes)
        self._filled += nbytes

    def _reduce(self) -> None:
        if not self._filled:
            return
        self.ledger.take("framework", self._filled)
        self.ledger.give("framework", self._filled)
        self._filled = 0
        if not self._has_owned:
            self._has_owned = True
            self.ledger.take("gradients", self._owned)

    def finish(self) -> None:
        if not self.stage:
            if self.is_last and self.ranks > 1:
                self._flatten_all()
            return
        if self.stage == 2 or self.is_last:
            for parameter in sorted(self._waiting):
                self._fill(parameter)
            self._reduce()
        if self.stage == 2:
            self._close_bucket()
            if self._accumulated:
                self.ledger.give("gradients", self._owned)  # was added to that of earlier micro-batches
            self._accumulated = True

    def _flatten_all(self) -> None:
        nbytes = sum(self.facts.parameters[number].nbytes for number in self.trained)
        self.ledger.take("framework", nbytes)
        self.ledger.give("framework", nbytes)

    def _close_bucket(self) -> None:
        if self._has_bucket:
            self._has_bucket = False
            self.ledger.give("gradients", self._bucket)

    def step(self) -> None:
        if not self.stage:
            super().step()
            return
        self._close_bucket()  # in stage 1, gradients that the rank does not own lie in it until now
        self.ledger.take("gradients", self._share)
        self.ledger.give("gradients", self._owned)
        self.update([self._share])
        self.ledger.give("gradients", self._share)
        self.collective(self._flat)

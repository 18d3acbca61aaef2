"""ParameterShards: the memory of DeepSpeed with ZeRO stage 3."""

from __future__ import annotations

from distributed.errors import UserError
from distributed.planner.estimates.device_memory import DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.ledger import Ledger
from distributed.planner.estimates.model_facts import ModelFacts, ParameterFacts
from distributed.planner.estimates.split import Split

__all__ = ["LARGEST_BUCKET", "REUSED", "ParameterShards"]

LARGEST_BUCKET = 500_000_000
"""Elements of DeepSpeed's bucket at most; the backend makes it as large as the model up to here."""
_PERSISTENT = 100_000
"""``stage3_param_persistence_threshold``: parameters of so many elements at most stay gathered."""
REUSED = 1_000_000_000
"""``stage3_max_reuse_distance``: a parameter that is used again before so many elements were is not freed."""


class ParameterShards(Layout):
    """Elements of each parameter divided over the ranks; each rank keeps a copy of its share for the
    optimizer and an accumulated gradient of it.

    A model of fewer elements than ``stage3_max_reuse_distance`` is gathered for its forward, stays so until
    its backward, and is freed block by block there. A gradient is copied into a bucket, which is reduced
    after each micro-batch through a copy in the order of the ranks. Source: DeepSpeed 0.19,
    deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py (``__params_to_release``),
    partition_parameters.py (``AllGatherCoalescedHandle``), runtime/comm/coalesced_collectives.py.

    Raises:
        UserError: the model is so large that parts of it are freed between forward and backward.
    """

    axes = ("data",)
    zero_stages = (3,)
    can_offload = False
    adds_gradients = False

    def __init__(self, facts: ModelFacts, split: Split, ledger: Ledger, device: DeviceMemory) -> None:
        super().__init__(facts, split, ledger, device)
        self.ranks = split.dims.world_size
        _check_size(facts)
        trained = [facts.parameters[number] for number in self.trained]
        elements = sum(parameter.numel for parameter in trained)
        self._bucket = min(LARGEST_BUCKET, elements) * (trained[0].itemsize if trained else 1)
        self._share = sum(map(self.held, trained))
        self._persistent = [p for p in facts.parameters if p.numel <= _PERSISTENT]
        self._blocks: dict[int, list[ParameterFacts]] = {}
        for parameter in facts.parameters:
            if parameter.numel > _PERSISTENT:
                self._blocks.setdefault(parameter.block, []).append(parameter)
        self._gathered: set[int] = set()
        self._filled = 0

    def held(self, parameter: ParameterFacts) -> int:
        return -(-parameter.numel // self.ranks) * parameter.itemsize

    def place(self) -> None:
        self.ledger.take("parameters", sum(map(self.held, self.facts.parameters)))
        for parameter in self._persistent:
            self.ledger.take("parameters", parameter.nbytes)
        for nbytes in self.facts.buffers:
            self.ledger.take("buffers", nbytes)
        for nbytes in (self._share, *self.state(self._share)):
            self.ledger.take("optimizer", nbytes)
        for nbytes in (self._share, self._bucket):
            self.ledger.take("gradients", nbytes)

    # -- parameters -------------------------------------------------------------------

    def begin(self) -> None:
        missing = [p for block, own in self._blocks.items() if block not in self._gathered for p in own]
        self._gather(missing)
        self._gathered = set(self._blocks)

    def _gather(self, parameters: list[ParameterFacts]) -> None:
        """Gather into one tensor, of which each parameter is a copy."""
        flat = sum(map(self.held, parameters)) * self.ranks
        self.ledger.take("framework", flat)
        self.collective(flat)
        for parameter in parameters:
            self.ledger.take("parameters", parameter.nbytes)
        self.ledger.give("framework", flat)

    def _free(self, block: int) -> None:
        if block in self._gathered:
            self._gathered.remove(block)
            for parameter in self._blocks[block]:
                self.ledger.give("parameters", parameter.nbytes)

    def leave_backward(self, block: int) -> None:
        if block:
            self._free(block)

    # -- gradients --------------------------------------------------------------------

    def gradient(self, parameter: int) -> None:
        tensor = self._timeline.gradients.get(parameter)
        super().gradient(parameter)
        if tensor is None or tensor not in self._parts:
            return
        nbytes = self.size(tensor)
        if self._filled + nbytes > self._bucket:
            self._reduce()
        self.release(tensor)
        self._filled += nbytes

    def _reduce(self) -> None:
        self.ledger.take("framework", self._filled)
        self.collective(self._filled)
        self.ledger.give("framework", self._filled)
        self._filled = 0

    def finish(self) -> None:
        for block in list(self._gathered):
            self._free(block)
        self._reduce()

    def step(self) -> None:
        self.ledger.take("gradients", self._share)
        self.update([self._share])
        self.ledger.give("gradients", self._share)


def _check_size(facts: ModelFacts) -> None:
    elements = facts.num_parameters
    if elements > REUSED:
        raise UserError(
            "the memory of ZeRO stage 3 is predicted for models that stay gathered between forward and"
            " backward",
            field="zero_stage",
            got=f"3 with {elements} parameters",
            allowed=f"models of at most {REUSED} parameters",
            remedy="Choose fsdp, whose memory is predicted for any model, or measure a run",
        )

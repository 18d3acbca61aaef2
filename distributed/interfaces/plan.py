"""RunPlan: a run that can start, as data. `distributed.planner` makes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import CodecSpec
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.placement import RankPlacement

if TYPE_CHECKING:
    from distributed.config import DistributedConfig

__all__ = ["BatchPlan", "Facts", "Resources", "RunPlan"]


@dataclass(frozen=True)
class BatchPlan:
    """``global_batch_size = batch_size x gradient_accumulation_steps x data_parallel_size``."""

    batch_size: int
    gradient_accumulation_steps: int
    data_parallel_size: int

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.batch_size * self.gradient_accumulation_steps * self.data_parallel_size

    def __str__(self) -> str:
        ranks = "1 rank" if self.data_parallel_size == 1 else f"{self.data_parallel_size} ranks"
        accumulated = self.gradient_accumulation_steps
        return (
            f"global batch {self.global_batch_size} = {self.batch_size} samples"
            + (f" x {accumulated} accumulated" if accumulated > 1 else "")
            + f" x {ranks}"
        )

    def as_dict(self) -> dict[str, int]:
        """The four numbers by their config names."""
        return {
            "batch_size": self.batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "data_parallel_size": self.data_parallel_size,
            "global_batch_size": self.global_batch_size,
        }


@dataclass(frozen=True)
class Resources:
    """What this host offers: the number of visible CUDA devices."""

    num_gpus: int = 0


@dataclass(frozen=True)
class Facts:
    """What the planner needs to know about the user's objects.

    Attributes:
        train_batch_size: the training loader's own batch size, None without.
        val_batch_size: the validation loader's.
        num_samples: training samples in an epoch, None when unknown.
        has_optimizer: an optimizer object was given.
        drop_last: the training loader drops the last, smaller global batch.
        has_batches: the training loader has a batch sampler, whose batches are used as they are.
    """

    train_batch_size: int | None = None
    val_batch_size: int | None = None
    num_samples: int | None = None
    has_optimizer: bool = False
    drop_last: bool = False
    has_batches: bool = False


@dataclass(frozen=True, kw_only=True)
class RunPlan(RankPlacement):
    """A run that can start: the placement of its ranks, and what they train with.

    Attributes:
        config: the user's configuration.
        spec: the backend.
        batch: the batch identity.
        val_batch_size: samples per rank in validation.
        learning_rate: after `lr_scaling`.
        dims: number of ranks along each axis of the mesh.
        codec: how gradients are sent; None as they are.
        counts: numbers of ranks with which an elastic run may continue, largest first.
        micro_batches: sizes of a micro-batch from which ``batch_size=auto`` still has to choose, largest
            first; empty once the size is known.
        compares_samples: whether the loss compares the samples of a micro-batch, as was seen at several sizes
            where ``batch_size=auto`` chose one; None where that is not known.
        lease: in a rank, the run whose lease on ``checkpoint_dir`` its launcher holds; empty without one.
    """

    config: DistributedConfig
    spec: BackendSpec
    batch: BatchPlan
    val_batch_size: int
    learning_rate: float
    dims: ParallelDims = field(default_factory=ParallelDims)
    codec: CodecSpec | None = None
    counts: tuple[int, ...] = ()
    micro_batches: tuple[int, ...] = ()
    compares_samples: bool | None = None
    lease: str = ""

    def device_of(self, local_rank: int) -> str:
        """The device of a rank on its host."""
        return "cpu" if self.device == "cpu" else f"cuda:{local_rank}"

    def summary(self) -> str:
        """The first lines of a run."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        if self.num_replicas > 1:
            ranks += f" of {self.num_replicas} replicas"
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        where = "CPU" if self.device == "cpu" else "CUDA"
        over = f" over {self.communication_backend}" if self.world_size > 1 else ""
        several = self.dims.model_axes or self.dims.expert > 1 or min(self.dims.data, self.dims.shard) > 1
        mesh = f" ({self.dims})" if several else ""
        first = f"{self.spec.label}: {ranks}{mesh}{nodes} on {where}{over}, {self.precision}; {self._batch()}"
        notes = [*self.notes, *([self._elastic()] if self.counts else [])]
        return "\n".join([first, *(f"note: {note}" for note in notes)])

    def _batch(self) -> str:
        if not self.micro_batches:
            return str(self.batch)
        sizes = ", ".join(map(str, self.micro_batches))
        return f"global batch {self.batch.global_batch_size}, in micro-batches of one of {sizes} samples"

    def _elastic(self) -> str:
        fewer = f", and continue with as few as {self.counts[-1]}" if len(self.counts) > 1 else ""
        axes = self.dims.model_axes
        kept = f"; {axes} does not change" if axes and fewer else ""
        return f"failed ranks are restarted {self.config.max_restarts} times{fewer}{kept}"

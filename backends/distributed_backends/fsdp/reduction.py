"""The reduction of a sharded model's gradients: what FSDP2 does of it, and what follows.

Without a codec, FSDP2 adds up gradients over all ranks with different samples, and which parameters they have
used is compared meanwhile. A codec sends the gradient of each shard between the ranks that have copies of the
shard, so that FSDP2 reduces over the shards of one copy alone; what no rank has used has to be known before.
"""

from __future__ import annotations

from collections.abc import Sequence

from distributed.training.gradient_use import GradientUse
from distributed_backends.fsdp.sharded_model import ShardedModel

__all__ = ["CodecReduction", "Reduction"]


class Reduction:
    """The reduction without a codec.

    Attributes:
        axes: axes of the mesh along which FSDP2 shards the model and reduces gradients.
        axes_after: axes along which the backend adds up the gradients of a shard after that.
        counts_in_forward: whether counts of tokens are added up beside the backward of a micro-batch;
            otherwise `count_first` does so before gradients are sent.
        follows_requires_grad: whether a parameter whose ``requires_grad`` changes during training is reduced
            accordingly.
    """

    axes: tuple[str, ...] = ("data", "shard")
    axes_after: tuple[str, ...] = ("context",)
    counts_in_forward = True
    follows_requires_grad = True

    def __init__(self) -> None:
        self._sharded: ShardedModel | None = None
        self._use: GradientUse | None = None
        self._given: Sequence[bool] | None = None

    def watch(self, sharded: ShardedModel, use: GradientUse) -> None:
        """Compare with `use`, from now on, which parameters of `sharded` the ranks have used."""
        self._sharded, self._use = sharded, use

    def add_use(self, used: Sequence[bool]) -> None:
        """Give for each parameter whether a window gave it a gradient on the ranks of this pipeline. Without
        this call, it is read from the model."""
        self._given = used

    def begin_exchange(self) -> None:
        """Before gradients are added up along `axes_after`. Collective."""

    def end_window(self) -> None:
        """When the gradients of a window have been added up along `axes_after`. Collective."""
        self._begin_comparison()

    def begin_step(self) -> None:
        """Before the optimizer's step. Collective."""
        self._drop_unused()

    def _begin_comparison(self) -> None:
        if self._use is not None and self._sharded is not None:
            self._use.add(self._given or self._sharded.take_used())
            self._use.begin()
            self._given = None

    def _drop_unused(self) -> None:
        """Leave out the gradients of parameters that no rank has used, which an optimizer would decay."""
        if self._use is not None and self._sharded is not None:
            for name in self._use.finish():
                self._sharded.parameters[name].grad = None


class CodecReduction(Reduction):
    """The reduction with a codec, which would send what it has kept of parameters that no rank has used."""

    axes = ("shard",)
    axes_after = ("data", "context")
    counts_in_forward = False
    follows_requires_grad = False

    def begin_exchange(self) -> None:
        self._begin_comparison()
        self._drop_unused()

    def end_window(self) -> None:
        """Nothing is left to do."""

    def begin_step(self) -> None:
        """Nothing is left to do."""

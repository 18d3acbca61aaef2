"""The last, smaller global batch of an epoch, where layers compute statistics over the samples of a batch.

torch cannot normalise a single value per channel. Samples are therefore dealt out so that a micro-batch has
two or none. What that does not cure is refused before the first step: a single sample in all, and ranks
without a sample where statistics are computed over all ranks, to which a placeholder would add copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from distributed.data.order import split_window
from distributed.errors import UserError
from distributed.interfaces.plan import BatchPlan

__all__ = ["LastBatch"]

_TRIED = 1000
"""Sizes of a global batch on either side that are tried for a remedy."""


class LastBatch:
    """What the BatchNorm layers of a model need of a smaller global batch.

    Args:
        batch: of a full step.
        source: the training data; None where the caller brings each batch.
        drop_last: the last, smaller global batch is left out; None asks `source`.
        max_steps: after which the run ends; None for whole epochs.

    Attributes:
        least: samples that a micro-batch has at least.
        synchronized: the layer with statistics over all ranks, or else what runs collectives of its own; None
            without.

    Raises:
        UserError: a rank would have no sample for such a layer.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: BatchPlan,
        source: Any,
        drop_last: bool | None,
        max_steps: int | None = None,
    ) -> None:
        norms = nn.modules.batchnorm._BatchNorm
        named = ((name, m) for name, m in model.named_modules() if isinstance(m, norms))
        layers = {name: m for name, m in named if m.training or not model.training}
        synced = [n for n, m in layers.items() if isinstance(m, nn.SyncBatchNorm)]
        self.synchronized: str | None = None
        if synced and batch.data_parallel_size > 1:
            self.synchronized = f"the layer '{synced[0]}' computes statistics over the samples of all ranks"
        self.least = 2 if layers and self.synchronized is None and batch.batch_size > 1 else 1
        self._batch, self._num_samples = batch, 0
        known = source is not None and source.order != "batch_sampler"
        self._length: int | None = source.length if known else None
        drops = source is not None and source.drop_last if drop_last is None else drop_last
        full, rest = divmod(self._length or 0, batch.global_batch_size)
        self._rest = 0 if drops or (max_steps is not None and max_steps <= full) else rest
        if self.synchronized is not None:
            self.run_collectives(self.synchronized)
        self._single = self._rest == 1 or batch.batch_size == 1
        self._needs_two: str | None = None
        watched = layers if self._single or self._length is None else {}
        self._checks = [m.register_forward_pre_hook(self._check(n)) for n, m in watched.items()]

    def begin(self, num_samples: int) -> None:
        """Check that a micro-batch, which begins, has a sample where layers need one.

        Raises:
            UserError: it has none, or one where a layer needs two.
        """
        self._num_samples = num_samples
        if num_samples == 1 and self._needs_two is not None:
            self._refuse_single(self._needs_two)
        if not num_samples and self.synchronized is not None:
            self._refuse_lack()

    def run_collectives(self, found: str) -> None:
        """Note that the step runs collectives, in which all ranks take part with samples.

        Args:
            found: what runs them.

        Raises:
            UserError: a rank will have none.
        """
        self.synchronized = self.synchronized or found
        if self._lacks(self._batch.global_batch_size, self._rest):
            self._refuse_lack()

    def end(self) -> None:
        """The first window has ended, and with it the check of what layers get."""
        while self._checks:
            self._checks.pop().remove()

    def _check(self, name: str) -> Callable[..., None]:
        def check(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
            values = inputs[0].numel() // max(inputs[0].shape[1], 1) if inputs else 0
            if layer.training and 0 < values <= self._num_samples:
                self._needs_two = name
                if self._single:
                    self._refuse_single(name)

        return check

    def _refuse_single(self, name: str) -> None:
        least = 2 * self._batch.global_batch_size // self._batch.batch_size
        self._refuse(
            f"a micro-batch of one sample gives the layer '{name}' one value per channel, which torch"
            " cannot normalise in training. The step was not taken",
            lambda size: size >= least and (self._length or 0) % size != 1,
        )

    def _lacks(self, size: int, rest: int) -> bool:
        """Whether a rank has no sample for a layer over all ranks, where `rest` follow batches of `size`."""
        ranks = self._batch.data_parallel_size
        per_rank = size // (ranks * self._batch.gradient_accumulation_steps)
        return any(start == stop for start, stop in split_window(rest, ranks - 1, ranks, per_rank))

    def _refuse_lack(self) -> None:
        self._refuse(
            f"a rank has no sample in a smaller global batch, and {self.synchronized}, to which a placeholder"
            " would add copies",
            lambda size: not self._lacks(size, (self._length or 0) % size),
        )

    def _refuse(self, text: str, fits: Callable[[int], bool]) -> None:
        batch = self._batch
        unit = batch.data_parallel_size * batch.gradient_accumulation_steps
        near = (batch.global_batch_size + sign * k * unit for k in range(1, _TRIED) for sign in (-1, 1))
        size = next((size for size in near if size > 0 and fits(size)), None)
        ways = ["data.drop_last=true"] * (batch.batch_size > 1) + [f"global_batch_size={size}"] * bool(size)
        remedy = f"Set {', or '.join(ways)}" if ways else "Give it more samples"
        if self._length is None and batch.batch_size > 1:
            remedy = "Set data.drop_last=true, and give all ranks equally many samples"
        got = f"{batch.global_batch_size} with {self._length or 'an unknown number of'} samples"
        raise UserError(text, field="global_batch_size", got=got, remedy=remedy)

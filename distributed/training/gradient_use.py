"""GradientUse: whether all ranks computed gradients of the same parameters in a step."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distributed.errors import UserError
from distributed.interfaces.backend import Backend

__all__ = ["GradientUse", "UsedParameters", "refusal"]


class GradientUse:
    """For backends that reduce the gradients of several parameters in one message without their names: if
    ranks use different parameters, gradients of different parameters are added, unless every rank sends
    zeros for those that it did not use.

    The comparison is a reduction of two numbers per step over gloo, under way while the backend reduces its
    own values. It does not wait for a GPU.

    Args:
        parameters: name -> parameter, the same on all ranks.
        may_differ: ranks may use different parameters; `finish` returns those that none has used.
        group: the ranks that have these parameters; None for all.
    """

    def __init__(
        self,
        backend: Backend,
        parameters: dict[str, nn.Parameter],
        may_differ: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._backend, self._names, self._may_differ = backend, list(parameters), may_differ
        self._peers = group
        self._seen: list[bytes] = []
        self._sum: torch.Tensor | None = None
        self._work: Any = None

    def add(self, used: Sequence[bool]) -> None:
        """Add for each parameter whether a micro-batch gave it a gradient on this rank."""
        self._seen.append(bytes(used))

    def compare(self, used: Sequence[bool]) -> None:
        """Compare the micro-batches up to the current one before gradients are sent: messages of different
        lengths abort gloo. Collective.

        Args:
            used: as for `add`, of the current micro-batch.

        Raises:
            UserError: the ranks used different parameters.
        """
        seen = [*self._seen, bytes(used)]
        if self._backend.world.size > 1 and not self._are_equal(*self._reduce(seen)):
            raise self._difference(seen)

    def begin(self) -> None:
        """Start the comparison of a step. Collective."""
        if self._backend.world.size > 1:
            self._sum, self._work = self._reduce(self._seen)

    def finish(self) -> list[str]:
        """End the comparison. Collective.

        Returns:
            Names of parameters that no micro-batch of the step used on any rank.

        Raises:
            UserError: the ranks used different parameters, and may not; no weight has changed yet.
        """
        seen, self._seen = self._seen, []
        used = [any(marks) for marks in zip(*seen, strict=True)]
        if self._sum is not None:
            equal = self._are_equal(self._sum, self._work)
            self._sum = self._work = None
            if not equal and not self._may_differ:
                raise self._difference(seen)
            if not equal:
                together = torch.tensor(used, dtype=torch.uint8)
                dist.all_reduce(together, dist.ReduceOp.MAX, group=self._peers)
                used = together.tolist()
        return [name for name, mark in zip(self._names, used, strict=True) if not mark]

    def _reduce(self, seen: list[bytes]) -> tuple[torch.Tensor, Any]:
        digest = zlib.crc32(b"|".join(seen))
        both = torch.tensor([digest, -digest])
        return both, dist.all_reduce(both, dist.ReduceOp.MAX, group=self._peers, async_op=True)

    @staticmethod
    def _are_equal(both: torch.Tensor, work: Any) -> bool:
        work.wait()
        largest, negated = both.tolist()
        return bool(largest == -negated)

    def _difference(self, seen: list[bytes]) -> UserError:
        all_ranks = self._backend.gather_objects(seen)
        what = "different parameters"
        for rank, other in enumerate(all_ranks):
            pairs = zip(all_ranks[0], other, strict=False)
            found = next((i for a, b in pairs for i in range(len(self._names)) if a[i] != b[i]), None)
            if found is not None:
                what = f"different parameters: '{self._names[found]}' on one of ranks 0 and {rank} only"
                break
        return refusal(what, self._backend)


class UsedParameters:
    """Records which parameters get a gradient in a backward.

    Args:
        parameters: name -> trainable parameter.
    """

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self._used = [False] * len(parameters)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._mark, number))
            for number, parameter in enumerate(parameters.values())
        ]

    @property
    def marks(self) -> list[bool]:
        """For each parameter whether it got a gradient since the last `take`."""
        return self._used

    def take(self) -> list[bool]:
        """For each parameter whether it got a gradient since the last call."""
        used, self._used = self._used, [False] * len(self._used)
        return used

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _mark(self, number: int, parameter: torch.Tensor) -> None:
        self._used[number] = True


def refusal(what: str, backend: Backend) -> UserError:
    """The error for ranks that used different parameters.

    Args:
        what: object of "the ranks used".
    """
    return UserError(
        f"the ranks used {what} in one micro-batch, and {backend.spec.name} would add gradients of different"
        " parameters. The step was not taken",
        field="backend",
        got=backend.spec.name,
        allowed="pytorch-ddp, fsdp or horovod with find_unused_parameters=true, for models of which samples"
        " use different parts",
        remedy="Choose one of these, or let every rank use every parameter in each micro-batch, e.g. by"
        " adding 0 * parameter.sum() to the loss",
    )

"""DeferredHooks: hooks of parameters, called with the gradient of the whole global batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DeferredHooks"]


class DeferredHooks:
    """Hooks that were registered with `register_hook` or `register_post_accumulate_grad_hook`.

    In one process with one batch a hook sees the gradient of that batch. Called in each backward, it would
    see those of micro-batches instead: a mean of clamped gradients is not the clamped mean. So these hooks
    are held back in backward and called once in each optimizer step. A handle of a hook still removes it.

    Args:
        parameters: whose hooks to hold back.
    """

    def __init__(self, parameters: Iterable[nn.Parameter] = ()) -> None:
        self._deferred: list[tuple[Tensor, MutableMapping[int, Any], int, bool]] = []
        for parameter in parameters:
            accumulated = getattr(parameter, "_post_accumulate_grad_hooks", None)
            for table, replaces in ((parameter._backward_hooks, True), (accumulated, False)):
                if table:
                    self._deferred += [(parameter, table, key, replaces) for key in table]

    def __bool__(self) -> bool:
        return bool(self._deferred)

    def follow(self, replaced: Mapping[Tensor, Tensor]) -> None:
        """Call the hooks with the parameters that took the place of others.

        Args:
            replaced: parameter -> the one in its place.
        """
        self._deferred = [
            (replaced.get(p, p), table, key, replaces) for p, table, key, replaces in self._deferred
        ]

    def held_back(self) -> AbstractContextManager[None]:
        """Take the hooks off their parameters in the block."""
        return self._hold_back() if self._deferred else nullcontext()

    @contextmanager
    def _hold_back(self) -> Iterator[None]:
        held = [(table, key, table.pop(key)) for _, table, key, _ in self._deferred if key in table]
        try:
            yield
        finally:
            for table, key, hook in held:
                table[key] = hook

    @torch.no_grad()
    def run(self) -> None:
        """Call the hooks of the parameters that have a gradient."""
        for parameter, table, key, replaces in self._deferred:
            hook = table.get(key)
            if hook is None or parameter.grad is None:
                continue
            if not replaces:
                hook(parameter)
            elif (gradient := hook(parameter.grad)) is not None:
                parameter.grad.copy_(gradient)

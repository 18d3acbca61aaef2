"""Attention of a whole model over slices of its sequences: which modules compute it, and in which layout.

What divides sequences over ranks, such as a trainer, asks `context_attention` for the attention of a model,
cuts each sequence by `layout`, and calls the model inside `over`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from distributed_kernels.attention.transformers_attention import TransformersAttention, transformers_models
from distributed_kernels.errors import KernelError

METHODS = ("auto", "ring", "ulysses", "dilated", "block-sparse")
"""Words for how ranks compute attention together."""


def context_attention(
    model: nn.Module, method: str, size: int, tensor: int = 1
) -> ModulesAttention | TransformersAttention:
    """The attention of `model` for `size` ranks that hold slices of a sequence. Nothing is changed yet.

    Args:
        model: with modules that have a method ``set_context_group``, models of transformers inside, or no
            attention at all.
        method: one of `METHODS`. ``auto``: the modules' own, else ``ring`` where the length allows it, else
            ``ulysses``.
        size: number of ranks.
        tensor: number of ranks that divide the heads.

    Raises:
        KernelError: the method computes another attention than the model's, the ranks cannot share its heads,
            or it has attention that cannot be replaced.
    """
    if method not in METHODS:
        raise KernelError("method: unknown", got=method, allowed=", ".join(METHODS))
    foreign = next((n for n, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)), None)
    if foreign is not None:
        raise KernelError(
            f"model: '{foreign}' is an nn.MultiheadAttention, which needs the whole sequence",
            got="nn.MultiheadAttention",
            allowed="models of transformers, the attention modules of this package, modules with a method"
            " set_context_group",
            remedy="Replace it by one of these",
        )
    theirs = transformers_models(model)
    if theirs:
        return TransformersAttention(theirs, method, size, tensor)
    own: list[Any] = [module for module in model.modules() if hasattr(module, "set_context_group")]
    return ModulesAttention(own, method, size)


class ModulesAttention:
    """Attention of modules that take the ranks by ``set_context_group(group, method)``.

    Args:
        modules: those of a model; without any, ranks compute their slices alone.
        method: for the modules.
        size: number of ranks.

    Raises:
        KernelError: the modules do not have the method.
    """

    def __init__(self, modules: Sequence[Any], method: str, size: int) -> None:
        self._modules, self._method, self._size = modules, method, size
        if not modules and method != "auto":
            raise KernelError(
                f"method: the model has no attention that {method} can compute",
                got=method,
                allowed="auto",
                remedy="Choose a model of transformers, or the attention modules of distributed_kernels",
            )
        self.attach()
        self.release()

    def layout(self, length: int) -> str:
        """How a sequence of `length` is cut: ``contiguous`` or ``zigzag``.

        Raises:
            KernelError: the ranks do not divide it.
        """
        check_length(length, self._size)
        return "contiguous"

    def attach(self) -> None:
        """Let the modules compute whole sequences outside of `over`, however they were built."""
        for module in self._modules:
            module.set_context_group(None, self._method)

    @contextmanager
    def over(self, group: ProcessGroup) -> Iterator[None]:
        """Within the block, the modules compute slices of sequences that the ranks of `group` hold."""
        try:
            for module in self._modules:
                module.set_context_group(group, self._method)
            yield
        finally:
            self.attach()

    def state(self) -> None:
        """Nothing: modules compute from their arguments alone."""

    def restore(self, state: None) -> None:
        """Nothing to do."""

    def release(self) -> None:
        """Return the modules to what they were built for."""
        for module in self._modules:
            module.set_context_group(None, None)


def check_length(length: int, size: int) -> None:
    """Raise unless `size` ranks divide a sequence of `length`.

    Raises:
        KernelError: names the nearest lengths that they do.
    """
    if length % size:
        low = length // size * size
        raise KernelError(
            f"length: {size} ranks cannot hold equal slices of a sequence of {length}",
            got=length,
            allowed=", ".join(str(n) for n in (low, low + size) if n),
            remedy="Pad the sequences, or cut them",
        )

"""Buffers that a forward pass changes: statistics, counters, codebooks.

They change once per micro-batch and on each rank by its own samples. A stand-in batch, which counts for
nothing, must not change them.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from distributed.errors import UserError

__all__ = ["Buffers", "refuse_changes", "warn_of_changes"]

logger = logging.getLogger("distributed")


class Buffers:
    """The buffers of a model at one moment, without those that another rank holds.

    Args:
        model: whose buffers are copied.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, f"{prefix}.{name}".lstrip("."), name, tensor, tensor.clone())
            for prefix, module in model.named_modules()
            for name, tensor in module._buffers.items()
            if tensor is not None and not tensor.is_meta
        ]

    def changed(self) -> list[str]:
        """Names of those whose values have changed since, without the statistics of norms."""
        norms = nn.modules.batchnorm._NormBase
        return [
            path
            for module, path, name, _, values in self._before
            if not isinstance(module, norms) and _differs(module._buffers.get(name), values)
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Give every buffer its former object and values."""
        for module, _, name, tensor, values in self._before:
            module._buffers[name] = tensor
            if _differs(tensor, values):
                tensor.copy_(values)

    @torch.no_grad()
    def restore_values(self) -> None:
        """Give every buffer that still has its shape its former values."""
        for module, _, name, _, values in self._before:
            tensor = module._buffers.get(name)
            if tensor is not None and _differs(tensor, values):
                tensor.copy_(values)


def warn_of_changes(changed: list[str]) -> None:
    """Warn of buffers that the first forward passes have changed.

    Args:
        changed: their names.
    """
    if changed:
        logger.warning(
            "the forward pass changes the buffer '%s'%s: it does so once per micro-batch and on each rank by"
            " its own samples, so training depends on their number. Rank 0's values are validated and saved."
            " Change it in a callback with all_ranks = True to train in the same way on any number of ranks",
            *(changed[0], f" and {len(changed) - 1} more" if len(changed) > 1 else ""),
        )


def refuse_changes(changed: list[str]) -> None:
    """The same where ``batch_size=auto`` chooses the number of forward passes.

    Raises:
        UserError: `changed` has a name.
    """
    for name in changed[:1]:
        raise UserError(
            f"the forward pass changes the buffer '{name}', once per micro-batch, so that the size chosen by"
            " batch_size=auto would change the training",
            field="batch_size",
            got="auto",
            allowed="a number, or auto for a model whose forward pass changes no buffer",
            remedy="Set batch_size and gradient_accumulation_steps to numbers, or change the buffer in a"
            " callback with all_ranks = True",
        )


def _differs(tensor: Tensor | None, values: Tensor) -> bool:
    if isinstance(tensor, FakeTensor):
        return False  # it has no values
    # Caches that grow, as those of rotary embeddings, have another shape and are no statistics.
    return tensor is not None and tensor.shape == values.shape and not torch.equal(tensor, values)

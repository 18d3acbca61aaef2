"""A model's weights in one file, written by a thread, for a loop of one's own."""

from __future__ import annotations

import os
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded
from distributed.communication.environment import detect
from distributed.errors import UserError
from distributed.system.private_files import draft_of

__all__ = ["async_checkpoint"]


class _Writer(Thread):
    """`Thread` whose `join` raises the error of the write."""

    def __init__(self, state: dict[str, Any], path: Path) -> None:
        super().__init__(name="async_checkpoint")
        self._state, self._path = state, path
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            with draft_of(self._path) as draft:
                torch.save(self._state, draft)
        except Exception as error:  # noqa: BLE001 - raised by join
            self._error = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._error is not None:
            raise self._error


def async_checkpoint(model: nn.Module, path: str | os.PathLike[str]) -> Thread:
    """Write the ``state_dict()`` of a model to a file while training continues.

    The values are copied to host memory before the call returns, so that later steps do not change what is
    written. The file is replaced as a whole. Under a launcher, rank 0 alone writes. ``fit`` writes
    checkpoints of whole trainings by itself (``checkpoint_dir``, ``checkpoint.asynchronous``).

    Args:
        model: whose parameters are whole on this rank, such as in DDP.
        path: of a file in an existing folder. `torch.load` reads it.

    Returns:
        The thread; its ``join()`` raises the error of a write that failed.

    Raises:
        UserError: the folder does not exist, or a parameter is sharded.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise UserError(
            "the folder does not exist",
            field="path",
            got=str(target.parent),
            remedy="Make it first, or give another path",
        )
    place = detect(os.environ)
    writes = place is None or place.rank == 0
    thread = _Writer(_copies(model), target) if writes else Thread(name="async_checkpoint of rank 0")
    thread.start()
    return thread


def _copies(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    sharded = [name for name, value in state.items() if is_sharded(value)]
    if sharded:
        raise UserError(
            f"'{sharded[0]}' is sharded, and this rank has a part of it",
            field="model",
            got=f"{len(sharded)} sharded tensors",
            allowed="models that are whole on every rank",
            remedy="Train with a Trainer and checkpoint_dir, or gather the weights first"
            " (torch.distributed.checkpoint.state_dict)",
        )
    return {name: _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    """Copy in host memory; also of what `nn.Module.get_extra_state` adds, which need not be a tensor."""
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)

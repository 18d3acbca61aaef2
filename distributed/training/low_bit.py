"""Optimizer state of 8 or 4 bits and matrix products in fp8 by torchao; TF32 for products in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from distributed.communication.torch_settings import apply_settings, read_settings
from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.training.lever import Lever

__all__ = ["Float8", "TF32", "low_bit_optimizer", "pack_state"]

_SIGNED = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
_MULTIPLE = 16
"""Sizes of a matrix that fp8 units multiply are multiples of it."""


def low_bit_optimizer(config: DistributedConfig) -> Callable[..., Optimizer]:
    """torchao's form of the optimizer that `config` names, to be called with parameters and a rate."""
    with _quiet():
        from torchao import optim

    name = {"adamw": "AdamW", "adam": "Adam"}[config.optimizer]
    return partial(getattr(optim, f"{name}{config.optimizer_bits}bit"), weight_decay=config.weight_decay)


@torch.no_grad()
def pack_state(optimizer: Any) -> None:
    """Quantize the state that a checkpoint has brought as floating-point numbers."""
    for parameter, state in optimizer.state.items():
        for slot, value in state.items():
            if slot in _SIGNED:
                state[slot] = optimizer._new_buffer(parameter, _SIGNED[slot]).copy_(value)


class TF32(Lever):
    """float32 matrix products by the TF32 units of a GPU, while a run lasts."""

    def __init__(self) -> None:
        self._before = read_settings()
        torch.set_float32_matmul_precision("high")

    def undo(self) -> None:
        apply_settings(self._before)


class Float8(Lever):
    """Linear layers whose matrix products are computed in fp8; names and parameters stay.

    Args:
        model: changed in place.
        device: of the ranks. Without fp8 units the products are emulated.

    Raises:
        UserError: the GPU has none, or no layer has sizes and a dtype that they multiply.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        _check_device(device)
        with _quiet():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        chosen = [module for module in model.modules() if _fits(module) and module is not model]
        if not chosen:
            raise UserError(
                f"{type(model).__name__} has no linear layer that fp8 can compute",
                field="matmul_precision",
                got="fp8",
                allowed=f"models with nn.Linear layers inside, of float32 or bfloat16, whose sizes are"
                f" multiples of {_MULTIPLE}",
            )
        self._before = [
            (parent, name, child)
            for parent in model.modules()
            for name, child in parent._modules.items()
            if child is not None and child in chosen
        ]
        convert_to_float8_training(
            model,
            config=Float8LinearConfig(emulate=device == "cpu"),
            module_filter_fn=lambda module, name: module in chosen,
        )

    def undo(self) -> None:
        for parent, name, child in self._before:
            child.train(parent._modules[name].training)  # type: ignore[union-attr]
            parent._modules[name] = child


def _fits(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.weight.dtype not in (torch.float32, torch.bfloat16):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def _check_device(device: str) -> None:
    if device != "cpu" and torch.cuda.get_device_capability(device) < (8, 9):
        major, minor = torch.cuda.get_device_capability(device)
        raise UserError(
            "this GPU has no fp8 units",
            field="matmul_precision",
            got=f"fp8 on a GPU of compute capability {major}.{minor}",
            allowed="8.9 and above (Ada, Hopper, Blackwell)",
            remedy="Set matmul_precision=tf32, or mixed_precision=bf16",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of torchao about CUDA libraries that this machine lacks."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)

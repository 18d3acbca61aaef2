"""Keep the state of an optimizer in host memory, and step there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from distributed.training.lever import Lever

__all__ = ["HostStep"]


class HostStep(Lever):
    """During a step, the parameters of `optimizer` hold copies in host memory, page-locked for a GPU.

    Its state is therefore created there and stays; afterwards the copies are written to the device. Groups,
    parameters and names are the same objects.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._device: list[tuple[Tensor, Tensor, Tensor]] = []
        self._host: dict[Tensor, Tensor] = {}
        self._hooks = [
            optimizer.register_step_pre_hook(self._to_host),
            optimizer.register_step_post_hook(self._to_device),
        ]

    def undo(self) -> None:
        """Let later steps run on the device, where the state goes."""
        for hook in self._hooks:
            hook.remove()
        self._host = {}
        for parameter, state in self._optimizer.state.items():
            _move_state(state, parameter.device)

    @torch.no_grad()
    def _to_host(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _move_state(optimizer.state.get(parameter, {}), torch.device("cpu"))
                if parameter.grad is not None:
                    self._swap(parameter)
        if any(data.is_cuda for _, data, _ in self._device):
            torch.cuda.synchronize()

    def _swap(self, parameter: Tensor) -> None:
        data, gradient = parameter.data, parameter.grad
        assert gradient is not None
        if parameter not in self._host:
            self._host[parameter] = torch.empty_like(data, device="cpu", pin_memory=data.is_cuda)
        host = self._host[parameter].copy_(data, non_blocking=True)
        self._device.append((parameter, data, gradient))
        parameter.grad = None  # of another device than the data, it would be refused
        parameter.data = host
        parameter.grad = gradient.to("cpu", copy=True)

    @torch.no_grad()
    def _to_device(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, data, gradient in self._device:
            data.copy_(parameter.data, non_blocking=True)
            parameter.grad = None
            parameter.data, parameter.grad = data, gradient
        self._device = []


def _move_state(state: dict[str, Any], device: torch.device) -> None:
    """Move what has a shape; torch keeps the count of steps on the CPU."""
    for slot, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.device != device:
            state[slot] = value.to(device)

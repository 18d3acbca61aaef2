"""Backends that train what they should refuse (C11)."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from distributed.interfaces.backend import StepResult, Window
from distributed.interfaces.task import Task
from distributed.training import torch_backend
from distributed.training.deferred_hooks import DeferredHooks
from distributed.training.torch_backend import StepModule
from tests.campaigns.mutants import Sound


class TrainsEveryModule(Sound):
    """C11: puts modules that the user has put into evaluation mode back into training mode."""

    def set_training(self, training: bool) -> None:
        self.module.train(training)


class OverlooksThawing(Sound):
    """C11: does not notice that a frozen layer is trained from some step on."""

    follows_requires_grad = True


class ComparesNoSettings(Sound):
    """C11: lets a callback on rank 0 change the learning rate of rank 0 alone."""

    def settings(self) -> None:
        return None


class ForgetsHooks(Sound):
    """C11: trains without the hooks on parameters, as a copy of the model would."""

    def build(self, model: Any) -> nn.Module:
        built = super().build(model)
        for parameter in built.parameters():
            parameter._backward_hooks = None
        return built


class CallsHooksInBackward(Sound):
    """C11: calls hooks on parameters with the gradient of each micro-batch on each rank."""

    def prepare(self, task: Task) -> None:
        super().prepare(task)
        self._hooks = DeferredHooks()


class StepsWithZeros(Sound):
    """C11: gives parameters that took no part a gradient of zeros, so that weight decay moves them."""

    def optimizer_step(self, max_norm: float | None, want_norm: bool = False) -> StepResult:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return super().optimizer_step(max_norm, want_norm)


class MixesGradients(Sound):
    """C11: averages the gradients that each rank has in one message, whichever parameters they belong to."""

    def wrap(self, step: StepModule) -> Any:
        return step

    def run_window(self, window: Window) -> tuple[Any, Any]:
        seen: tuple[Any, Any] = super().run_window(window)
        parameters = [*self._parameters, *self.step_module.parameters(recurse=False)]
        found = [p.grad for p in parameters if p.grad is not None]
        if self.world.size > 1 and found:
            flat = torch.cat([gradient.double().flatten() for gradient in found])
            dist.all_reduce(flat)
            parts = (flat / self.world.size).split([gradient.numel() for gradient in found])
            for gradient, part in zip(found, parts, strict=True):
                gradient.copy_(part.view_as(gradient))
        return seen


class LosesAttributes(Sound):
    """C11: puts new parameters in the place of those that a function built, as sharding does."""

    def build(self, model: Any) -> nn.Module:
        built = super().build(model)
        for module in [] if isinstance(model, nn.Module) else list(built.modules()):
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach(), parameter.requires_grad)
        return built


class ReadsMemoryInOrder(Sound):
    """C11: takes the memory of parameters for rows, also of those that are transposed views."""

    def place(self, model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            strides = torch.empty(parameter.shape, device="meta").stride()
            parameter.data = parameter.data.as_strided(parameter.shape, strides)
        return super().place(model)


class SetsEveryMode(Sound):
    """C11: sets the mode of each module by itself, past a model's own ``train``."""

    def set_training(self, training: bool) -> None:
        for module in self.module.modules():
            module.training = training


class OverlooksMicroBatches(Sound):
    """C11: trains layers whose gradients or weights depend on which samples are in one micro-batch."""

    def prepare(self, task: Task) -> None:
        with patch.object(torch_backend, "check_micro_batches"):
            super().prepare(task)


class DiscardsWrites(Sound):
    """C11: takes a step from the weights before the forward pass, whatever that wrote into them."""

    def run_window(self, window: Window) -> tuple[Any, Any]:
        before = [parameter.detach().clone() for parameter in self._parameters]
        seen: tuple[Any, Any] = super().run_window(window)
        with torch.no_grad():
            for parameter, values in zip(self._parameters, before, strict=True):
                parameter.copy_(values)
        return seen

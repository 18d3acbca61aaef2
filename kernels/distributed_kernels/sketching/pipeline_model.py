"""PipelineParallelSketchedModel: sketched layers with ReLU between them, in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.linear import SKLinear

__all__ = ["PipelineParallelSketchedModel"]

_SIZES = ("in_features", "out_features", "sketch_size")


class PipelineParallelSketchedModel(nn.Module):
    """A chain of `SKLinear` with ReLU between them, in as many stages as devices, each on its device.

    In one process the stages compute one after the other. Under a `Trainer` with ``parallel.pipeline`` the
    ranks divide the same chain between them and compute at the same time; give it ``["cpu"]`` then.

    Args:
        layer_configs: ``{"in_features": ..., "out_features": ..., "sketch_size": ...}`` of each layer, and
            other arguments of `SKLinear` if wanted.
        devices: of the stages. The last stage has the layers that remain.

    Raises:
        KernelError: there are fewer layers than devices, or a size is missing.
    """

    def __init__(
        self, layer_configs: Sequence[Mapping[str, Any]], devices: Sequence[str | torch.device]
    ) -> None:
        super().__init__()
        self.devices, self.num_stages = list(devices), len(devices)
        if not 1 <= self.num_stages <= len(layer_configs):
            raise KernelError(
                f"devices: {len(layer_configs)} layers cannot be divided into {self.num_stages} stages",
                allowed=f"1 to {len(layer_configs)} devices",
                remedy="Give as many devices as stages, and a layer or more for each",
            )
        layers: list[list[nn.Module]] = [[] for _ in devices]
        size = len(layer_configs) // self.num_stages
        for number, config in enumerate(layer_configs):
            stage = layers[min(number // size, self.num_stages - 1)]
            stage.append(_layer(config, number))
            if number < len(layer_configs) - 1:
                stage.append(nn.ReLU())
        self.stages = nn.ModuleList(
            nn.Sequential(*stage).to(device) for stage, device in zip(layers, devices, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last stage, on its device.

        Args:
            x: (batch, in_features of the first layer).
        """
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.to(device))
        return x


def _layer(config: Mapping[str, Any], number: int) -> SKLinear:
    missing = [name for name in _SIZES if name not in config]
    if missing:
        raise KernelError(
            f"layer_configs[{number}]: {', '.join(missing)} is missing",
            remedy="Give in_features, out_features and sketch_size of each layer",
        )
    rest = {name: value for name, value in config.items() if name not in _SIZES}
    return SKLinear(*(config[name] for name in _SIZES), **rest)

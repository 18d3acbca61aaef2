"""LeversMixin: the configuration's settings of memory and speed, for a torch backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim import Optimizer

from distributed.interfaces.placement import World
from distributed.training.activation_checkpointing import recompute
from distributed.training.blocks import find_blocks
from distributed.training.host_optimizer import HostStep
from distributed.training.lever import Lever

if TYPE_CHECKING:
    from distributed.config import DistributedConfig


class LeversMixin:
    """Applies the levers to a model before it is sharded, and undoes them.

    A backend overrides what its engine does by itself.
    """

    config: DistributedConfig
    world: World
    optimizer: Optimizer
    backward: Callable[[Tensor], None]

    def __init__(self) -> None:
        super().__init__()
        self._levers: list[Lever] = []

    def apply_levers(self, model: nn.Module) -> None:
        """Change how `model` computes as the configuration asks, in place and with all its names; `place`
        calls it before the model is sharded. `release` undoes it.

        Raises:
            UserError: the model cannot be trained exactly so.
        """
        if self.config.matmul_precision != "default":
            self._levers.append(self._multiply(model))
        mode, compiles = self.activation_checkpointing, self.config.compile
        # What torch stores by itself surrounds compiled blocks; what the compiler partitions is inside.
        surrounds = mode in ("full", "offload") and compiles == "blocks"
        if compiles != "none" and surrounds:
            self._levers.append(self._compile(model))
        if mode != "none":
            self._levers.append(recompute(model, self.blocks(model), mode))
        if compiles != "none" and not surrounds:
            self._levers.append(self._compile(model))

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """The modules that are recomputed or compiled, outermost ones."""
        return find_blocks(model, self.config.block_classes)

    @property
    def activation_checkpointing(self) -> str:
        """``none``, or how activations are recomputed."""
        return self.config.activation_checkpointing

    def offload_optimizer(self) -> None:
        """Keep the optimizer's state in host memory, and step there."""
        if self.world.device != "cpu":
            self._levers.append(HostStep(self.optimizer))

    def backward_explained(self, loss: Tensor) -> None:
        """`backward`, with errors that a lever causes as errors of its field."""
        if not self._levers:
            self.backward(loss)
            return
        with ExitStack() as stack:
            for lever in self._levers:
                stack.enter_context(lever.explained())
            self.backward(loss)

    def undo_levers(self) -> None:
        """Give the model and the optimizer back as they were; later calls do nothing."""
        while self._levers:
            self._levers.pop().undo()

    def _multiply(self, model: nn.Module) -> Lever:
        from distributed.training.low_bit import TF32, Float8

        return TF32() if self.config.matmul_precision == "tf32" else Float8(model, self.world.device)

    def _compile(self, model: nn.Module) -> Lever:
        # Imports the compiler, which takes a second.
        from distributed.training.compilation import compile_blocks, compile_model

        if self.config.compile == "model":
            return compile_model(model, self.activation_checkpointing, self.config.deterministic)
        return compile_blocks(model, self.blocks(model), self.config.deterministic)

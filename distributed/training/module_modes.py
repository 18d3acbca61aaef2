"""Training and evaluation mode of a model's modules."""

from __future__ import annotations

from torch import nn

__all__ = ["ModuleModes"]


class ModuleModes:
    """Switches a model to evaluation mode, and back to the modes that its modules had before.

    Modules that the user has put into evaluation mode, in a model in training mode, stay there, as do those
    that a class's own ``train`` puts there.
    """

    def __init__(self) -> None:
        self._before: dict[nn.Module, bool] | None = None

    def set_training(self, model: nn.Module, training: bool) -> None:
        """Enter evaluation mode, or return to the modes before it."""
        modes = self._before or {module: module.training for module in model.modules()}
        if not training:
            self._before = modes
            model.eval()
            return
        self._before = None
        model.train()
        if modes.get(model):
            for module in model.modules():
                module.training = module.training and modes.get(module, True)

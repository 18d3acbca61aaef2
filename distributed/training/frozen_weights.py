"""FrozenWeights: which frozen parameters the checkpoints of a run leave out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from distributed.checkpoint.torch_state import named_tensors
from distributed.checkpoint.weight_digests import add_digests, check_omitted
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.training.state import TrainState

__all__ = ["FrozenWeights", "is_adapter"]


def is_adapter(model: Any) -> bool:
    """Whether `model` is one of PEFT, whose pretrained weights are kept elsewhere."""
    return hasattr(model, "peft_config")


class FrozenWeights:
    """Under ``checkpoint.trainable_only``, checkpoints leave out frozen parameters that have the values with
    which the model came, and keep a digest of each. All methods are collective.

    Args:
        backend: prepared before `start`.
        state: keeps the first digests over restarts.
        wanted: ``checkpoint.trainable_only``; None is for models of PEFT alone.
    """

    def __init__(self, backend: Backend, state: TrainState, wanted: bool | None) -> None:
        self._holder, self._state, self._wanted = backend, state, wanted

    def start(self) -> None:
        """Take the digests of the model as it came, before a state is loaded.

        Raises:
            UserError: the backend does not support it.
        """
        model = self._holder.module
        if self._wanted or (self._wanted is None and is_adapter(model)):
            self._state.keep_frozen(self._digests(self._frozen()))

    def omitted(self) -> dict[str, str]:
        """Parameter to be left out of a checkpoint now -> digest."""
        before = self._state.frozen_at_start
        if not before:
            return {}
        now = self._digests(self._frozen())
        return {name: digest for name, digest in now.items() if before.get(name) == digest}

    def check(self, saved: Mapping[str, str]) -> None:
        """Compare the model with what a checkpoint leaves out.

        Raises:
            UserError: a parameter has other values.
        """
        if saved:
            check_omitted(saved, self._digests(saved))

    def _frozen(self) -> set[str]:
        tensors, _ = named_tensors(self._holder.module)
        parameters = {id(p) for p in self._holder.module.parameters() if not p.requires_grad}
        return {name for name, tensor in tensors.items() if id(tensor) in parameters}

    def _digests(self, names: Collection[str]) -> dict[str, str]:
        own = self._holder.weight_digests(names)
        if own is None:
            raise UserError(
                "this backend cannot leave parameters out of a checkpoint",
                field="checkpoint.trainable_only",
                got=True,
                allowed="false",
                remedy="Set it to false, or choose a torch backend",
            )
        return add_digests(self._holder.gather_objects(dict(own)))

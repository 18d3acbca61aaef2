"""Settings of a Keras model and its optimizer that all ranks have to hold alike."""

from __future__ import annotations

from typing import Any

from distributed.training.agreement import WatchedBackend, WatchedSettings, named_groups, plain_groups


class KerasSettings(WatchedSettings):
    """Learning rate, settings of the optimizer and trainable weights of one rank.

    Args:
        backend: has placed the model.
        model: the model.
        holder: holds its optimizer.
    """

    def __init__(self, backend: WatchedBackend, model: Any, holder: Any) -> None:
        super().__init__(backend)
        self._model, self._holder = model, holder

    def read(self) -> Any:
        settings = self._holder.keras.get_config()
        plain = {name: value for name, value in settings.items() if isinstance(value, (int, float, str))}
        plain.pop("learning_rate", None)  # the group's is written at the next step
        return plain_groups(self._holder), plain, [variable.trainable for variable in self._model.variables]

    def named(self, values: Any) -> dict[str, Any]:
        groups, settings, trainable = values
        found = {**named_groups(groups), **{f"{name!r} of the optimizer": v for name, v in settings.items()}}
        paths = [f"trainable of '{variable.path}'" for variable in self._model.variables]
        return {**found, **dict(zip(paths, trainable, strict=True))}

"""Process-wide state that ranks exchange when they are threads of one process."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.communication.torch_settings import apply_settings, read_settings

__all__ = ["RankState"]


class RankState:
    """State that belongs to a rank where it is a process: random generators, torch's settings, and what
    DTensor keeps for the whole process."""

    def capture(self) -> list[Any]:
        return [read() for read, _ in _PARTS]

    def restore(self, state: list[Any]) -> None:
        for (_, write), value in zip(_PARTS, state, strict=True):
            write(value)


def _flags() -> dict[str, Any]:
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def _set_flags(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if _SWITCHES[name][0]() is not value:
            _SWITCHES[name][1](value)


def _dtensor_modules() -> tuple[Any, Any]:
    """DTensor's interface and its random numbers; None until they are imported."""
    names = "torch.distributed.tensor", "torch.distributed.tensor._random"
    found: tuple[Any, Any] = (sys.modules.get(names[0]), sys.modules.get(names[1]))
    return found


def _of_dtensor() -> tuple[dict[Any, Any], Any]:
    """What `loss_parallel` adds while a loss over parts of the classes is computed, and the generator of
    numbers that are drawn in parts."""
    api, draws = _dtensor_modules()
    if api is None or draws is None:
        return {}, None
    return dict(_handlers(api)), draws._rng_tracker


def _set_of_dtensor(state: tuple[dict[Any, Any], Any]) -> None:
    api, draws = _dtensor_modules()
    if api is None or draws is None or not state[0]:
        return  # imported since: what was added then stays
    handlers = _handlers(api)
    if handlers != state[0]:
        handlers.clear()
        handlers.update(state[0])
    draws._rng_tracker = state[1]


def _handlers(api: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = api.DTensor._op_dispatcher._custom_op_handlers
    return found


def _set_filters(value: Any) -> None:
    warnings.filters = value
    forget = getattr(warnings, "_filters_mutated", None)  # until Python 3.13
    if forget is not None:
        forget()


_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "hook of exceptions": (lambda: sys.excepthook, lambda value: setattr(sys, "excepthook", value)),
    "filters of warnings": (lambda: warnings.filters, _set_filters),
}
_PARTS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (capture_rng, restore_rng),
    (read_settings, apply_settings),
    (_flags, _set_flags),
    (_of_dtensor, _set_of_dtensor),
)

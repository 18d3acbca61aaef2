"""The script's settings of `logging` and `warnings`, which go to started ranks."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

import cloudpickle

__all__ = ["apply_settings", "read_settings"]


def read_settings() -> bytes:
    """Settings of this process, pickled: filters of warnings, and of each logger its level, `propagate`,
    `disabled`, and the handlers that write to a file or to an output stream of the process."""
    named = {name: one for name, one in logging.root.manager.loggerDict.items() if _is_set(one)}
    loggers = [
        (name, one.level, one.propagate, one.disabled, [h for h in map(_pickled, one.handlers) if h])
        for name, one in {"": logging.root, **named}.items()
        if isinstance(one, logging.Logger)
    ]
    captures = getattr(logging, "_warnings_showwarning", None) is not None
    found: bytes = cloudpickle.dumps((warnings.filters, captures, logging.root.manager.disable, loggers))
    return found


def apply_settings(data: bytes) -> None:
    """Give this process what `read_settings` returned in another."""
    filters, captures, below, loggers = cloudpickle.loads(data)
    warnings.filterwarnings("default")  # so that what Python remembers of the filters is dropped
    warnings.filters[:] = filters  # type: ignore[index]
    logging.captureWarnings(captures)
    logging.disable(below)
    for name, level, propagate, disabled, handlers in loggers:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate, logger.disabled = propagate, disabled
        present = set(map(_pickled, logger.handlers))
        for handler in handlers:
            if handler not in present:
                _add(logger, *cloudpickle.loads(handler))


def _is_set(logger: Any) -> bool:
    """True if a script or library has changed `logger`; False for one that is only a part of names."""
    changed = getattr(logger, "level", 0) or getattr(logger, "handlers", ())
    return bool(changed or getattr(logger, "disabled", False) or not getattr(logger, "propagate", True))


def _pickled(handler: logging.Handler) -> bytes | None:
    """Place, level, format and filters of a handler; None for one that cannot travel."""
    place = None
    if type(handler) is logging.FileHandler:
        place = handler.baseFilename
    elif type(handler) is logging.StreamHandler:
        streams = {name: (getattr(sys, name), getattr(sys, f"__{name}__")) for name in ("stdout", "stderr")}
        place = next((name for name, either in streams.items() if handler.stream in either), None)
    try:
        found: bytes = cloudpickle.dumps((place, handler.level, handler.formatter, handler.filters))
    except Exception:  # noqa: BLE001 - a script's format or filter may hold anything
        return None
    return found if place else None


def _add(logger: logging.Logger, place: str, level: int, formatter: Any, filters: list[Any]) -> None:
    is_file = os.path.isabs(place)
    if is_file and not os.path.isdir(os.path.dirname(place)):
        return  # another host
    # A rank never truncates what the script and other ranks write.
    made = logging.FileHandler(place, delay=True) if is_file else logging.StreamHandler(getattr(sys, place))
    made.setLevel(level)
    made.setFormatter(formatter)
    made.filters = filters
    logger.addHandler(made)

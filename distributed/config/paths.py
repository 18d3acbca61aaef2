"""Paths of a configuration, made independent of the working folder."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from pydantic import BaseModel

from distributed.config.sections import local_path

__all__ = ["with_absolute_paths"]

_Model = TypeVar("_Model", bound=BaseModel)


def with_absolute_paths(config: _Model) -> _Model:
    """A copy of `config` whose relative paths are those of the current working folder: a callback may change
    it while the run writes there. Fields are paths whose ``json_schema_extra`` has ``"path": True``; where it
    is ``"store"``, only a SQLite file and a path that begins with a dot are, as other words are names."""
    changed: dict[str, Any] = {}
    for name, field in type(config).model_fields.items():
        value, extra = getattr(config, name), field.json_schema_extra
        if isinstance(value, BaseModel):
            changed[name] = with_absolute_paths(value)
        elif isinstance(value, str) and isinstance(extra, dict) and extra.get("path"):
            changed[name] = _absolute_store(value) if extra["path"] == "store" else _absolute(value)
    changed = {name: value for name, value in changed.items() if value is not getattr(config, name)}
    if not changed:
        return config
    copied = config.model_copy(update=changed)
    # A default stays a default, although its path is absolute now.
    copied.__pydantic_fields_set__.intersection_update(config.model_fields_set)
    return copied


def _absolute(place: str) -> str:
    path = local_path(place)
    if path is None or os.path.isabs(path):
        return place
    return place.removesuffix(path) + os.path.abspath(path)


def _absolute_store(address: str) -> str:
    if address.startswith("."):
        return os.path.abspath(address)
    scheme, is_sqlite, path = address.partition("sqlite:///")
    return f"{is_sqlite}{os.path.abspath(path)}" if is_sqlite and not scheme and path else address

"""Where values come from: defaults < file < flags and --set, each remembered."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from distributed.config.aliases import guess_field
from distributed.config.schema import DistributedConfig, complete
from distributed.config.validation_errors import field_names
from distributed.errors import UserError, hide_own_frames
from distributed.redaction import redact

__all__ = [
    "Layer",
    "all_fields",
    "as_layers",
    "check_agreement",
    "config_layers",
    "explain",
    "load",
    "load_layers",
    "native_names",
    "nested",
    "override",
    "parse_assignments",
    "read_file",
    "top_fields",
    "value_of",
]


@dataclass(frozen=True)
class Layer:
    """Values from one source, e.g. ``Layer("file run.yaml", {"batch_size": 32})``."""

    origin: str
    values: Mapping[str, Any]


@hide_own_frames
def load(
    file: str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    origin: str = "argument",
) -> DistributedConfig:
    """Defaults, then `file`, then `overrides` (nested mappings, or dotted names).

    Raises:
        UserError: the file cannot be read, or a value is wrong.
    """
    layers = [read_file(file)] if file is not None else []
    return load_layers([*layers, Layer(origin, dict(overrides or {}))])


def load_layers(layers: Sequence[Layer]) -> DistributedConfig:
    """Merge `layers`, later ones winning leaf by leaf, and validate the result."""
    complete()
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        if layer.origin in native_names():  # its native configuration sets them again, if it is still there
            continue
        for name, value in leaves(layer.values):
            _assign(merged, name, value)
            origins[name] = layer.origin
    config = DistributedConfig(**merged)
    config._origins |= origins
    return config


def top_fields() -> list[str]:
    """Names of all flat fields and sections, those of plugins included."""
    complete()
    return list(DistributedConfig.model_fields)


def all_fields() -> list[str]:
    """Dotted names of all fields, those of plugins included, in the order of the tree."""
    complete()
    return field_names(DistributedConfig)


def native_names() -> set[str]:
    """Names of the fields that hold a framework's own configuration; also origins of what these set."""
    return {native.name for native in DistributedConfig.native_fields}


def as_layers(config: DistributedConfig) -> list[Layer]:
    """The explicit values of `config`, one layer per origin, so that they can be merged again."""
    return [Layer(config.origin(name), {name: value_of(config, name)}) for name in _set_names(config)]


def config_layers(config: Any) -> list[Layer]:
    """Layers of what `Trainer` takes as a configuration: none, a `DistributedConfig`, a mapping, or a path.

    Raises:
        UserError: it is none.
    """
    if config is None:
        return []
    if isinstance(config, DistributedConfig):
        return as_layers(config)
    if isinstance(config, Mapping):
        return [Layer("config", config)]
    if isinstance(config, (str, os.PathLike)):
        return [read_file(config)]
    raise UserError(
        "not a configuration",
        field="config",
        got=type(config).__name__,
        allowed="a DistributedConfig, a mapping, or the path of a YAML file",
    )


def override(config: DistributedConfig, values: Mapping[str, Any], origin: str) -> DistributedConfig:
    """A copy of `config` with some values replaced (nested mappings for sections), and their origin."""
    return load_layers([*as_layers(config), Layer(origin, dict(values))])


def read_file(path: str | os.PathLike[str]) -> Layer:
    """One YAML (or JSON) file as a layer.

    Raises:
        UserError: no such file, not YAML, a key that is set twice, too many values, or not a mapping at the
            top.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = _parse(file.read(_LARGEST + 1), str(path))
    except OSError as error:
        raise UserError(
            f"cannot read the configuration file: {error.strerror}",
            field="config",
            got=str(path),
            remedy="Check the path",
        ) from None
    except UnicodeDecodeError:
        raise UserError(
            "the configuration file is not text in UTF-8",
            field="config",
            got=str(path),
            remedy="Check the path",
        ) from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UserError(
            "the configuration file must hold names and values at its top level",
            field="config",
            got=f"{type(data).__name__} in {path}",
            allowed="a mapping, with lines such as `epochs: 3`",
        )
    return Layer(f"file {path}", data)


_LARGEST = 1 << 20
"""Characters of a configuration file at most."""


def _parse(text: str, path: str) -> Any:
    """What ``yaml.safe_load`` returns, which would keep the last of two equal keys."""
    import yaml

    if len(text) > _LARGEST:
        raise UserError(
            "the configuration file is too large",
            field="config",
            got=path,
            allowed=f"at most {_LARGEST:,} characters",
            remedy="Check the path",
        )
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root, path)
        return loader.construct_document(root)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"the configuration file is not valid YAML: {error}",
            field="config",
            got=path,
            remedy="`config show` prints a valid file",
        ) from None
    except RecursionError:
        raise UserError(
            "the configuration file is nested too deeply", field="config", got=path, remedy="Check the path"
        ) from None
    finally:
        loader.dispose()


def _check_nodes(root: Any, path: str) -> None:
    from distributed.config.yaml_checks import MAX_VALUES, count_values, find_duplicate

    twice = find_duplicate(root)
    if twice is not None:
        raise UserError(
            f"the key '{twice.name}' is set twice, on line {twice.first} and on line {twice.second}",
            field="config",
            got=path,
            allowed="each key once",
            remedy="Remove one of the two lines",
        )
    if count_values(root) > MAX_VALUES:
        raise UserError(
            "the aliases of the configuration file stand for too many values",
            field="config",
            got=path,
            allowed=f"at most {MAX_VALUES:,} values",
            remedy="Write the values that are needed",
        )


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """``["data.verify=false"]`` -> ``{"data.verify": False}``; values are read as YAML.

    Raises:
        UserError: no ``=``, or an unknown name.
    """
    import yaml

    values: dict[str, Any] = {}
    known = all_fields()
    for assignment in assignments:
        name, found, text = assignment.partition("=")
        if not found:
            raise UserError(
                "an assignment needs a name, '=' and a value",
                field="--set",
                got=assignment,
                allowed="NAME=VALUE, e.g. --set data.per_sample_rng=true",
            )
        name = name.strip().replace("-", "_")
        if name not in known and name not in top_fields():
            raise UserError(
                f"unknown configuration field '{name}'.{guess_field(name, known)}",
                field="--set",
                remedy="`python -m distributed.cli config fields` lists every field",
            )
        try:
            value = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError):  # a ValueError: a date that does not exist
            value = text
        values[name] = value
    return values


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """``{"data.verify": False}`` as ``{"data": {"verify": False}}``, as a file has it."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        _assign(tree, name, value)
    return tree


def explain(config: DistributedConfig) -> list[tuple[str, Any, str]]:
    """Every leaf as (dotted name, value, origin), in the order of the schema, for people and for files:
    without secrets. What a run needs is read from `config` itself."""
    return [(name, redact(value_of(config, name), name), config.origin(name)) for name in all_fields()]


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """(dotted name, value) of each field in a nested mapping."""
    fields = all_fields()  # of which some hold names and values themselves
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, BaseModel):
            value = value.model_dump(exclude_unset=True)
        if isinstance(value, Mapping) and value and name not in fields:
            yield from leaves(value, f"{name}.")
        else:
            yield name, value


def _assign(tree: dict[str, Any], name: str, value: Any) -> None:
    *path, leaf = name.split(".")
    for part in path:
        child = tree.setdefault(part, {})
        if not isinstance(child, dict):
            # `lr_scaling: linear` is shorthand for its rule; a later dotted name refines it.
            child = tree[part] = {"rule": child}
        tree = child
    tree[leaf] = value


def value_of(config: BaseModel, name: str) -> Any:
    """The value of the field `name`, dotted for sections."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def check_agreement(config: DistributedConfig, values: Mapping[str, Any], source: str) -> None:
    """Raise a UserError if an argument beside `source` has set one of its fields to another value.

    Args:
        values: dotted name of a field -> what `source` sets it to.
        source: argument and value, for the message.
    """
    for name, value in values.items():
        found = value_of(config, name)
        if found != value and config.origin(name) == "argument":
            raise UserError(
                f"{source} stands for {name}={value}",
                field=name,
                got=found,
                allowed=str(value),
                remedy="Leave one of them out",
            )


def _set_names(config: BaseModel, prefix: str = "") -> list[str]:
    names = []
    for name in type(config).model_fields:
        if name not in config.model_fields_set:
            continue
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            names += _set_names(value, f"{prefix}{name}.")
        else:
            names.append(f"{prefix}{name}")
    return names

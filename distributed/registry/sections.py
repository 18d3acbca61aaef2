"""Sections of the configuration that plugins register: load one, and add all of them to the tree."""

from __future__ import annotations

from collections.abc import Container, Mapping
from importlib import import_module
from typing import Any

from pydantic import Field, create_model

from distributed.config.schema import DistributedConfig
from distributed.config.sections import Section


def load_section(name: str, target: str, taken: Container[str]) -> type[Section]:
    """Import the class of the section `name` and check that the tree can hold it.

    Args:
        name: of the field that the section will be.
        target: ``package.module:Class``.
        taken: names that earlier plugins registered.

    Raises:
        ValueError: the name, or that of the section's native field, is taken or no field's name.
        TypeError: the target is not a `Section`.
        ValidationError: a field has no default.
        Exception: whatever its module raises when it is imported.
    """
    module, _, attribute = target.partition(":")
    section = getattr(import_module(module), attribute)
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise TypeError(f"section '{name}': {target} is not a subclass of distributed.Section")
    section()  # raises for a field without a default, which would make the section required
    section.model_json_schema()  # flags and the reference are made from it
    for field in [name, *([section.native.name] if section.native else [])]:
        _check_name(field, taken)
    return section


def add_sections(model: type[DistributedConfig], sections: Mapping[str, type[Section]]) -> None:
    """Make each section a field of `model`, and each section's native field one, in place.

    In place, so that a module that imported `model` before the plugins were loaded, such as a plugin, has
    the complete one too, and so that a pickle finds it by its name.
    """
    natives = tuple(section.native for section in sections.values() if section.native)
    flat: dict[str, Any] = {
        native.name: (dict[str, Any] | None, Field(None, description=native.description))
        for native in natives
    }
    nested: dict[str, Any] = {
        name: (section, Field(default_factory=section, description=_summary(section)))
        for name, section in sections.items()
    }
    fields = model.model_fields
    own = {name: fields.pop(name) for name in list(fields)}
    is_section = {name: _is_section(info.annotation) for name, info in own.items()}
    fields.update((name, info) for name, info in own.items() if not is_section[name])
    fields.update(create_model("Flat", **flat).model_fields)
    fields.update((name, info) for name, info in own.items() if is_section[name])
    fields.update(create_model("Nested", **nested).model_fields)
    model.native_fields = (*model.native_fields, *natives)
    model.model_rebuild(force=True)


def _check_name(name: str, taken: Container[str]) -> None:
    if not name.isidentifier() or name.startswith("_"):
        raise ValueError(f"'{name}' cannot be the name of a configuration field")
    if name in taken or name in DistributedConfig.model_fields or hasattr(DistributedConfig, name):
        raise ValueError(f"the configuration already has a field '{name}'")


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _summary(section: type[Section]) -> str:
    return (section.__doc__ or section.__name__).split("\n\n")[0].replace("\n", " ").strip()

"""Turns pydantic's findings into the one paragraph a user reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from distributed.config.aliases import BACKEND_SECTIONS, guess_field
from distributed.errors import UserError
from distributed.redaction import MARK, is_redacted


def field_names(model: type[BaseModel]) -> list[str]:
    """Dotted names of every leaf field of a config model."""
    names = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            names += [f"{name}.{leaf}" for leaf in field_names(inner)]
        else:
            names.append(name)
    return names


def user_error(
    error: ValidationError, model: type[BaseModel], given: Mapping[str, Any] | None = None
) -> UserError:
    """The first finding as a paragraph, and how many more there are.

    Args:
        given: all values of `model`, which may tell what a wrong one means.
    """
    details = error.errors(include_url=False)
    first = _one(details[0], model, given)
    others = {_dotted(detail) for detail in details} - {_dotted(details[0])}
    if others:
        first.message += f" (also wrong: {', '.join(sorted(others))})"
        first.args = (first.paragraph(),)
    return first


def refuse_redacted(values: dict[str, Any]) -> None:
    """Raise UserError for a value that was copied from where secrets are left out."""
    for name, value in values.items():
        if is_redacted(value.model_dump() if isinstance(value, BaseModel) else value):
            raise UserError(
                f"it holds {MARK}, which stands for a secret that was left out when the value was printed",
                field=name,
                got=value,
                remedy="Write the secret itself, or leave it out and set the environment variable of the"
                " service, such as MLFLOW_TRACKING_PASSWORD",
            )


def _dotted(detail: ErrorDetails) -> str:
    # Union members and functions appear in pydantic's location; only field names are the user's.
    parts = [str(part) for part in detail["loc"] if not _is_internal(part)]
    return ".".join(parts) or "config"


def _is_internal(part: Any) -> bool:
    return isinstance(part, str) and (
        part in {"bool", "str", "int", "float"} or "[" in part or "(" in part or "-" in part
    )


def _one(detail: ErrorDetails, model: type[BaseModel], given: Mapping[str, Any] | None) -> UserError:
    name, kind = _dotted(detail), detail["type"]
    if kind == "extra_forbidden":
        return UserError(
            f"unknown configuration field '{name}'.{guess_field(name, field_names(model), given)}",
            remedy="`python -m distributed.cli config fields` lists every field",
        )
    if kind == "value_error":
        message = str(detail["ctx"]["error"]) if "ctx" in detail else detail["msg"]
        return UserError(message, field="config" if name == "config" else name)
    if kind in ("model_type", "model_attributes_type"):
        inside = ", ".join(field for field in field_names(model) if field.startswith(f"{name}."))
        return UserError(
            "a section holds names and values",
            field=name,
            got=detail["input"],
            allowed=inside,
            remedy=f"Set backend={name} to select the backend" if name in BACKEND_SECTIONS else None,
        )
    allowed = allowed_values(name, model) or detail["msg"].lower().removeprefix("input should be ")
    return UserError("invalid value", field=name, got=detail["input"], allowed=allowed)


def allowed_values(name: str, model: type[BaseModel]) -> str | None:
    """What a field accepts, read from its JSON schema, so that the words cannot go stale."""
    current: type[BaseModel] = model
    *path, leaf = name.split(".")
    for part in path:
        info = current.model_fields.get(part)
        if info is None or not (isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)):
            return None
        current = info.annotation
    schema = current.model_json_schema().get("properties", {}).get(leaf)
    return _in_words(schema) if schema else None


def _in_words(schema: dict[str, Any]) -> str | None:
    if "anyOf" in schema:
        words = [word for option in schema["anyOf"] if (word := _in_words(option))]
        return " or ".join(words)
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        return f"a list of {_in_words(schema.get('items', {})) or 'values'}"
    kind = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "text",
        "object": "names and values",
        "null": "nothing",
    }.get(schema.get("type", ""))
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most"}
    limits = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
    return " ".join(filter(None, [kind, " and ".join(limits)])) if kind else None

"""Settings of all targets besides the configuration, from a file, then flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from distributed.config import read_file
from distributed.config.validation_errors import user_error
from distributed.errors import UserError, did_you_mean
from distributed.operations.deploy.checks import check_env, check_text, env_mapping

_Model = TypeVar("_Model", bound="Settings")


class Settings(BaseModel):
    """Settings of a target. Each target's model adds its own fields, from which its flags, help and messages
    are made."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    name: str = Field("train", description="Name of the job and of its resources.")


class RunSettings(Settings):
    """Settings of every target that runs a job."""

    python: str = Field("python", description="Python executable on the cluster.")
    env: dict[str, str] = Field(
        default_factory=dict, description="Environment variables of the job. Secrets are rejected."
    )

    def secret_remedy(self) -> str:
        """Remedy for a secret in a file."""
        return "Leave it out of the files"

    @field_validator("env", mode="before")
    @classmethod
    def _pairs(cls, value: Any) -> Any:
        value = env_mapping(value)
        # YAML reads 1 and true as what they look like; a variable is text.
        return {k: _as_text(v) for k, v in value.items()} if isinstance(value, Mapping) else value

    @model_validator(mode="after")
    def _clean(self) -> Self:
        check_env(self.env, self.secret_remedy())
        check_text(self.python, "python")
        if not self.python.strip():
            raise ValueError("python is empty: give the interpreter's name or path")
        return self


def read_settings(model: type[_Model], file: str | None, flags: Mapping[str, Any]) -> _Model:
    """The target's settings: defaults < `file` < `flags`, field by field.

    Raises:
        UserError: the file cannot be read, an unknown name, an invalid value.
    """
    given = dict(read_file(file).values) if file is not None else {}
    for name in given:
        if name not in model.model_fields:
            raise UserError(
                f"unknown setting '{name}'.{did_you_mean(str(name), model.model_fields)}",
                field="--settings",
                got=file,
                remedy="The flags of this target, without the dashes, are its settings",
            )
    try:
        return model(**{**given, **flags})
    except ValidationError as error:
        raise user_error(error, model) from None


def _as_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value

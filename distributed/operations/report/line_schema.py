"""What a line of a record holds, as far as reports read it. Lines of another form are left out."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from distributed.redaction import redact

__all__ = ["is_known", "parse_line", "printable"]

_NUMBERS = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
_UNPRINTABLE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Characters that move a terminal's cursor, reverse text, or cannot be encoded."""


def _figures(found: dict[str, Any]) -> dict[str, float]:
    numbers = {
        name: _NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in found.items()
    }
    return {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}


def _settings(found: list[Any]) -> list[tuple[str, Any, str]]:
    items = [item for item in found if isinstance(item, list) and len(item) == 3]
    return [
        (name, redact(value, name), str(origin)) for name, value, origin in items if isinstance(name, str)
    ]


_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[float, Field(ge=0, lt=1e11)]
"""Seconds since the epoch, with a date in the calendar."""
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Figures = Annotated[dict[str, Any], AfterValidator(_figures)]
"""Metrics as numbers; what is no number is left out."""
_Settings = Annotated[list[Any], AfterValidator(_settings)]
"""(name, value, origin) of fields; what is none is left out."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Place(_Part):
    backend: str | None = None
    world_size: _Count | None = None
    num_nodes: _Count | None = None
    hosts: list[str] = []
    device: str | None = None
    precision: str | None = None
    step: _Count | None = None
    checkpoint: str | None = None
    batch: dict[str, _Count | None] = {}


class _Process(_Part):
    host: str | None = None
    pid: _Count | None = None
    created: _Number | None = None


class _Error(_Part):
    summary: str = ""
    host: str | None = None
    rank: int | None = None
    step: int | None = None
    traceback: str | None = None


class _Totals(_Part):
    total_time: _Number | None = None
    num_skipped_steps: _Count | None = None


class _Line(_Part):
    """A line of any kind; the classes below have what their kind requires."""

    kind: str
    time: _Time
    record: _Count | None = None
    run: str | None = None
    place: _Place | None = None
    config: _Settings | None = None
    processes: list[_Process] | None = None
    versions: dict[str, str] | None = None
    cores: _Number | None = None
    name: str | None = None
    script: str | None = None
    reason: str | None = None
    totals: _Totals | None = None
    error: _Error | None = None


class _OfAttempt(_Line):
    attempt: str


class _Start(_OfAttempt):
    record: _Count
    run: str
    place: _Place
    config: _Settings


class _Metrics(_OfAttempt):
    step: _Count
    figures: _Figures


class _Checkpoint(_OfAttempt):
    step: _Count
    path: str


class _Finish(_OfAttempt):
    status: str


class _Restart(_Line):
    error: _Error


class _End(_Line):
    status: str


_KINDS: dict[str, type[_Line]] = {
    "start": _Start,
    "log": _Metrics,
    "epoch": _Metrics,
    "checkpoint": _Checkpoint,
    "finish": _Finish,
    "restart": _Restart,
    "end": _End,
}


def is_known(found: Any) -> bool:
    """Whether a value is a line of a kind that this version writes, well-formed or not."""
    return isinstance(found, dict) and isinstance(found.get("kind"), str) and found["kind"] in _KINDS


def parse_line(found: dict[str, Any]) -> dict[str, Any] | None:
    """A line that `is_known`, without secrets and unprintable characters; None if it is malformed."""
    try:
        line = _KINDS[found["kind"]](**redact(printable(found)))
    except (ValidationError, TypeError):
        return None
    return line.model_dump(exclude_unset=True)


def printable(value: Any) -> Any:
    """A copy of `value` whose texts can be printed on a terminal and written as UTF-8."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {printable(name): printable(item) for name, item in value.items()}
    return [printable(item) for item in value] if isinstance(value, list) else value

"""Section `low_communication` of the configuration: ranks that train on their own between outer steps."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from distributed.config.sections import Section

__all__ = ["LowCommunicationSection"]

_OUTER = ("diloco", "streaming-diloco")
_STREAMING = ("streaming-diloco",)
_ASYNCHRONOUS = ("async-sgd",)
_READ_BY: dict[str, tuple[str, ...]] = {
    "period": ("local-sgd", *_OUTER),
    "outer_learning_rate": _OUTER,
    "outer_momentum": _OUTER,
    "nesterov": _OUTER,
    "fragments": _STREAMING,
    "overlap_steps": _STREAMING,
    "mixing": _STREAMING,
    "max_staleness": _ASYNCHRONOUS,
    "arrival_log": _ASYNCHRONOUS,
}
"""Field -> the modes that read it."""


class LowCommunicationSection(Section):
    """Training over slow links: each rank takes optimizer steps on its own samples, and the ranks exchange
    parameters once in `period` steps, or by a server without waiting for each other. The weights are other
    ones than those of data parallelism: see the page on low-communication training."""

    mode: Literal["none", "local-sgd", "diloco", "streaming-diloco", "async-sgd"] = Field(
        "none",
        description="none: exchange gradients in every step; local-sgd: average parameters; diloco: an outer"
        " optimizer with momentum steps on the averaged change; streaming-diloco: the same for parts of the"
        " model in turn, while training continues; async-sgd: each rank reads parameters from rank 0 and"
        " sends it updates, in any order.",
        json_schema_extra={"flag": "--low-communication"},
    )
    period: PositiveInt | None = Field(
        None,
        description="Number of optimizer steps between two outer steps; required by `local-sgd`, `diloco` and"
        " `streaming-diloco`.",
    )
    outer_learning_rate: PositiveFloat = Field(
        0.7, description="Learning rate of the outer optimizer of `diloco` and `streaming-diloco`."
    )
    outer_momentum: float = Field(0.9, ge=0.0, lt=1.0, description="Momentum of the outer optimizer.")
    nesterov: bool = Field(True, description="Use Nesterov's form of the outer momentum.")
    fragments: PositiveInt = Field(
        4,
        description="Number of parts of the model that `streaming-diloco` exchanges in turn, at most `period`"
        " and the number of trained parameters.",
    )
    overlap_steps: NonNegativeInt = Field(
        1,
        description="Number of optimizer steps during which `streaming-diloco` exchanges a part; less than"
        " `period`.",
    )
    mixing: float = Field(
        0.5,
        ge=0.0,
        lt=1.0,
        description="Weight of a rank's own parameters where `streaming-diloco` puts them together with the"
        " exchanged ones; 0 replaces them.",
    )

    max_staleness: NonNegativeInt | None = Field(
        None,
        description="Largest number of updates between reading parameters and updating them under"
        " `async-sgd`, which requires it; ranks wait rather than exceed it. The number of ranks less 1"
        " lets all compute.",
    )
    arrival_log: str | None = Field(
        None,
        description="File to which `async-sgd` appends each update: its number, rank, step and staleness.",
        json_schema_extra={"path": True},
    )

    @property
    def is_active(self) -> bool:
        """Whether ranks train on their own."""
        return self.mode != "none"

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name in sorted(self.model_fields_set & _READ_BY.keys()):
            value, unset = getattr(self, name), type(self).model_fields[name].default
            if self.mode not in _READ_BY[name] and value != unset:
                raise ValueError(
                    f"low_communication.{name}={value} has no effect under mode={self.mode}: it is read by"
                    f" mode={' and mode='.join(_READ_BY[name])}"
                )
        if self.mode == "none":
            return self
        if self.mode == "async-sgd":
            return self._check_asynchronous()
        if self.period is None:
            raise ValueError(
                f"low_communication.period is missing: mode={self.mode} needs the number of optimizer steps"
                " between two outer steps. Published runs use 30 to 500 (DiLoCo), and 4 to 16 where all"
                " ranks begin with untrained weights (local SGD)"
            )
        if self.mode == "streaming-diloco":
            self._check_streaming(self.period)
        return self

    def _check_asynchronous(self) -> Self:
        if self.max_staleness is None:
            raise ValueError(
                "low_communication.max_staleness is missing: mode=async-sgd needs the largest number of"
                " updates between reading parameters and updating them. The number of ranks less 1 lets all"
                " ranks compute at the same time; two to four times as much absorbs steps of different"
                " lengths"
            )
        return self

    def _check_streaming(self, period: int) -> None:
        if self.fragments > period:
            raise ValueError(
                f"low_communication.fragments={self.fragments} is above period={period}: one part of the"
                " model is exchanged at a step; use fewer fragments or a longer period"
            )
        if self.overlap_steps >= period:
            raise ValueError(
                f"low_communication.overlap_steps={self.overlap_steps} is not below period={period}: a part"
                " of the model is exchanged again after that many steps; use fewer overlap_steps"
            )

"""PlanOptions: what a user chooses of a search for plans beside the fields of the configuration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.parallel_dims import AXES, ParallelDims
from distributed.planner.estimates.candidates import SearchSpace, groups
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.model_facts import Cut, ModelFacts

__all__ = ["PlanOptions", "left_out", "limited", "note_on_batch", "recording_seconds"]

_ALL = (*AXES, "expert")
_NAMED = ", ".join(_ALL)

_SECONDS_PER_EVENT = 5.5e-3
"""To record an event of a timeline at both numbers of samples, with and without recomputation; measured on a
Llama on one core of a server."""
_PATIENCE = 120.0
"""Seconds that the facts of divided models may take if their axes were not asked for."""


@dataclass(frozen=True)
class PlanOptions:
    """Arguments of `distributed.plan`.

    Attributes:
        hardware: name of a shipped profile, path of a file, or a profile; None for this machine's.
        num_devices: number of devices, each with one rank; None for those of the configuration or of a node.
        num_plans: number of plans to list.
        codecs: gradient codecs to try; a string is one of them.
        axes: axes of the mesh along which a plan may have several ranks; a string is one of them, None stands
            for those that are worth it.
    """

    hardware: str | Path | HardwareProfile | None = None
    num_devices: int | None = None
    num_plans: int = 10
    codecs: str | Collection[str] = ()
    axes: str | Collection[str] | None = None

    def devices_of(self, config: DistributedConfig, profile: HardwareProfile) -> int:
        """Number of devices: as given, else the configuration's ranks, else those of a node.

        Raises:
            UserError: they fill no whole number of nodes.
        """
        count, each = (
            self.num_devices or config.num_ranks or profile.devices_per_node,
            profile.devices_per_node,
        )
        if profile.device != "cpu" and count > each and count % each:
            raise UserError(
                f"the nodes of {profile.name} have {each} devices",
                field="num_devices",
                got=count,
                allowed=f"up to {each}, or a multiple of it; nearest: {count // each * each}",
                remedy="Choose one of these, or set devices_per_node in a profile of your own",
            )
        return count

    def __post_init__(self) -> None:
        for field in ("num_devices", "num_plans"):
            value = getattr(self, field)
            if value is None:
                continue
            if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
                raise UserError(
                    "it has to be a positive integer",
                    field=field,
                    got=value,
                    allowed="1, 2, 3, ...",
                    remedy="Correct it",
                )
            object.__setattr__(self, field, int(value))
        for field in ("axes", "codecs"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, _names(field, value))
        for axis in self.axes or ():
            if axis not in _ALL:
                raise UserError(
                    "the mesh has no such axis",
                    field="axes",
                    got=axis,
                    allowed=_NAMED,
                    remedy="Choose some of these, or leave it out",
                )


def _names(field: str, given: str | Collection[str]) -> tuple[str, ...]:
    """`given`, of which a string is one name.

    Raises:
        UserError: a name is given twice, or there is none where one is needed.
    """
    names = (given,) if given and isinstance(given, str) else tuple(given)
    if field == "axes" and not names:
        raise UserError(
            "no axis is named",
            field=field,
            got=given,
            allowed=_NAMED,
            remedy="Choose some of these, or leave it out",
        )
    for name in names:
        if names.count(name) > 1:
            raise UserError(
                "a name is given twice", field=field, got=name, allowed="each once", remedy="Leave one out"
            )
    return names


def note_on_batch(config: DistributedConfig) -> tuple[str, ...]:
    """What becomes of ``batch_size=auto`` in a plan."""
    if config.batch_size != "auto":
        return ()
    return (
        "batch_size=auto: every plan has a micro-batch of its own, which is predicted to fit; a run with its"
        " file keeps this size and tries no other",
    )


def limited(space: SearchSpace, axes: Collection[str] | None) -> SearchSpace:
    """`space` with several ranks along `axes` alone; None for all."""
    if axes is None:
        return space
    others, before = tuple(axis for axis in _ALL if axis not in axes), space.admits

    def admits(dims: ParallelDims, zero_stage: int) -> bool:
        return before(dims, zero_stage) and all(dims.size(axis) == 1 for axis in others)

    return replace(space, admits=admits)


def recording_seconds(space: SearchSpace, whole: ModelFacts) -> float:
    """About how long it takes to record facts of the parts of a model that `space` has."""
    cuts = {
        Cut(group.dims.tensor, group.dims.context, group.dims.expert, group.dims.pipeline)
        for group, refused in groups(space)
        if refused is None
    }
    # All stages of a pipeline have the events of the whole model between them.
    return len(cuts - {Cut()}) * len(whole.first.events) * _SECONDS_PER_EVENT


def left_out(seconds: float) -> str | None:
    """Why ranks do not share the model in plans for it; None if facts of its parts take little time.

    Args:
        seconds: to record these facts.
    """
    if seconds <= _PATIENCE:
        return None
    return (
        f"not tried: facts of the parts of the model would take about {seconds / 60:.0f} minutes to record;"
        " name the axes to try (axes), or set fields of parallel"
    )

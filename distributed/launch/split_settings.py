"""Split the settings that constructors elsewhere take into those of the model and those of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from distributed.communication.environment import detect
from distributed.config.aliases import FIELDS, instead_of, meant_fields
from distributed.config.load import all_fields, leaves, nested, top_fields
from distributed.errors import UserError, hide_own_frames
from distributed.interfaces.parallel_dims import AXES, MODEL_AXES
from distributed.registry.catalog import get_catalog
from distributed.system.output import print_line

__all__ = ["SplitSettings", "split_settings"]

_AXES = {
    "use_model_parallel": "tensor",
    "model_parallel": "tensor",
    "use_sequence_parallel": "context",
    "sequence_parallel": "context",
}
"""Switch -> axis of the mesh. A layer is divided by the smallest number, so `tensor` comes first."""
_VALUES: dict[str, dict[str, Any]] = {
    "use_gradient_checkpointing": {"activation_checkpointing": "full"},
    "use_bf16": {"mixed_precision": "bf16"},
    "use_fp16": {"mixed_precision": "fp16"},
}
"""Switch -> fields that it stands for where it is on."""
_OTHERS = ("use_deepspeed", "cpu_offload")
_SWITCHES = (*_AXES, *_VALUES, *_OTHERS)
_RENAMED = {"train_batch_size": "global_batch_size", "micro_batch_size": "batch_size"}
_OF_LAYERS = frozenset({"dtype"})
"""Arguments of layers that are also names of fields elsewhere."""
_ZERO = "deepspeed"
_STAGES = (0, 1, 2, 3)
_DEFAULT_STAGE = 2


@dataclass(frozen=True)
class SplitSettings:
    """Result of `split_settings`; ``model, run = split_settings(...)`` unpacks its first two.

    Attributes:
        model: arguments of the model.
        run: fields of `DistributedConfig`, for ``Trainer(model, **run)``.
        notes: what was chosen in the place of a setting, one sentence each.
    """

    model: dict[str, Any]
    run: dict[str, Any]
    notes: tuple[str, ...]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from (self.model, self.run)


@dataclass
class _Run:
    """Fields of the run as they are found, and notes."""

    ranks: int | None
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def divided(self) -> dict[str, int]:
        """Axes along which ranks share the samples -> number of ranks."""
        sizes = _sizes(self.fields.get("parallel", {}))
        return {axis: n for axis, n in sizes.items() if n > 1 and axis in MODEL_AXES}

    @property
    def num_shards(self) -> int:
        """Ranks with different samples."""
        return (self.ranks or 1) // prod(self.divided.values())


@hide_own_frames
def split_settings(
    settings: Mapping[str, Any],
    num_processes: int | None = None,
    *,
    parallel: Mapping[str, Any] | None = None,
) -> SplitSettings:
    """Split `settings` into arguments of a model and fields of a run.

    ``use_sequence_parallel`` is ``parallel.context`` and ``use_model_parallel`` is ``parallel.tensor``. A
    switch does not say how many ranks: each axis gets the smallest number above 1 that divides the ranks (two
    of an even number; of `tensor`, one that divides ``num_heads``), and the remaining ranks have different
    samples. `parallel` sets other numbers.

    ``use_deepspeed`` is ``backend=deepspeed``, if that has the axes that are switched on. Otherwise the
    backend trains the same: ``fsdp``, whose ``reshard_after_forward`` is true for ZeRO 3 and false
    for 1 and 2; or ``pytorch-ddp`` for stage 0, and where no ranks remain over which to shard. Such choices
    are printed on rank 0, and returned as notes.

    Args:
        settings: names of other libraries (``use_deepspeed``, ``zero_stage``, ``use_sequence_parallel``,
            ``use_model_parallel``, ``cpu_offload``, ``use_gradient_checkpointing``, ``use_bf16``,
            ``use_fp16``, ``train_batch_size``, ``micro_batch_size``), fields of `DistributedConfig`, and
            arguments of the model, which are all other names.
        num_processes: number of ranks over all nodes; None takes it from the launcher.
        parallel: fields of the section `parallel`, which are used as they are.

    Raises:
        UserError: a switch that is no bool, a name of a field elsewhere, settings that contradict each
            other, or a number of ranks that cannot be divided so.
    """
    place = detect(os.environ)
    ranks = num_processes if num_processes is not None or place is None else place.size
    model, own, foreign = _sort(settings)
    run = _Run(ranks)
    if ranks is not None:
        run.fields["num_processes"] = ranks
    _divide(run, foreign, model.get("num_heads"), dict(parallel or own.pop("parallel", {})))
    _check_precision(foreign)
    for name, value in foreign.items():
        run.fields |= _VALUES.get(name, {}) if value is True else {}
    run.fields |= {_RENAMED[name]: value for name, value in foreign.items() if name in _RENAMED}
    _choose_backend(run, foreign, own)
    _offload(run, foreign, own)
    found = SplitSettings(model, _together(own, run.fields), tuple(run.notes))
    if place is None or place.rank == 0:
        for note in found.notes:
            print_line(f"note: {note}", sys.stdout)
    return found


def _sort(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(arguments of the model, fields of ours, settings of others)."""
    model: dict[str, Any] = {}
    own: dict[str, Any] = {}
    foreign: dict[str, Any] = {}
    fields = top_fields()
    for name, value in settings.items():
        if name in _SWITCHES and not isinstance(value, bool):
            raise UserError("a switch", field=name, got=value, allowed="True or False")
        if name in (*_SWITCHES, *_RENAMED, "zero_stage"):
            foreign[name] = value
        elif name.partition(".")[0] in fields:
            own[name] = value
        else:
            _check_other(name)
            model[name] = value
    return model, own, foreign


def _check_other(name: str) -> None:
    """Raise a UserError for a name that means something of the run."""
    if name in _OF_LAYERS:
        return
    instead = instead_of(name)
    if name in FIELDS:
        instead = f"Give {' or '.join(meant_fields(name, all_fields()))}"
    if instead and not instead.startswith("It belongs to the model"):
        raise UserError(
            "not an argument of a model, and no field", field=name, remedy=f"Leave it out. {instead}"
        )


def _check_precision(foreign: Mapping[str, Any]) -> None:
    if foreign.get("use_bf16") and foreign.get("use_fp16"):
        raise UserError(
            "one precision at a time",
            field="use_bf16, use_fp16",
            got="both True",
            allowed="one of them",
            remedy="Leave use_fp16 out where the GPU has bf16",
        )


# -- axes --------------------------------------------------------------------------------------------------


def _divide(run: _Run, foreign: Mapping[str, Any], num_heads: Any, given: dict[str, Any]) -> None:
    """Set the sizes of the axes that are switched on, and of those that are given."""
    wanted = {axis: name for name, axis in _AXES.items() if foreign.get(name)}
    missing = {axis: name for axis, name in wanted.items() if axis not in given}
    if given:
        run.fields["parallel"] = given
    if not missing:
        return
    names = " and ".join(missing.values())
    if run.ranks is None:
        raise UserError(
            f"{names} divides a model between ranks, whose number is not known here",
            field="num_processes",
            got=None,
            allowed="a number, or nothing under a launcher such as torchrun",
            remedy="Pass num_processes to split_settings, or the sizes as parallel={'context': 2}",
        )
    if run.ranks == 1:
        run.notes.append(f"{names}: 1 rank divides nothing")
        return
    sizes = run.fields.setdefault("parallel", given)
    for axis, name in missing.items():
        left = run.ranks // prod(_sizes(sizes).values())
        sizes[axis] = _smallest(left, axis, name, num_heads, run.ranks)
    chosen = " and ".join(f"parallel.{axis}={sizes[axis]}" for axis in missing)
    rest = run.ranks // prod(_sizes(sizes).values())
    run.notes.append(
        f"{names}: {chosen}"
        + (f", and {rest} such groups of ranks have different samples" if rest > 1 else "")
        + f"; parallel={{'{next(iter(missing))}': N}} of split_settings sets another number"
    )


def _sizes(parallel: Mapping[str, Any]) -> dict[str, int]:
    """Fields of the section that multiply to the number of ranks."""
    return {name: n for name, n in parallel.items() if name in AXES and isinstance(n, int)}


def _smallest(left: int, axis: str, name: str, num_heads: Any, ranks: int | None) -> int:
    heads = num_heads if axis == "tensor" and isinstance(num_heads, int) else 0
    fits = [n for n in range(2, left + 1) if left % n == 0 and heads % n == 0]
    if fits:
        return fits[0]
    because = f"in numbers that also divide num_heads={heads}" if heads else "between several axes"
    raise UserError(
        f"{name} needs ranks along an axis of its own, and {ranks} ranks cannot be divided {because}",
        field="num_processes",
        got=ranks,
        allowed="2 and more for one axis, 4 and more for use_sequence_parallel and use_model_parallel",
        remedy=f"Use so many ranks, set {name}=False, or give the sizes as parallel={{'{axis}': 1}}",
    )


# -- backend -----------------------------------------------------------------------------------------------


def _choose_backend(run: _Run, foreign: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Set the backend where ZeRO is asked for, and its stage or what trains as that does."""
    asked, stage = foreign.get("use_deepspeed"), foreign.get("zero_stage")
    if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
        raise UserError("no stage of ZeRO", field="zero_stage", got=stage, allowed="0, 1, 2, 3")
    if asked is False and stage is not None:
        run.notes.append(f"zero_stage={stage} is left out, because of use_deepspeed=False")
    if not asked and (asked is False or stage is None):
        return
    offered = get_catalog().backend(_ZERO).capabilities.axes
    beyond = sorted(set(run.divided) - set(offered))
    if not beyond or "backend" in own:
        run.fields |= {"backend": _ZERO} if asked else {}
        run.fields |= {} if stage is None else {"zero_stage": stage}
        return
    stage = _DEFAULT_STAGE if stage is None else stage
    because = f"backend '{_ZERO}' cannot have several ranks along {' and '.join(beyond)}"
    if stage == 0 or run.num_shards == 1:
        run.fields["backend"] = "pytorch-ddp"
        why = "no ranks remain over which to shard" if stage else "stage 0 shards nothing"
        chosen = f"backend=pytorch-ddp trains the same ({why})"
    else:
        run.fields["backend"] = "fsdp"
        run.fields["fsdp"] = {"reshard_after_forward": stage == 3}
        chosen = (
            f"backend=fsdp with fsdp.reshard_after_forward={str(stage == 3).lower()} shards as ZeRO {stage}"
            + (" and the gradients too" if stage == 1 else "")
        )
    run.notes.append(f"{because}; {chosen}")


def _offload(run: _Run, foreign: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Set the field by which the run's backend offloads."""
    if not foreign.get("cpu_offload"):
        return
    backend = run.fields.get("backend", own.get("backend"))
    if backend is None and "zero_stage" in run.fields:
        backend = _ZERO
    if backend == _ZERO:
        stage = run.fields.get("zero_stage", _DEFAULT_STAGE)
        if stage == 0:
            raise UserError(
                "ZeRO stage 0 keeps nothing of its own in host memory",
                field="cpu_offload",
                got=True,
                allowed="False with zero_stage 0",
                remedy="Set zero_stage=1 or higher",
            )
        run.fields["zero"] = {"offload_optimizer": "cpu"} | (
            {"offload_parameters": "cpu"} if stage == 3 else {}
        )
    elif backend == "fsdp":
        run.fields["fsdp"] = {**run.fields.get("fsdp", {}), "cpu_offload": True}
    else:
        run.fields["optimizer_offload"] = True


def _together(own: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given as ours and those found, nested."""
    given, ours = dict(leaves(own)), dict(leaves(found))
    for name in sorted(given.keys() & ours.keys()):
        if given[name] != ours[name]:
            raise UserError(
                f"settings of another name stand for {name}={ours[name]}",
                field=name,
                got=given[name],
                allowed=str(ours[name]),
                remedy="Leave one of them out",
            )
    return nested({**given, **ours})

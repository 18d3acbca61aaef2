"""The search space of a configuration: what the user asked for is kept, the rest of the split is chosen."""

from __future__ import annotations

from collections.abc import Callable, Collection

from distributed.config import DistributedConfig
from distributed.config.load import value_of
from distributed.errors import UserError, did_you_mean
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import DENSE
from distributed.interfaces.parallel_dims import AXES, ParallelDims
from distributed.planner.backend_choice import choose_backend
from distributed.planner.estimates.candidates import SearchSpace, distinct_backends
from distributed.planner.estimates.configuration import FREE_FIELDS
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.predictions import ModelSizes
from distributed.planner.estimates.split import SGD_WITH_MOMENTUM
from distributed.planner.estimates.split_of_plan import PREDICTED
from distributed.registry.catalog import Catalog

__all__ = ["precision_of", "space_of"]

_SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv")


def space_of(
    sizes: ModelSizes,
    config: DistributedConfig,
    asked: Collection[str],
    profile: HardwareProfile,
    num_devices: int,
    catalog: Catalog,
    codecs: Collection[str] = (),
) -> SearchSpace:
    """The space in which a plan for `config` is searched.

    Args:
        sizes: of the model and its global batch.
        config: precision, optimizer and what else decides the training are kept from it.
        asked: dotted names of the fields that a plan has to have as `config` has them.
        num_devices: number of devices, each with one rank.
        codecs: gradient codecs to try besides none. They change gradients.

    Raises:
        UserError: a field that was asked for has a value that is not predicted; no such codec.
    """
    for name, allowed in PREDICTED.items():
        decided = name in asked or name not in FREE_FIELDS
        if decided and value_of(config, name) not in allowed:
            raise UserError(
                "time and memory with this value are not predicted",
                field=name,
                got=value_of(config, name),
                allowed=", ".join(map(str, allowed)),
                remedy="Choose one of these for the plan, and measure a run with the other value",
            )
    for name in codecs:
        _check_codec(name, catalog)
    given = {name: value_of(config, name) for name in asked}
    schedule = given.get("parallel.schedule")
    codec = config.compression.codec  # it changes gradients, so that a plan keeps it
    recompute, offload = given.get("activation_checkpointing"), given.get("optimizer_offload")
    has_memory = profile.device != "cpu"
    return SearchSpace(
        sizes,
        num_devices,
        _backends(config, asked, catalog),
        precision=precision_of(config, profile.device),
        optimizer=SGD_WITH_MOMENTUM if config.optimizer == "sgd" and config.momentum else config.optimizer,
        schedules=(schedule,) if schedule else _SCHEDULES,
        checkpointing=(False, True) if recompute is None else (recompute == "full",),
        offload=(False,) if not has_memory else (False, True) if offload is None else (offload,),
        codecs=(codec,) if codec != DENSE else tuple(dict.fromkeys((DENSE, *codecs))),
        codec_specs=catalog.codecs,
        micro_batch=given["batch_size"] if isinstance(given.get("batch_size"), int) else None,
        num_micro_batches=given.get("gradient_accumulation_steps"),
        admits=_admits(given),
    )


def _check_codec(name: str, catalog: Catalog) -> None:
    if name not in catalog.codecs:
        raise UserError(
            f"no codec is called '{name}'.{did_you_mean(name, catalog.codecs)}",
            field="codecs",
            got=name,
            allowed=", ".join(catalog.codecs),
            remedy="Choose one of these, or install the plugin that registers it",
        )


def precision_of(config: DistributedConfig, device: str) -> str:
    """``fp32``, ``bf16`` or ``fp16``."""
    asked = config.mixed_precision
    if isinstance(asked, bool):
        return ("bf16" if device == "cpu" else "fp16") if asked else "fp32"
    return asked


def _backends(config: DistributedConfig, asked: Collection[str], catalog: Catalog) -> tuple[BackendSpec, ...]:
    if "backend" in asked:
        return (choose_backend(config, catalog).spec,)
    return distinct_backends(catalog.backends.values())


def _admits(given: dict[str, object]) -> Callable[[ParallelDims, int], bool]:
    axes = {axis: given.get(f"parallel.{axis}") for axis in (*AXES, "expert")}
    stage = given.get("zero_stage")

    def admits(dims: ParallelDims, zero_stage: int) -> bool:
        kept = all(size is None or dims.size(axis) == size for axis, size in axes.items())
        return kept and stage in (None, zero_stage)

    return admits

"""Answers to three common questions: how much memory, which kind of parallelism, how efficient."""

from __future__ import annotations

from dataclasses import replace

from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.block_time import ITEM_SIZES
from distributed.planner.estimates.candidates import SearchSpace, distinct_backends
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.memory_by_numbers import rank_memory
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers
from distributed.planner.estimates.search import Table, search
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.table import does_not_fit, plan_table, predictions_from
from distributed.registry.catalog import get_catalog

__all__ = [
    "choose_parallelism_strategy",
    "estimate_memory",
    "predict_memory",
    "predict_scaling_efficiency",
    "scaling_efficiency",
]

_LARGEST_SMALL_UNIT = 1e5
"""Values below are read as billions of parameters, or as gigabytes."""

_SAMPLES_PER_RANK = 4

_STRATEGIES = (
    "data_parallel",
    "sharded_data_parallel",
    "tensor_parallel",
    "model_parallel",
    "hybrid_parallel",
)


def estimate_memory(
    params_b: float | None = None, precision: str = "bf16", *, num_parameters: int | None = None
) -> float:
    """Rule of thumb for the gigabytes (1e9 bytes) of training on one device with AdamW.

    With N parameters and p bytes of a value (2 in bf16 and fp16, 4 in fp32), it is
    ``N * (p + p + 8 + 2 * p)``: weights, gradients, both moments in float32, and activations as two values a
    parameter. A run here keeps weights and gradients in float32 in any precision: `predict_memory`.

    Args:
        params_b: number of parameters, in billions below 100,000.
        precision: ``bf16``, ``fp16`` or ``fp32``.
        num_parameters: number of parameters, of any size, in place of `params_b`.

    Raises:
        UserError: a value is not positive, both or neither of the numbers is given, or the precision is
            unknown.
    """
    size = _item_size(precision)
    return _count("params_b", params_b, num_parameters) * (4 * size + 8) / 1e9


def predict_memory(
    params_b: float | None = None, precision: str = "bf16", *, num_parameters: int | None = None
) -> float:
    """Gigabytes (1e9 bytes) that training takes here on one device with AdamW.

    Weights, gradients, both moments and the temporary memory of an update on a GPU are float32, which makes
    20 bytes a parameter. To it come the workspaces of matrix products, 67 MB; of this, a fifth that the
    allocator reserves; and a gigabyte of libraries. If activations are more than an update needs, they are
    those of one sample of 2048 tokens in a transformer of common proportions.

    Args:
        params_b, precision, num_parameters: as for `estimate_memory`.

    Raises:
        UserError: as `estimate_memory`.
    """
    _item_size(precision)
    numbers = model_numbers(parameters=_count("params_b", params_b, num_parameters))
    return (
        rank_memory(numbers, Split(ParallelDims(), "serial", precision=precision), load_profile("H100")).total
        / 1e9
    )


def _item_size(precision: str) -> int:
    if precision not in ITEM_SIZES:
        raise UserError(
            "unknown precision",
            field="precision",
            got=precision,
            allowed=", ".join(ITEM_SIZES),
            remedy="Choose one of these",
        )
    return ITEM_SIZES[precision]


def _count(name: str, size: float | None, num_parameters: float | None) -> float:
    """Number of parameters, of which the caller gives one of two forms."""
    if (size is None) == (num_parameters is None):
        raise UserError(
            "it is given twice" if size is not None else "it is missing",
            field=f"{name}, num_parameters",
            got=f"{size} and {num_parameters}" if size is not None else None,
            remedy=f"Give {name}, in billions below 100,000, or num_parameters, which is taken as it is",
        )
    if size is not None:
        _check_above_zero(name, size)
        return _in_units(size)
    assert num_parameters is not None
    _check_whole("num_parameters", num_parameters, "the number of parameters")
    return num_parameters


def _check_above_zero(name: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise UserError(
            "it has to be a positive number",
            field=name,
            got=value,
            allowed="above 0",
            remedy="Give a finite number",
        )


def _check_whole(name: str, value: float, meaning: str = "the number of devices") -> None:
    _check_above_zero(name, value)
    if value != int(value):
        raise UserError(
            "it has to be a whole number",
            field=name,
            got=value,
            allowed="1, 2, 3 and so on",
            remedy=f"Give {meaning}",
        )


def _in_units(value: float) -> float:
    """`value`, which is in billions if it is small."""
    return value * 1e9 if value < _LARGEST_SMALL_UNIT else value


def _strategy(dims: ParallelDims, zero_stage: int) -> str:
    model = [axis for axis in ("tensor", "pipeline", "context") if dims.size(axis) > 1]
    if not model:
        return "sharded_data_parallel" if dims.shard > 1 or zero_stage else "data_parallel"
    if len(model) > 1 or dims.data_parallel_size > 1:
        return "hybrid_parallel"
    return {"tensor": "tensor_parallel", "pipeline": "model_parallel"}.get(model[0], "hybrid_parallel")


def choose_parallelism_strategy(
    model_size: float | None = None,
    num_gpus: int = 1,
    memory_per_gpu: float | None = None,
    hardware: str = "H100",
    *,
    num_parameters: int | None = None,
) -> list[str]:
    """Strategies with which the model fits, the fastest first.

    ``data_parallel``: a whole model on each device; ``sharded_data_parallel``: FSDP or ZeRO;
    ``tensor_parallel``: every layer divided over all devices; ``model_parallel``: a pipeline over all of
    them; ``hybrid_parallel``: several of these. Predicted for four samples of 2048 tokens a device, in bf16.

    Args:
        model_size: number of parameters, in billions below 100,000.
        num_gpus: number of devices.
        memory_per_gpu: bytes of a device, in gigabytes below 100,000; None takes that of `hardware`.
        hardware: profile with the rates of the device.
        num_parameters: number of parameters, of any size, in place of `model_size`.

    Raises:
        UserError: a value is not positive, or nothing fits, with the smallest cluster that does.
    """
    parameters = _count("model_size", model_size, num_parameters)
    _check_whole("num_gpus", num_gpus)
    num_gpus, profile = int(num_gpus), load_profile(hardware)
    if memory_per_gpu is not None:
        _check_above_zero("memory_per_gpu", memory_per_gpu)
        profile = profile.model_copy(update={"memory": _in_units(memory_per_gpu)})
    numbers = model_numbers(parameters=parameters, global_batch=_SAMPLES_PER_RANK * num_gpus)
    space = SearchSpace(numbers, num_gpus, distinct_backends(get_catalog().backends.values()))
    fastest: dict[str, float] = {}
    for strategy in _STRATEGIES:
        table = _of_strategy(space, profile, strategy)
        if table is not None and table.plans:
            fastest[strategy] = table.plans[0].time.total
    if not fastest:
        raise does_not_fit(space, predictions_from(profile), profile, Table(), "num_gpus")
    return sorted(fastest, key=lambda strategy: fastest[strategy])


def _of_strategy(space: SearchSpace, profile: HardwareProfile, strategy: str) -> Table | None:
    """The fastest plan of `strategy`; None if there is no such way to divide the ranks."""

    def admits(dims: ParallelDims, zero_stage: int) -> bool:
        return _strategy(dims, zero_stage) == strategy

    try:
        admitted = replace(space, admits=admits)
        return search(admitted, predictions_from(profile)(admitted), profile.memory, 1)
    except UserError:
        return None


def scaling_efficiency(time_1gpu: float, time_ngpu: float, num_gpus: int) -> float:
    """Speed-up over one device as a share of the number of devices, for the same work: ``T1 / TN / N``.

    Args:
        time_1gpu: seconds on one device.
        time_ngpu: seconds on `num_gpus` devices.

    Raises:
        UserError: a value is not positive.
    """
    _check_above_zero("time_1gpu", time_1gpu)
    _check_above_zero("time_ngpu", time_ngpu)
    _check_whole("num_gpus", num_gpus)
    return time_1gpu / time_ngpu / num_gpus


def predict_scaling_efficiency(
    numbers: ModelNumbers, hardware: str | HardwareProfile, num_gpus: int
) -> float:
    """Predicted `scaling_efficiency` of the fastest plan on `num_gpus` devices.

    One device is taken to have as much memory as the model needs.
    """
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    roomy = profile.model_copy(update={"memory": float("inf")})
    one = plan_table(numbers, roomy, 1, plans=1).plans[0].time.total
    many = plan_table(numbers, profile, num_gpus, plans=1).plans[0].time.total
    return scaling_efficiency(one, many, num_gpus)

"""The mesh of a run: how many ranks each axis has, so that their product is the number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.parallel_dims import AXES, DATA_AXES, MODEL_AXES, ParallelDims
from distributed.registry.catalog import Catalog

__all__ = ["check_axes", "check_exchanges", "data_parallel_size", "resolve_dims"]


def check_axes(config: DistributedConfig, spec: BackendSpec, catalog: Catalog) -> None:
    """Check that the backend can have several ranks along the axes that `config` sets.

    Raises:
        UserError: it cannot; names the backends that can.
    """
    for axis, (size, field) in _given(config, spec).items():
        if size > 1 and axis not in spec.capabilities.axes:
            able = sorted(
                s.name for s in catalog.backends.values() if axis in s.capabilities.axes and not s.inner
            )
            raise UserError(
                f"backend '{spec.label}' cannot have several ranks along the axis {axis}",
                field=field,
                got=size,
                allowed="1",
                remedy=f"Backends that can: {', '.join(able) or 'none installed'}",
            )
    _check_values(config)
    schedule = config.parallel.schedule
    if schedule is not None and schedule not in spec.capabilities.schedules:
        raise UserError(
            f"backend '{spec.label}' has no such order of a pipeline",
            field="parallel.schedule",
            got=schedule,
            allowed=", ".join(sorted(spec.capabilities.schedules)) or None,
            remedy="Leave it out",
        )


_NOT_WITH: dict[tuple[str, str], tuple[tuple[object, ...], str]] = {
    ("pipeline", "compile"): (
        ("none", "blocks"),
        "divides the model: a stage computes a part of the model's forward pass",
    ),
    ("pipeline", "matmul_precision"): (
        ("default", "tf32"),
        "divides the model: fp8 layers would take the place of blocks",
    ),
    ("pipeline", "optimizer_bits"): (
        (32,),
        "divides the model: quantized state is not exchanged between stages",
    ),
    ("tensor", "optimizer_bits"): (
        (32,),
        "cuts layers: its state is quantized in blocks of a whole parameter",
    ),
    ("tensor", "matmul_precision"): (
        ("default", "tf32"),
        "cuts layers: fp8 layers compute with a whole weight",
    ),
    ("expert", "optimizer_bits"): (
        (32,),
        "cuts layers of experts: its state is quantized in blocks of a whole parameter",
    ),
    ("expert", "matmul_precision"): (
        ("default", "tf32"),
        "cuts layers of experts: fp8 layers compute with a whole weight",
    ),
    ("expert", "compile"): (
        ("none",),
        "cuts layers of experts: the number of tokens of an expert is known only when they arrive",
    ),
    ("context", "compile"): (
        ("none",),
        "cuts sequences: compiled attention does not exchange keys and values",
    ),
}
"""(axis, field) -> values of the field with which several ranks along the axis can train, and why not with
others."""


def _check_values(config: DistributedConfig) -> None:
    for (axis, field), (allowed, why) in _NOT_WITH.items():
        value, size = getattr(config, field), getattr(config.parallel, axis)
        if size > 1 and value not in allowed:
            raise UserError(
                f"parallel.{axis}={size} {why}",
                field=field,
                got=value,
                allowed=", ".join(map(str, allowed)),
                remedy=f"Choose one of these, or parallel.{axis}=1",
            )


def resolve_dims(config: DistributedConfig, spec: BackendSpec, world_size: int) -> ParallelDims:
    """The number of ranks along each axis.

    Raises:
        UserError: the sizes do not multiply to `world_size`; names the nearest that do.
    """
    given = _given(config, spec)
    sizes = {axis: size for axis, (size, _) in given.items()}
    # One rank trains under every backend, and a backend with a scheme of its own has data as the only axis.
    rest = next(iter(spec.capabilities.axes), "data")
    for axis, size in sizes.items():
        if axis == "expert":
            continue
        others = ParallelDims(**{a: s for a, s in sizes.items() if a != axis}).world_size
        if world_size % (size * others):
            raise _does_not_divide(axis, given, others, world_size, exact=rest in sizes)
    if rest not in sizes:
        sizes[rest] = world_size // ParallelDims(**sizes).world_size
    dims = ParallelDims(**sizes)
    if dims.world_size != world_size:
        axis = next((a for a in (*DATA_AXES, *AXES) if a in given), rest)
        others = dims.world_size // dims.size(axis)
        raise _does_not_divide(axis, given, others, world_size, exact=True)
    _check_experts(dims)
    return dims


def check_exchanges(dims: ParallelDims, device: str, transport: str) -> None:
    """Check that ranks that share a model can exchange its tensors.

    Raises:
        UserError: the ranks compute on GPUs and communicate over gloo. It adds up gradients of GPUs, but has
            no messages between them, and torch's functional collectives over it end the process.
    """
    axis = next((axis for axis in (*MODEL_AXES, "expert") if dims.size(axis) > 1), None)
    if axis is not None and device != "cpu" and transport == "gloo":
        raise UserError(
            f"ranks along the axis {axis} exchange tensors in forward and backward, and gloo cannot do so"
            " between GPUs",
            field="communication_backend",
            got="gloo",
            allowed=f"nccl, where parallel.{axis} is above 1 on GPUs",
            remedy="Leave communication_backend out, with a GPU for each rank; or set device=cpu, or"
            f" parallel.{axis}=1",
        )


def data_parallel_size(config: DistributedConfig, spec: BackendSpec, dims: ParallelDims) -> int:
    """Into how many slices a global batch is cut.

    Raises:
        ValueError: the backend's own number does not divide the ranks.
    """
    if spec.data_parallel_size is None:
        return dims.data_parallel_size
    size = spec.data_parallel_size(config, dims.world_size)
    if size < 1 or dims.world_size % size:
        raise ValueError(
            f"backend '{spec.name}' cuts a global batch into {size} slices for {dims.world_size} ranks"
        )
    return size


def _given(config: DistributedConfig, spec: BackendSpec) -> dict[str, tuple[int, str]]:
    """Axis -> (size, field) of those that are set.

    Raises:
        UserError: a field of the backend's own section sets the same axis.
    """
    section = config.parallel
    found = {
        axis: (int(getattr(section, axis)), f"parallel.{axis}")
        for axis in (*AXES, "expert")
        if axis in section.model_fields_set and getattr(section, axis) is not None
    }
    for axis, (size, field) in (spec.axis_sizes(config) if spec.axis_sizes else {}).items():
        if axis in found:
            raise UserError(
                f"{field} and parallel.{axis} set the same number of ranks",
                field=f"parallel.{axis}",
                got=f"parallel.{axis}={found[axis][0]}, {field}={size}",
                remedy=f"Leave {field} out",
            )
        found[axis] = (size, field)
    return found


def _does_not_divide(
    axis: str, given: dict[str, tuple[int, str]], others: int, world_size: int, exact: bool = False
) -> UserError:
    size, field = given.get(axis, (0, f"parallel.{axis}"))
    beside = [f"{a} {s}" for a, (s, _) in given.items() if a not in (axis, "expert") and s > 1]
    room = world_size // others if world_size % others == 0 else 0
    fits = [n for n in _divisors(room) if not exact or n == room] if room else []
    what = f"{world_size} rank{'s' if world_size > 1 else ''} cannot be divided into"
    with_others = f" with {' and '.join(beside)}" if beside else ""
    ranks = ", ".join(str(n) for n in _nearest_multiples(size * others, world_size, exact))
    return UserError(
        f"{what} {axis} {size}{with_others}: the sizes of all axes multiply to the number of ranks",
        field=field,
        got=size,
        allowed=", ".join(map(str, fits)) or None,
        remedy=f"Or use {ranks} ranks",
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _nearest_multiples(unit: int, number: int, exact: bool) -> Iterable[int]:
    if exact:
        return [unit]
    low = number // unit * unit
    return [n for n in (low, low + unit) if n]


def _check_experts(dims: ParallelDims) -> None:
    if dims.data_parallel_size % dims.expert:
        raise UserError(
            f"experts lie within the {dims.data_parallel_size} data-parallel ranks, which they do not divide",
            field="parallel.expert",
            got=dims.expert,
            allowed=", ".join(map(str, _divisors(dims.data_parallel_size))),
            remedy="Choose one of these, or another parallel.data",
        )

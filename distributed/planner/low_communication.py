"""Ranks that train on their own between outer steps: whether backend, mesh and precision allow it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import DENSE
from distributed.interfaces.parallel_dims import AXES, ParallelDims
from distributed.registry.catalog import Catalog

__all__ = ["check_low_communication", "low_communication_notes", "ranks_of"]

_FIELD = "low_communication.mode"
_ASYNCHRONOUS = "async-sgd"


def check_low_communication(
    config: DistributedConfig, spec: BackendSpec, dims: ParallelDims, precision: str, catalog: Catalog
) -> None:
    """Raise a UserError if the run cannot train with the mode that `config` asks for."""
    mode = config.low_communication.mode
    if mode == "none":
        return
    if mode not in spec.capabilities.low_communication:
        able = (s for s in catalog.backends.values() if mode in s.capabilities.low_communication)
        raise UserError(
            f"backend '{spec.label}' cannot train ranks on their own",
            field=_FIELD,
            got=mode,
            allowed="none",
            remedy=f"Backends that can: {', '.join(sorted(s.name for s in able if not s.inner)) or 'none'}",
        )
    divided = [axis for axis in (*AXES, "expert") if axis != "data" and dims.size(axis) > 1]
    if divided:
        raise UserError(
            "ranks that train on their own hold the whole model each",
            field=f"parallel.{divided[0]}",
            got=dims.size(divided[0]),
            allowed="1",
            remedy="Leave the axis out, or set low_communication.mode=none",
        )
    _check_settings(config, precision)
    if mode == _ASYNCHRONOUS:
        _check_asynchronous(config)


def _check_asynchronous(config: DistributedConfig) -> None:
    if config.deterministic:
        raise UserError(
            "the order in which updates arrive is another one in each run",
            field="deterministic",
            got=True,
            allowed="false",
            remedy="Set deterministic=false, or train with low_communication.mode=local-sgd, which repeats",
        )
    if config.compression.codec != DENSE:
        raise UserError(
            "a codec adds up what all ranks send, and updates of asynchronous SGD are sent one by one",
            field="compression.codec",
            got=config.compression.codec,
            allowed=DENSE,
            remedy="Leave it out, or use low_communication.mode=diloco, whose outer steps it compresses",
        )
    if config.communication_backend == "mpi":
        raise UserError(
            "the threads of the parameter server exchange messages by gloo",
            field="communication_backend",
            got="mpi",
            allowed="auto, gloo, nccl",
            remedy="Leave it out",
        )


def _check_settings(config: DistributedConfig, precision: str) -> None:
    if config.sync_batchnorm:
        raise UserError(
            "BatchNorm over all ranks is a collective in every forward pass of ranks that train on their own",
            field="sync_batchnorm",
            got=True,
            allowed="false",
            remedy="Leave it out: each rank has its own statistics, which are averaged at outer steps",
        )
    if precision == "fp16":
        raise UserError(
            "each of the ranks that train on their own would skip other steps and have another loss scale",
            field="mixed_precision",
            got=precision,
            allowed="fp32, bf16",
            remedy="Train in bf16, which needs no loss scale",
        )
    if config.on_nan == "skip":
        raise UserError(
            "each of the ranks that train on their own would skip other steps, and have another learning rate"
            " after them",
            field="on_nan",
            got=config.on_nan,
            allowed="stop, ignore",
            remedy="Use on_nan=stop",
        )
    if config.optimizer_bits != 32:
        raise UserError(
            "quantized state is not saved for each of the ranks that train on their own",
            field="optimizer_bits",
            got=config.optimizer_bits,
            allowed="32",
            remedy="Leave it out",
        )


def ranks_of(config: DistributedConfig, spec: BackendSpec) -> BackendSpec:
    """`spec` with the class of ranks that train on their own, if `config` asks for it."""
    return replace(spec, target=spec.low_communication) if config.low_communication.is_active else spec


def _bytes(config: DistributedConfig) -> str:
    codec = config.compression.codec
    if codec != DENSE:
        return f", by the codec {codec}"
    return f": 1/{config.low_communication.period} of the bytes of data parallelism"


def _asynchronous_notes(limit: int, num_ranks: int) -> Iterator[str]:
    mode = f"low_communication.mode={_ASYNCHRONOUS}"
    yield (
        f"{mode}: {num_ranks} ranks update the parameters on rank 0 in the order of arrival, {num_ranks}"
        " times in a step, each with the mean over its own samples. The weights are other ones in each run"
    )
    if limit < num_ranks - 1:
        yield (
            f"{mode}: max_staleness={limit} lets {limit + 1} of {num_ranks} ranks compute at the same time."
            f" Use {num_ranks - 1} or more"
        )


def low_communication_notes(config: DistributedConfig, num_ranks: int) -> list[str]:
    """What a run with these settings exchanges, and what it trains."""
    section = config.low_communication
    if not section.is_active:
        return []
    mode = f"low_communication.mode={section.mode}"
    if num_ranks == 1:
        plain = section.mode in ("local-sgd", _ASYNCHRONOUS)
        own = "is plain training" if plain else "takes outer steps alone"
        return [f"{mode}: one rank exchanges nothing and {own}"]
    if section.mode == _ASYNCHRONOUS:
        return [*_asynchronous_notes(section.max_staleness or 0, num_ranks)]
    notes = [
        f"{mode}: each of {num_ranks} ranks steps on its own samples and exchanges parameters once in"
        f" {section.period} steps{_bytes(config)}. Another number of ranks trains other weights"
    ]
    if config.is_elastic and (config.elastic.min_ranks or config.elastic.min_nodes):
        notes.append(
            f"{mode}: if the run continues with fewer ranks, these begin with the outer step of all ranks"
            " that saved"
        )
    return notes

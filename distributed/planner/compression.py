"""The gradient codec of a run: which it is, and whether backend, ranks and precision allow it."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.config.compression import CompressionSection
from distributed.errors import UserError, did_you_mean
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.codec import DENSE, CodecSpec, dense_bytes
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.registry.catalog import Catalog

__all__ = ["check_codec", "choose_codec", "codec_notes"]

_TYPICAL = (1024, 1024)
"""Shape of the gradient whose bytes are stated in the first lines of a run."""


def choose_codec(config: DistributedConfig, spec: BackendSpec, catalog: Catalog) -> CodecSpec | None:
    """The codec that `config` asks for; None without.

    Raises:
        UserError: there is no such codec, it does not read an option that is set, or the backend's own
            section asks for another.
    """
    section, field = config.compression, "compression.codec"
    name, own = section.codec, spec.codec(config) if spec.codec is not None else None
    if own is not None:
        if "codec" in section.model_fields_set and name != own[0]:
            raise UserError(
                f"{own[1]} asks for the codec '{own[0]}'",
                field=field,
                got=name,
                remedy=f"Leave {own[1]} out",
            )
        name, field = own
    codec = catalog.codecs.get(name)
    if codec is None and name != DENSE:
        raise UserError(
            f"no codec is called '{name}'.{did_you_mean(name, [DENSE, *catalog.codecs])}",
            field=field,
            allowed=", ".join([DENSE, *catalog.codecs]),
            remedy="Choose one of these, or install the plugin that registers it",
        )
    _check_options(name, codec, section)
    return codec


def _check_options(name: str, codec: CodecSpec | None, section: CompressionSection) -> None:
    read = set() if codec is None else {*codec.options, "error_feedback"}
    for option in sorted(section.model_fields_set - {"codec"} - read):
        if getattr(section, option) == type(section).model_fields[option].default:
            continue
        raise UserError(
            f"the codec '{name}' does not read it",
            field=f"compression.{option}",
            got=getattr(section, option),
            allowed=", ".join(sorted(read)) or None,
            remedy="Leave it out, or choose another compression.codec",
        )


def check_codec(
    codec: CodecSpec | None,
    config: DistributedConfig,
    spec: BackendSpec,
    dims: ParallelDims,
    precision: str,
    catalog: Catalog,
) -> None:
    """Raise a UserError if the run cannot train with `codec`."""
    if codec is None:
        return
    missing = codec.exchanges - spec.capabilities.exchanges
    if missing:
        raise _not_here(codec, spec, catalog)
    if "shard" in spec.capabilities.axes and dims.shard > 1 and dims.data * dims.context == 1:
        raise UserError(
            "the ranks hold different shards of the model, and codecs send gradients between copies of it",
            field="compression.codec",
            got=codec.name,
            allowed=f"{DENSE} without copies",
            remedy="Set parallel.data to the number of copies, such as one for each host",
        )
    if precision == "fp16":
        _check_loss_scale(codec, config)


def _check_loss_scale(codec: CodecSpec, config: DistributedConfig) -> None:
    if codec.scales and not codec.feeds_back(config.compression):
        return
    kept = "keeps what it has not sent in units of a loss scale that changes"
    raise UserError(
        f"the codec '{codec.name}' {kept if codec.scales else 'cannot send values of a loss scale'}",
        field="compression.error_feedback" if codec.scales else "compression.codec",
        got=True if codec.scales else codec.name,
        allowed="fp16 and bf16 without error feedback, under mixed_precision=fp16",
        remedy="Train in bf16 or fp32, which need no loss scale",
    )


def _not_here(codec: CodecSpec, spec: BackendSpec, catalog: Catalog) -> UserError:
    backends = sorted(
        s.name
        for s in catalog.backends.values()
        if codec.exchanges <= s.capabilities.exchanges and not s.inner
    )
    codecs = [c.name for c in catalog.codecs.values() if c.exchanges <= spec.capabilities.exchanges]
    return UserError(
        f"backend '{spec.label}' cannot send gradients by the codec '{codec.name}'",
        field="compression.codec",
        got=codec.name,
        allowed=", ".join([DENSE, *codecs]),
        remedy=f"Backends that can: {', '.join(backends) or 'none installed'}",
    )


def codec_notes(codec: CodecSpec | None, config: DistributedConfig, copies: int) -> list[str]:
    """What `codec` saves.

    Args:
        copies: number of ranks among which a gradient is exchanged.
    """
    if codec is None:
        return []
    if copies == 1:
        return [f"compression.codec={codec.name} changes nothing: one rank sends no gradients"]
    own = codec.wire_bytes(_TYPICAL, 4, config.compression, copies)
    dense = dense_bytes(_TYPICAL, 4, copies)
    sends = (
        f"compression.codec={codec.name}: each of {copies} ranks sends {own / 1e6:.3g} MB of a float32"
        f" gradient of {_TYPICAL[0]} x {_TYPICAL[1]} in a step"
    )
    if own >= dense:
        return [f"{sends}; without compression {dense / 1e6:.3g} MB: it saves nothing on so many ranks"]
    return [f"{sends}, {dense / own:.3g} times less than without compression"]

"""Choose the backend of a configuration, and check that it can do what the configuration asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from distributed.config import DistributedConfig
from distributed.config.load import override, value_of
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.registry.catalog import Catalog, require

_LOW_BIT = "pip install 'distributed-trainer[lowbit]'"
_Need = tuple[str, Callable[[DistributedConfig], bool], Callable[[Capabilities], bool], str]


@dataclass(frozen=True)
class BackendChoice:
    """The backend of a run.

    Attributes:
        config: the configuration, whose ``backend`` names it.
        spec: its spec; for a backend that only starts ranks, combined with the inner one.
        notes: what the user should know, one sentence each.
    """

    config: DistributedConfig
    spec: BackendSpec
    notes: tuple[str, ...] = ()


def choose_backend(
    config: DistributedConfig, catalog: Catalog, framework: str | None = None
) -> BackendChoice:
    """Choose the backend that `config` asks for.

    Args:
        framework: that of the objects to train; None if it is not known.

    Raises:
        UserError: an unknown backend, one whose requirements are missing, or an impossible inner; or no
            backend offers the ZeRO that is asked for.
    """
    config, notes = move_to_zero(config, catalog)
    return BackendChoice(config, chosen_backend(config, catalog, framework), notes)


def move_to_zero(config: DistributedConfig, catalog: Catalog) -> tuple[DistributedConfig, tuple[str, ...]]:
    """Switch a *default* backend to the one that supports ZeRO when `config` asks for ZeRO.

    Returns:
        The configuration, and a note when it was changed.

    Raises:
        UserError: no backend offers it, or several do.
    """
    stage, here = config.zero_stage, catalog.backend(config.backend)
    if not config.wants_zero or here.capabilities.zero_stages:
        return config, ()
    if not config.origin("backend").startswith("default"):
        return config, ()
    able = sorted(s.name for s in catalog.backends.values() if _offers(s.capabilities, stage))
    if len(able) != 1:
        raise UserError(
            "several backends offer ZeRO" if able else "no backend here offers ZeRO",
            field="backend",
            got=here.name,
            allowed=", ".join(able) or None,
            remedy="Set backend to one of them" if able else f"Leave {' and '.join(config.zero_fields)} out",
        )
    *_, field = [name for name in config.zero_fields if getattr(config, name) is not None]
    asked = f"zero_stage={stage}" if field == "zero_stage" else field
    moved = override(config, {"backend": able[0]}, f"default moved by {asked}")
    return moved, (f"{asked} moves the default backend '{here.name}' to '{able[0]}'",)


def _offers(capabilities: Capabilities, stage: int | None) -> bool:
    return bool(capabilities.zero_stages) if stage is None else stage in capabilities.zero_stages


def chosen_backend(config: DistributedConfig, catalog: Catalog, framework: str | None = None) -> BackendSpec:
    """The spec of the config's backend; for one that only starts ranks, made one with its inner.

    Args:
        framework: as for `choose_backend`.

    Raises:
        UserError: an unknown backend, one whose requirements are missing, or an impossible inner.
    """
    spec = catalog.backend(config.backend)
    require(spec.requires, f"backend '{spec.name}'", spec.install_hint)
    if spec.inner is None:
        return _for_framework(spec, framework, catalog)
    inner = catalog.backend(value_of(config, spec.inner), spec.inner)
    if inner.inner is not None or inner.framework != spec.framework:
        fits = (s for s in catalog.backends.values() if s.inner is None and s.framework == spec.framework)
        raise UserError(
            f"backend '{spec.name}' cannot start the ranks of '{inner.name}', "
            + ("which starts ranks itself" if inner.inner else f"a {inner.framework} backend"),
            field=spec.inner,
            got=inner.name,
            allowed=", ".join(sorted(s.name for s in fits)),
        )
    require(inner.requires, f"backend '{inner.name}'", inner.install_hint)
    return replace(
        inner,
        name=spec.name,
        summary=spec.summary,
        requires=tuple(dict.fromkeys((*spec.requires, *inner.requires))),
        install_hint=spec.install_hint,
        launcher=spec.launcher,
        remote=spec.remote,
        cluster_address=spec.cluster_address,
        runs=inner.name,
    )


def _for_framework(spec: BackendSpec, framework: str | None, catalog: Catalog) -> BackendSpec:
    """`spec`; for another framework than its own, the backend of that framework on the ranks of `spec`, if
    there is one."""
    if framework in (None, spec.framework) or not spec.collectives:
        return spec
    able = [s for s in catalog.backends.values() if s.framework == framework and s.over_collectives]
    if len(able) != 1:
        return spec  # whose framework refuses the objects
    engine = able[0]
    require(engine.requires, f"backend '{spec.name}' with this model", engine.install_hint)
    return replace(
        engine,
        name=spec.name,
        target=engine.over_collectives,
        summary=spec.summary,
        requires=tuple(dict.fromkeys((*engine.requires, *spec.requires))),
        install_hint=spec.install_hint,
        launcher=spec.launcher,
        codec=spec.codec,
        num_replicas=None,
        collectives=spec.collectives,
        # Arrays are summed in host memory.
        transports=(spec.transports[0],) * 2,
        deploy_form=spec.deploy_form,
        blocking_modules=tuple(dict.fromkeys((*spec.blocking_modules, *engine.blocking_modules))),
        preload=(*engine.preload, spec.collectives.partition(":")[0]),
        runs=engine.name,
    )


def _multiplies_in(value: str, config: DistributedConfig) -> bool:
    return config.matmul_precision == value


def _claims(lever: str, capabilities: Capabilities) -> bool:
    return lever in capabilities.levers


_NEEDS: list[_Need] = [
    (
        "gradient_accumulation_steps",
        lambda c: (c.gradient_accumulation_steps or 1) > 1,
        lambda k: k.accumulation,
        "accumulate gradients",
    ),
    (
        "batch_size",
        lambda c: c.chooses_batch,
        lambda k: k.auto_batch,
        "choose the micro-batch by itself",
    ),
    ("gradient_clipping", lambda c: c.gradient_clipping is not None, lambda k: k.clipping, "clip gradients"),
    ("sync_batchnorm", lambda c: c.sync_batchnorm, lambda k: k.sync_batchnorm, "synchronise BatchNorm"),
    (
        "find_unused_parameters",
        lambda c: c.find_unused_parameters,
        lambda k: k.find_unused_parameters,
        "find unused parameters",
    ),
    ("zero_stage", lambda c: c.wants_zero, lambda k: bool(k.zero_stages), "shard by ZeRO stages"),
    ("checkpoint_dir", lambda c: c.checkpoint_dir is not None, lambda k: k.checkpoint, "save checkpoints"),
    (
        "activation_checkpointing",
        lambda c: c.activation_checkpointing != "none",
        lambda k: "activation_checkpointing" in k.levers,
        "recompute activations",
    ),
    (
        "optimizer_offload",
        lambda c: c.optimizer_offload,
        lambda k: "optimizer_offload" in k.levers,
        "keep the optimizer in host memory",
    ),
    (
        "optimizer_bits",
        lambda c: c.optimizer_bits != 32,
        lambda k: "optimizer_bits" in k.levers,
        "keep the optimizer in fewer bits",
    ),
    *(
        (
            "matmul_precision",
            partial(_multiplies_in, value),
            partial(_claims, value),
            f"multiply matrices in {value}",
        )
        for value in ("tf32", "fp8")
    ),
    ("compile", lambda c: c.compile != "none", lambda k: "compile" in k.levers, "compile the model"),
]


def check_capabilities(
    config: DistributedConfig,
    spec: BackendSpec,
    catalog: Catalog,
    world_size: int,
    precision: str,
    device: str,
) -> None:
    """Compare what `config` needs with what `spec` claims.

    Raises:
        UserError: an ability is missing; names the backends that have it.
    """
    ranks = "num_gpus" if config.num_processes is None else "num_processes"
    needs: list[_Need] = [
        *_NEEDS,
        (ranks, lambda c: world_size > 1, lambda k: k.multi_process, f"run {world_size} ranks"),
        ("mixed_precision", lambda c: True, lambda k: precision in k.precisions, f"train in {precision}"),
    ]
    for need in needs:
        name, wanted, able, _ = need
        if wanted(config) and not able(spec.capabilities):
            got = config.num_ranks if name == ranks else getattr(config, name)
            raise _cannot(need, spec, catalog, got)
    if config.optimizer_bits != 32:
        require(("torchao",), f"optimizer_bits={config.optimizer_bits}", _LOW_BIT)
    if config.matmul_precision == "fp8":
        require(("torchao",), "matmul_precision=fp8", _LOW_BIT)
    if config.sync_batchnorm and device == "cpu" and world_size > 1:
        raise UserError(
            "torch synchronises BatchNorm on GPUs only",
            field="sync_batchnorm",
            got=True,
            allowed="false on CPU",
        )


def check_accumulation(steps: int, spec: BackendSpec, catalog: Catalog) -> None:
    """The same for accumulation that was derived from a global batch.

    Raises:
        UserError: the backend cannot accumulate.
    """
    if steps > 1 and not spec.capabilities.accumulation:
        raise _cannot(_NEEDS[0], spec, catalog, steps)


def _cannot(need: _Need, spec: BackendSpec, catalog: Catalog, got: Any) -> UserError:
    name, _, able, what = need
    others = sorted(s.name for s in catalog.backends.values() if able(s.capabilities) and not s.inner)
    return UserError(
        f"backend '{spec.label}' cannot {what}",
        field=name,
        got=got,
        remedy=f"Backends that can: {', '.join(others) or 'none installed'}",
    )

"""ray: registers Ray Train as a starter of ranks; they run another torch backend, DDP by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.interfaces.backend_spec import EXCHANGES, BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl
from distributed_backends.ray.section import RaySection

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.callback import Callback
    from distributed.interfaces.plan import RunPlan

_LAUNCHER = "distributed_backends.ray.launcher:RayLauncher"


@hookimpl
def register_backends() -> list[BackendSpec]:
    """Ray Train. Target and capabilities stand for the default inner backend."""
    return [
        BackendSpec(
            name="ray",
            target="distributed_backends.ddp.backend:DDPBackend",
            inner="ray.inner",
            remote=True,
            cluster_address="ray.address",
            launcher=_LAUNCHER,
            search="distributed_backends.ray.tune.engine:RayTune",
            summary="Ray Train starts the ranks, here or on a cluster; they run `ray.inner`",
            requires=("torch", "ray", "pyarrow"),
            install_hint="pip install 'distributed-trainer[ray]'",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                sync_batchnorm=True,
                find_unused_parameters=True,
                gradient_buckets=True,
                checkpoint=True,
                exchanges=EXCHANGES,
            ),
            deploy_form="ray",
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """Ray's section of the configuration."""
    return {"ray": "distributed_backends.ray.section:RaySection"}


@hookimpl
def check_plan(plan: RunPlan) -> None:
    """Refuse Ray's options under a backend that does not read them.

    Raises:
        UserError: the section `ray` is set and another backend is chosen.
    """
    section = RaySection.of(plan.config)
    given = sorted(section.model_fields_set)
    if given and plan.spec.launcher != _LAUNCHER:
        raise UserError(
            f"backend '{plan.spec.name}' does not start its ranks by Ray",
            field=f"ray.{given[0]}",
            got=getattr(section, given[0]),
            remedy="Leave it out, or use backend='ray'",
        )


@hookimpl
def register_callbacks(config: DistributedConfig) -> list[Callback]:
    """The callback that reports each epoch's metrics to Ray, in a worker of Ray Train or a trial of Ray Tune.
    In a trial of ours it reports for any trainer that `train_fn` builds, with or without started ranks."""
    from distributed.operations.tuning.trial_channel import trial_report
    from distributed_backends.ray.figures_callback import reporter

    found = trial_report() or reporter(config.backend == "ray")
    return [found] if found else []

"""pytorch-ddp: registers torch's DistributedDataParallel; the class is in `backend`."""

from __future__ import annotations

from distributed.interfaces.backend_spec import (
    EXCHANGES,
    LEVERS,
    LOW_COMMUNICATION,
    SCHEDULES,
    BackendSpec,
    Capabilities,
)
from distributed.registry.hookspecs import hookimpl


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The DDP backend."""
    return [
        BackendSpec(
            name="pytorch-ddp",
            target="distributed_backends.ddp.backend:DDPBackend",
            memory="distributed.planner.estimates.replicated_layout:Buckets",
            summary="torch DistributedDataParallel: a replica per rank, gradients averaged",
            requires=("torch",),
            install_hint="pip install 'distributed-trainer[torch]'",
            objects="distributed.parallel.mesh_framework:MeshFramework",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                sync_batchnorm=True,
                find_unused_parameters=True,
                gradient_buckets=True,
                checkpoint=True,
                auto_batch=True,
                axes=("data", "pipeline", "context", "tensor", "expert"),
                schedules=SCHEDULES,
                levers=LEVERS,
                exchanges=EXCHANGES,
                threads=True,
                low_communication=LOW_COMMUNICATION,
            ),
            low_communication="distributed.training.low_communication.backend:LowCommunicationBackend",
            context_attention="distributed_kernels.attention.context:context_attention",
        )
    ]

"""serial: one process, plain PyTorch. What every other backend is measured against."""

from __future__ import annotations

from distributed.interfaces.backend_spec import LEVERS, BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The serial backend: the plain torch backend as it is."""
    return [
        BackendSpec(
            name="serial",
            target="distributed.training.torch_backend:TorchBackend",
            memory="distributed.planner.estimates.layout:Layout",
            summary="one process, no communication",
            requires=("torch",),
            install_hint="pip install 'distributed-trainer[torch]'",
            capabilities=Capabilities(
                multi_process=False,
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                sync_batchnorm=True,
                find_unused_parameters=True,
                checkpoint=True,
                auto_batch=True,
                levers=LEVERS,
            ),
        )
    ]

"""tensorflow: registers Keras models under tf.distribute; the class is in `backend`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.registry.hookspecs import hookimpl
from distributed_backends.tensorflow.section import TensorFlowSection

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.plan import RunPlan

__all__ = ["check_plan", "num_replicas", "register_backends", "register_sections"]

NAME = "tensorflow"


@hookimpl
def register_backends() -> list[BackendSpec]:
    """The TensorFlow backend for Keras models."""
    return [
        BackendSpec(
            name=NAME,
            target="distributed_backends.tensorflow.backend:TensorFlowBackend",
            framework="tensorflow",
            summary="Keras models: one process over its devices, or a process for each",
            requires=("torch", "tensorflow"),
            install_hint="pip install 'distributed-trainer[tensorflow]'",
            capabilities=Capabilities(
                precisions=frozenset({"fp32", "bf16", "fp16"}),
                find_unused_parameters=True,
                checkpoint=True,
            ),
            num_replicas=num_replicas,
            over_collectives="distributed_backends.tensorflow.array_backend:ArrayBackend",
            objects="distributed_backends.tensorflow.framework:TensorFlowObjects",
            transports=("gRPC", "nccl"),
        )
    ]


@hookimpl
def register_sections() -> dict[str, str]:
    """TensorFlow's section of the configuration."""
    return {"tensorflow": "distributed_backends.tensorflow.section:TensorFlowSection"}


def num_replicas(config: DistributedConfig, num_devices: int) -> int:
    """How many of `num_devices` one process drives: all of them, or one.

    Raises:
        UserError: one process was asked for and there are several hosts.
    """
    strategy = TensorFlowSection.of(config).strategy
    if strategy == "mirrored" and config.num_nodes > 1:
        raise UserError(
            "one process cannot drive the devices of several hosts",
            field="tensorflow.strategy",
            got="mirrored",
            allowed="auto or multi_worker on several nodes",
        )
    if strategy == "auto":
        strategy = "multi_worker" if config.num_processes or config.num_nodes > 1 else "mirrored"
    return num_devices if strategy == "mirrored" else 1


@hookimpl
def check_plan(plan: RunPlan) -> None:
    """Refuse what TensorFlow, or any other backend, would drop in silence.

    Raises:
        UserError: `tensorflow.strategy` under another backend, or under ranks of a launcher that
            one process should replace; a transport that TensorFlow does not have.
    """
    if plan.spec.framework == "tensorflow" and plan.config.init_from is not None:
        raise UserError(
            "weights alone are taken into torch models",
            field="init_from",
            got=plan.config.init_from,
            allowed="nothing for Keras models",
            remedy="Load them before the run, e.g. with model.load_weights",
        )
    strategy = TensorFlowSection.of(plan.config).strategy
    if plan.spec.name != NAME:
        if strategy != "auto":
            raise UserError(
                f"backend '{plan.spec.name}' does not read TensorFlow's options",
                field="tensorflow.strategy",
                got=strategy,
                allowed=f"auto under '{plan.spec.name}'",
                remedy=f"Leave it out, or use backend='{NAME}'",
            )
        return
    if plan.config.communication_backend in ("gloo", "mpi"):
        raise UserError(
            "TensorFlow carries gradients itself",
            field="communication_backend",
            got=plan.config.communication_backend,
            allowed="auto (nccl on GPUs, gRPC on CPUs), nccl",
        )
    if strategy == "mirrored" and plan.joined is not None and plan.joined.size > 1:
        raise UserError(
            f"{plan.joined.launcher} started {plan.joined.size} ranks, and one process was to drive all",
            field="tensorflow.strategy",
            got="mirrored",
            allowed="auto, multi_worker",
            remedy="Or start the script plainly, once, and give num_gpus",
        )

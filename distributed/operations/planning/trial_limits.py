"""Whether this machine can train a plan at all, checked before a model is built or a rank starts."""

from __future__ import annotations

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.operations.planning.default_hardware import profile_of
from distributed.operations.planning.options import PlanOptions
from distributed.operations.planning.quantities import memory_text
from distributed.system.devices import visible_gpus
from distributed.system.host_memory import host_memory

__all__ = ["check_devices", "check_host_memory"]


def check_devices(options: PlanOptions, config: DistributedConfig) -> None:
    """Check that the GPUs of a plan are here.

    Raises:
        UserError: there are fewer.
    """
    profile, _ = profile_of(options.hardware)
    if profile.device == "cpu":
        return
    devices, gpus = options.devices_of(config, profile), visible_gpus()
    may_share = gpus > 0 and config.communication_backend == "gloo"
    if devices <= gpus or may_share:
        return
    raise UserError(
        f"a plan for {devices} x {profile.name} cannot be tried with the GPUs that are visible here",
        field="--verify",
        got=gpus,
        allowed=f"{devices} or more",
        remedy="Leave it out, plan for fewer devices (--devices), or for the cores of this machine"
        " (--hardware CPU)",
    )


def check_host_memory(nbytes: float, what: str, num_processes: int = 1) -> None:
    """Check that the host has memory for a trial, which the kernel would end without a message.

    Args:
        nbytes: bytes that each process needs at least.
        what: what needs them.
        num_processes: processes that need so much, with the limits of a process each.

    Raises:
        UserError: there are fewer.
    """
    free, limit = host_memory(num_processes)
    if nbytes > free:
        each = " each" if num_processes > 1 else ""
        raise UserError(
            f"the host has too little memory to try the plan with {what}; the limit is {limit}",
            field="--verify",
            got=memory_text(nbytes) + each,
            allowed=f"at most {memory_text(free)}{each}",
            remedy="Try fewer blocks of the model (--verify-layers), or leave --verify out",
        )

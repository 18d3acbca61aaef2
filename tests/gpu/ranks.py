"""Trainers of the backends under test, and the ranks that the checks of one process share."""

from __future__ import annotations

from typing import Any

from tests.gpu.checks import Settings
from tests.gpu.product import RankPool, Trainer

__all__ = ["close_pool", "number_of_ranks", "shared_pool", "trainer"]

_TIMEOUT = 180.0
"""Seconds that a run on pooled ranks may take, the first use of a GPU included."""
_pools: list[RankPool] = []


def shared_pool() -> RankPool:
    """The ranks of this process, started when first needed."""
    if not _pools:
        _pools.append(RankPool(_TIMEOUT))
    return _pools[0]


def close_pool() -> None:
    """End the shared ranks."""
    while _pools:
        _pools.pop().close()


def number_of_ranks(setting: Settings, backend: str, transport: str) -> int:
    """``default``: as many as there are GPUs, in a dry run one. ``gloo``: two, whatever the GPUs."""
    if backend == "serial":
        return 1
    return 2 if transport == "gloo" else max(1, setting.num_gpus)


def trainer(setting: Settings, model: Any, backend: str, transport: str, **given: Any) -> Trainer:
    """A trainer on the device of `setting`; `given` are further fields.

    Args:
        setting: where to run.
        model: what to train.
        backend: its name.
        transport: ``default`` or ``gloo``, see `number_of_ranks`.
    """
    fields: dict[str, Any] = {
        "backend": backend,
        "device": setting.device,
        "num_processes": number_of_ranks(setting, backend, transport),
        "log_every_n_steps": 1,
        "tracking": {"progress": "off"},
        **extra_fields(backend, transport),
        **given,
    }
    made = Trainer(model, **fields)
    made.launcher = shared_pool()
    return made


def extra_fields(backend: str, transport: str) -> dict[str, Any]:
    """Configuration fields beyond backend, device and number of ranks."""
    fields: dict[str, Any] = {"zero_stage": 2} if backend == "deepspeed" else {}
    if transport == "gloo" and backend != "serial":
        fields["communication_backend"] = "gloo"
    return fields

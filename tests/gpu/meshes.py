"""Meshes of ranks that are threads of one process (``launch: threads``): one GPU is enough for them."""

from __future__ import annotations

import faulthandler
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.gpu.checks import Measured, Settings
from tests.gpu.mesh_cases import MESHES
from tests.gpu.product import ThreadLauncher, Trainer

__all__ = ["parity"]

_TURN = 45.0
"""Seconds that a rank may run between two collectives."""
_DUMP = 60.0
"""Seconds after which the log gets the stack of every rank."""
_STEPS = 6


def parity(setting: Settings, mesh: str) -> Iterator[Measured]:
    """AdamW with clipping, two micro-batches a step, masked tokens and a last window of 5 sequences, against
    ``serial`` on the same device.

    On one device, because models of transformers compute some of their values in float32 whatever their
    dtype, and devices round those differently: 1.05e-9 in the weights between an H200 and the CPU. Rows
    ``parity`` compare devices.
    """
    from tests.parallel.expert_models import EXPERT_ENTRIES
    from tests.parallel.models import ENTRIES, tokens

    case = MESHES[mesh]
    build = {**ENTRIES, **EXPERT_ENTRIES}[case.model].build
    model, expected, data = build(), build(), tokens(21)
    launcher = ThreadLauncher()
    fields = {"backend": case.backend, "parallel": case.parallel, "num_processes": case.ranks}
    _warm_up(setting.device)
    with _dumped_if_slow():
        ours = _trainer(model, device=setting.device, launch="threads", collective_timeout=_TURN, **fields)
        ours.launcher = launcher
        losses = ours.fit(data, max_steps=_STEPS).steps["loss"]
    wanted = (
        _trainer(expected, device=setting.device, backend="serial").fit(data, max_steps=_STEPS).steps["loss"]
    )
    far = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    moved = _distance(build(), expected.to("cpu"))
    if moved < 1e-3:
        raise RuntimeError(f"training has moved no weight by more than {moved:.1e}: nothing is compared")
    found = max(_distance(model.to("cpu"), expected.to("cpu")), far)
    yield Measured(
        found, f"{case.ranks} ranks, {_STEPS} steps; {_described(launcher.counts, setting.device)}"
    )


def _warm_up(device: str) -> None:
    """Load what the first computation on a device loads: a rank has `_TURN` seconds for its own."""
    values = torch.ones(8, 8, dtype=torch.float64, device=device, requires_grad=True)
    torch.linalg.vector_norm(values @ values).backward()


def _trainer(model: nn.Module, **given: Any) -> Trainer:
    fields = {
        "global_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": partial(torch.optim.AdamW, eps=1e-4),
        "learning_rate": 0.01,
        "gradient_clipping": 0.5,
        "log_every_n_steps": 1,
        "tracking": {"progress": "off"},
    }
    return Trainer(model, **{**fields, **given})


def _distance(model: nn.Module, other: nn.Module) -> float:
    """The largest difference between two values of the same place."""
    theirs = dict(other.named_parameters())
    return max(float((p - theirs[name]).abs().max()) for name, p in model.named_parameters())


def _described(counts: Counter[tuple[str, str]], device: str) -> str:
    """What the ranks have exchanged of the device's tensors.

    Raises:
        RuntimeError: nothing.
    """
    found = {name: number for (name, kind), number in sorted(counts.items()) if kind == device}
    if not found:
        raise RuntimeError(f"the ranks have exchanged no tensor of {device}: {dict(counts)}")
    return f"calls with {device} tensors: " + ", ".join(f"{name} {number}" for name, number in found.items())


@contextmanager
def _dumped_if_slow() -> Iterator[None]:
    """Write the stacks of all threads to the log if the block takes long: they show where ranks wait."""
    faulthandler.dump_traceback_later(_DUMP)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

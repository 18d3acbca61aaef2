"""Where the memory of a tried plan is not measured, the true reason is printed."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.commands import plan as command
from distributed.operations.planning import host_peak
from distributed.operations.planning.verification import Verification
from distributed.planning import plan, verify

FIELDS: dict[str, Any] = {
    "backend": "pytorch-ddp",
    "num_processes": 1,
    "global_batch_size": 4,
    "device": "cpu",
}


class Unsendable:
    """Can be copied, and not be pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Unsendable:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("it holds a device")


class Loss(nn.Module):
    def __init__(self, held: Any = None) -> None:
        super().__init__()
        self.held = held

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


def verified(
    capsys: pytest.CaptureFixture[str], loss: nn.Module, backend: str = "pytorch-ddp"
) -> tuple[Verification, str]:
    """What a trial found, and what the command prints of it."""
    data = torch.randn(64, 8), torch.randn(64, 1)
    given = {**FIELDS, "backend": backend}
    fields = {**given, "tracking": {"progress": "off"}}
    trainer = Trainer(nn.Linear(8, 1), loss_fn=loss, **fields)
    plans = plan(nn.Linear(8, 1), data, loss_fn=loss, hardware="CPU", num_devices=1, **given)
    found = verify(plans, trainer, data, steps=3)
    capsys.readouterr()
    words = Namespace(number="1", steps="3", verify_layers=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distributed.planning.verify", lambda *_: found)
        command._verify(command._Examined(plans, trainer, data), words)
    return found, capsys.readouterr().out


@pytest.mark.starts_processes
def test_a_task_that_cannot_be_sent_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found, out = verified(capsys, Loss(Unsendable()))
    assert (found.peak, found.hidden) == (None, False)
    assert "note: memory was not measured: the ranks that measure it do not start" in out
    assert "TypeError: it holds a device" in out
    assert "less than a rank needs" not in out


def test_counters_that_count_nothing_are_not_taken_for_a_hidden_peak(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with an allocator that was loaded before that of the C library."""
    assert host_peak.can_measure()
    monkeypatch.setattr(host_peak, "_allocated_bytes", lambda: 0)
    assert not host_peak.can_measure()
    found, out = verified(capsys, Loss())
    assert (found.peak, found.hidden) == (None, False)
    assert "does not count what it has mapped, as glibc's does (check LD_PRELOAD)" in out
    assert "less than a rank needs" not in out


FREE_HEAP = """
import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.memset.restype = ctypes.c_void_p
assert libc.mallopt(-3, 32 << 20) and libc.mallopt(-1, 1 << 30)  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
blocks = [libc.malloc(ctypes.c_size_t(16 << 20)) for _ in range(12)]
for block in blocks:
    libc.free(ctypes.c_void_p(block))
from distributed.operations.planning import host_peak
before = host_peak.live_bytes()
block = host_peak._allocate(host_peak._PROBED)
assert host_peak.live_bytes() == before, "the heap has no room for the block"
libc.free(block)
assert host_peak.can_measure()
"""
"""A process whose heap holds more free bytes than the probe allocates, as after an earlier run."""


@pytest.mark.starts_processes
def test_a_heap_with_free_room_is_measured() -> None:
    """Such a heap serves the block without a mapping; ranks start with heaps of their own."""
    ended = subprocess.run([sys.executable, "-c", FREE_HEAP], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def test_a_run_in_this_process_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    found, out = verified(capsys, Loss(), backend="serial")
    assert (found.peak, found.hidden) == (None, False)
    assert "trains in the caller's process" in out

"""The predicted peak of a rank is that of real runs, which glibc measures."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.collect_facts import collect_facts
from distributed.operations.planning.host_peak import peak_of
from distributed.planner.estimates.device_memory import HOST
from distributed.planner.estimates.memory import offloaded_memory, predict_memory
from distributed.planner.estimates.split import Split
from distributed.planning import plan, verify
from tests.support.commands import run
from tests.support.predicted_memory import (
    CODECS,
    CP,
    FSDP,
    FULL,
    INTERLEAVED,
    ONE_F_ONE_B,
    SERIAL,
    TP,
    ZBV,
    ZERO,
    ZERO_BUBBLE,
    compare,
)

pytest.importorskip("transformers")
pytest.importorskip("deepspeed")

WITHIN = 0.01

# A part of all runs, because each starts ranks: `python -m tests.benchmarks.predicted_memory` measures all.
RUNS: dict[str, list[dict[str, Any]]] = {
    "qwen2": [TP, CP, ZERO | {"zero_stage": 3}, CODECS[1], SERIAL],
    "phi": [FSDP | FULL, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, ZBV],
}


@pytest.mark.starts_processes
@pytest.mark.parametrize("name", RUNS)
def test_predictions_are_within_one_percent(name: str) -> None:
    found = compare(name, RUNS[name])
    assert [row for row in found if abs(row[2] / row[1] - 1) > WITHIN] == []


@pytest.mark.starts_processes
def test_the_measurement_counts_what_is_live() -> None:
    """Two tensors of 64 and 128 MiB at once, after one of 160 MiB: 192 MiB, and a page for each."""
    program = """
import torch
from distributed.operations.planning.host_peak import count_mappings, live_bytes, max_bytes
count_mappings()
before, most = live_bytes(), max_bytes()
assert most - before < 2**26, "the process had more before"
alone = torch.empty(5 * 2**23)
del alone
both = torch.empty(2**24), torch.empty(2**25)
print(live_bytes() - before, max_bytes() - before)
"""
    done = run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [str(3 * 2**26 + 2 * 4096)] * 2


@pytest.mark.starts_processes
def test_an_offloaded_optimizer_needs_what_is_predicted_of_device_and_host() -> None:
    """On a CPU, both are the same memory. The device has weights and their gradients during the update."""
    program = """
import torch
from torch import nn
from distributed.operations.planning.host_peak import count_mappings, live_bytes, max_bytes
from distributed.training.host_optimizer import HostStep
count_mappings()
torch.set_num_threads(1)
before = live_bytes()
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
optimizer = torch.optim.AdamW(model.parameters())
lever = HostStep(optimizer)
for _ in range(3):
    model(torch.zeros(1, 1024)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(max_bytes() - before)
"""
    done = run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
    batch = torch.zeros(2, 1024), torch.zeros(2, 1024)
    facts = collect_facts(model, batch, loss_fn=nn.MSELoss())
    split = Split(ParallelDims(), "serial", offload=True)
    device, host = predict_memory(facts, split, HOST), offloaded_memory(facts, split)
    weights = 4 * facts.num_parameters
    assert device.optimizer == 0
    assert device.parameters == weights
    assert 2 * weights + host.total == pytest.approx(int(done.stdout), rel=WITHIN)
    assert predict_memory(facts, replace(split, offload=False), HOST).optimizer == host.optimizer


def large() -> nn.Module:
    """Weights of 4 MiB each, beside which what a process has of its own is small."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(3)), nn.Linear(1024, 2)
    )


@pytest.mark.starts_processes
def test_a_trial_on_cpu_measures_its_peak() -> None:
    """Within the error of predictions; the run whose steps are timed allocates as any other."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 1024), torch.randint(0, 2, (64,)))
    # What the fork server of the tests has had in its memory would count as theirs.
    fields: dict[str, Any] = {"global_batch_size": 16, "device": "cpu", "launch_start": "fresh"}
    trainer = Trainer(large(), fields)
    plans = plan(
        trainer.model, data, fields, hardware="CPU", num_devices=2, axes=["data"], backend="pytorch-ddp"
    )
    found = verify(plans, trainer, data, steps=3)
    step, memory = found.comparisons
    assert memory.measured == found.peak
    assert memory.error is not None
    assert abs(memory.error) < WITHIN
    assert step.measured is not None


_kept: list[Tensor] = []


class KeepsBuffer(nn.Linear):
    """Keeps 1 GiB from the first step on. Libraries keep workspaces, whose size depends on the processor."""

    def forward(self, x: Tensor) -> Tensor:
        if not _kept and not torch._subclasses.fake_tensor.is_fake(x):
            _kept.append(torch.empty(1 << 30, dtype=torch.uint8))
        return super().forward(x)


@pytest.mark.starts_processes
@pytest.mark.parametrize("layer", [nn.Linear, KeepsBuffer], ids=["keeps nothing", "keeps a buffer"])
def test_what_a_library_keeps_does_not_decide_whether_a_peak_is_hidden(layer: type[nn.Linear]) -> None:
    """A few KiB are less than a rank needs to start, on every processor."""
    data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
    fields: dict[str, Any] = {"global_batch_size": 8, "device": "cpu"}
    trainer = Trainer(layer(16, 4), fields)
    plans = plan(
        trainer.model, data, fields, hardware="CPU", num_devices=2, axes=["data"], backend="pytorch-ddp"
    )
    found = verify(plans, trainer, data, steps=3)
    assert (found.hidden, found.peak, found.unmeasured) == (True, None, "")


def test_a_peak_that_a_rank_did_not_see_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_text("7")
    assert peak_of(tmp_path, 1) == 7
    assert peak_of(tmp_path, 2) is None

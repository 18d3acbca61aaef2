"""Names that hand-written loops have for communication, with the meaning that the docs give them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import distributed
from distributed import CustomCommunication, OverlappedTrainer, UserError
from distributed.communication import custom_communication
from distributed.testing.suite import EXACT

SCRIPT = Path(__file__).parent / "names_script.py"
ROOT = Path(__file__).parents[2]


@pytest.mark.starts_processes
def test_each_name_does_on_two_ranks_what_the_docs_say(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, str(SCRIPT), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)
    assert run.returncode == 0, run.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    # allreduce_example, allgather_example, broadcast_example: rank r has [r, r + 1, r + 2].
    assert first["allreduce"] == second["allreduce"] == [1, 3, 5]
    assert first["allgather"] == second["allgather"] == [[0, 1, 2], [1, 2, 3]]
    assert first["broadcast"] == second["broadcast"] == [0, 1, 2]
    assert first["ring"] == second["ring"] == [1, 3, 5]
    # Both ranks have taken the step of one process on the batch of both.
    assert first["weights"] == second["weights"]
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 24
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 2)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = torch.tensor(first["weights"], dtype=torch.float64)
    assert float((found - model.weight).detach().abs().max()) < EXACT
    means = [(a + b) / 2 for a, b in zip(first["losses"], second["losses"], strict=True)]
    assert means == pytest.approx(losses, abs=EXACT)
    # profile_communication and profile_communication_overhead: rank 0 has the rows and prints them.
    assert first["sizes"] == [[1024, 4096], [2048]]
    assert second["sizes"] == [[], []]
    assert run.stdout.count("2 ranks on 1 host, gloo between CPUs") == 3
    # `bench comm` on the ranks of torchrun: rank 0 prints its table.
    rows = [line.split()[:3] for line in run.stdout.splitlines() if line.startswith((" all-", " broad"))]
    assert rows == [["all-reduce", "library", "1K"], ["broadcast", "library", "1K"]]


def test_names_without_ranks_are_errors_that_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"is not initialized on this rank\. Call setup_distributed\(\) first"
    ):
        CustomCommunication(2, 0)
    for name in ("profile_communication", "profile_communication_overhead"):
        with pytest.raises(UserError, match="no launcher has started this process"):
            getattr(distributed, name)()
        with pytest.raises(UserError, match="bench comm"):
            distributed.Trainer(nn.Linear(1, 1), **{name: True})
    with pytest.raises(UserError, match=r"operations that exist\. Got .*allreduce"):
        distributed.profile_communication(operations=["allreduce"])
    group = custom_communication.dist
    for name, value in (("is_initialized", True), ("get_world_size", 4), ("get_rank", 1)):
        monkeypatch.setattr(group, name, lambda value=value: value)
    assert CustomCommunication(4, 1).rank == 1
    with pytest.raises(UserError, match=r"world_size: the process group has another.*Got 2\. Allowed: 4"):
        CustomCommunication(2, 1)
    with pytest.raises(UserError, match=r"rank: the process group has another rank\. Got 0\. Allowed: 1"):
        CustomCommunication(4, 0)
    monkeypatch.undo()
    trainer = OverlappedTrainer(nn.Linear(1, 1), torch.optim.SGD, 2)
    assert (trainer.config.backend, trainer.config.num_gpus) == ("pytorch-ddp", 2)

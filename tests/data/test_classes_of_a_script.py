"""Classes that a script defines, in batches and errors that pass from a DataLoader's worker to its rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.commands import run

SCRIPT = """
from dataclasses import dataclass
import torch
from torch import nn
from torch.utils.data import DataLoader
from distributed import Trainer

X = torch.randn(16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

@dataclass
class Batch:
    x: torch.Tensor

class Missing(Exception):
    def __init__(self, index, place):
        super().__init__(f"no sample {index} in {place}")

def collate(samples):
    return Batch(torch.stack(samples))

def failing(samples):
    raise Missing(3, "here")

def loss(model, batch):
    return model(batch.x).square().mean()

def trained(ranks, function):
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    trainer = Trainer(model, num_processes=ranks, training_step=loss, global_batch_size=8, device="cpu",
                      optimizer="sgd", learning_rate=0.1, tracking={"progress": "off"})
    trainer.fit(DataLoader(list(X), 8, num_workers=1, collate_fn=function))
    return model.weight.detach()

if __name__ == "__main__":
    print((trained(2, collate) - trained(1, collate)).abs().max().item() < 1e-12)
    trained(2, failing)
"""


@pytest.mark.starts_processes
def test_a_batch_and_an_error_of_the_scripts_classes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run([sys.executable, str(script)], capture_output=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "True" in done.stdout
    assert "no sample 3 in here" in done.stderr

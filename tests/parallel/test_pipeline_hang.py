"""A rank of a pipeline that does not send is named, with what the other waits for."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

from distributed import WorkerError
from tests.support.training import make_trainer


class Hangs(nn.Module):
    """Hangs in its fifth forward pass of training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 5:
            threading.Event().wait()
        found: Tensor = self.layer(x)
        return found


@pytest.mark.starts_processes
def test_a_hang_names_the_rank_that_did_not_send_and_its_action() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), Hangs(), nn.Linear(8, 2))
    trainer = make_trainer(
        model,
        2,
        batch_size=4,
        hang_timeout=6.0,
        stall_report=None,
        parallel={"pipeline": 2, "schedule": "gpipe", "num_microbatches": 2, "stages": ("0", "2")},
    )
    with pytest.raises(WorkerError) as caught:
        trainer.fit((torch.ones(64, 4), torch.zeros(64, dtype=torch.long)), epochs=1)
    text = str(caught.value)
    # Two micro-batches a step: the fifth is the first of step 3.
    assert "rank 1" in text.splitlines()[0].lower()
    assert "forward of step 3 (epoch 0), computing micro-batch 0 in stage 1" in text
    assert "Rank 0 is waiting for rank 1 in forward of step 3" in text
    assert "sending the activation of micro-batch 1 to rank 1 (stage 1)" in text

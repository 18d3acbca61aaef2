"""Trains 240 samples on hosts of a test: `Tally` has a weight per sample, so that it shows which were used.

The working folder is shared by the hosts. ``MARK=STEP`` leaves the file ``step_STEP`` there when rank 0 has
done it, and from then on each step takes ``PACE`` seconds. With ``WATCHER`` it waits there until the hosts
watch each other.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from distributed import Callback, Trainer
from distributed.interfaces.callback import Context

SAMPLES, BATCH, EPOCHS = 240, 12, 2


class Tally(nn.Module):
    """SGD moves a sample's weight by 1 / BATCH whenever it is used; some weights all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(SAMPLES, dtype=torch.float64))
        self.shared = nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.seen[index] + torch.sin(index[:, None] / SAMPLES * self.shared).mean(1)


class Mark(Callback):
    all_ranks = True

    def on_step_end(self, context: Context) -> None:
        at, pace = int(os.environ.get("MARK", "0")), float(os.environ.get("PACE", "0"))
        slow = os.environ.get("SLOW_HOST") == context.world.host
        if context.progress.step == at and context.world.rank == 0:
            # The watcher is a process of its own and tells nobody; the test that waits is bounded.
            while "WATCHER" in os.environ and not watched():
                time.sleep(0.05)
            Path(f"step_{at}").touch()
        if at and (context.progress.step >= at or slow) and (slow or "SLOW_HOST" not in os.environ):
            time.sleep(pace)


def watched() -> bool:
    """Whether the watcher beside this rank hears the other host: one that dies before is missed by nobody."""
    own = {address.address for found in psutil.net_if_addrs().values() for address in found}
    return any(
        line.status == psutil.CONN_ESTABLISHED and line.raddr.ip not in own
        for process in psutil.Process().children(recursive=True)
        for line in process.net_connections("tcp4")
    )


def tally_step(model: nn.Module, batch: list[Tensor]) -> Tensor:
    if os.environ.get("SLOW_HOST") == os.uname().nodename:
        time.sleep(float(os.environ["PACE"]))
    loss: Tensor = model(batch[0]).mean()
    return loss


def main() -> None:
    model, index = Tally(), torch.arange(SAMPLES)
    trainer = Trainer(
        model,
        training_step=tally_step,
        callbacks=[Mark()],
        global_batch_size=BATCH,
        batch_size=3,
        epochs=EPOCHS,
        optimizer=torch.optim.SGD,
        learning_rate=1.0,
        deterministic=True,
        device="cpu",
        checkpoint_dir="saved",
        checkpoint={"every_n_steps": 4},
        log_every_n_steps=5,
    )
    history = trainer.fit(torch.utils.data.TensorDataset(index))
    if int(os.environ.get("RANK", "0")) == 0:
        host = os.uname().nodename
        torch.save(model.state_dict(), f"weights_{host}.pt")
        Path(f"history_{host}.json").write_text(json.dumps(history.to_dict()))


if __name__ == "__main__":
    main()

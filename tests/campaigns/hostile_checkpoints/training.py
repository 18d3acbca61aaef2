"""A small training with everything that a checkpoint holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distributed import Callback, DistributedConfig
from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import export_replicated, import_replicated
from distributed.interfaces.history import History
from distributed.interfaces.state import BackendState
from distributed.interfaces.task import Progress
from distributed.training.callback_runner import CallbackRunner
from distributed.training.resuming import Resumer
from distributed.training.saving import Saver
from distributed.training.schedule import Schedule
from distributed.training.state import TrainState
from tests.campaigns.thread_ranks import Meeting, ThreadRank, on_ranks

__all__ = ["Trained", "resume"]


class Counting(Callback):
    """A callback with a state."""

    all_ranks = True

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Trained:
    """Model, optimizer and everything else that a checkpoint of `step` holds."""

    def __init__(self, step: int, config: DistributedConfig | None = None) -> None:
        generator = torch.Generator().manual_seed(step)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1 / max(step, 1))
        schedule = Schedule()
        schedule.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for _ in range(step):
            self.optimizer.step()
            schedule.after_step(step + 1)
        self.callback = Counting()
        self.callback.state = {"seen": step, "best": torch.ones(3), 7: (1, {2})} if step else {}
        callbacks = CallbackRunner(None, [], None)  # type: ignore[arg-type]
        callbacks.active = [self.callback]
        progress = Progress(0, 4 * step, step, 4 * step, 0.5, None)
        self.state = TrainState(progress, schedule, callbacks, None)
        self.state.lineage = "ab" * 16
        self.state.open_epoch.steps = [(1.5, 4, 0.1)] * step

    def save(self, directory: str, size: int) -> None:
        """Save from `size` ranks."""
        saved = self.state.capture()
        extra = {
            **saved.common,
            "config": {"backend": "serial"},
            "best": False,
            "omitted": {},
            "model_files": {},
        }

        def work(rank: int, meeting: Meeting) -> str:
            store = PortableCheckpointer(directory, keep_last=None)
            ranks = _Exporting(rank, meeting, self, size)
            path = store.save(ranks, extra, saved.rank)  # type: ignore[arg-type]
            if rank == 0:
                store.mark_best(path)
            return path

        outcomes = on_ranks(size, work)
        if not all(isinstance(outcome, str) for outcome in outcomes):
            raise RuntimeError(f"not saved: {outcomes}")


class _Exporting(ThreadRank):
    def __init__(self, rank: int, meeting: Meeting, trained: Trained, size: int) -> None:
        super().__init__(rank, meeting)
        self.trained, self.size = trained, size

    def export_state(self) -> BackendState:
        return export_replicated(
            self.trained.model, self.trained.optimizer, {"scale": 8.0}, self.world.rank, self.size
        )


class _Importing(ThreadRank):
    """One rank that loads."""

    def __init__(self, trained: Trained) -> None:
        super().__init__(0, Meeting(1))
        self.trained, self.module = trained, trained.model

    def import_state(self, reader: PortableReader) -> None:
        import_replicated(reader, self.trained.model, self.trained.optimizer)


def resume(home: str) -> tuple[str | None, Trained]:
    """Resume from `home` as a run does: the path of the checkpoint that it took, and what was restored."""
    trained, history = Trained(0), History(backend="serial", world_size=1, batch={})
    config = DistributedConfig(checkpoint_dir=home, resume_from_checkpoint=True, device="cpu")
    saver = Saver(config, _Importing(trained), trained.state, history)  # type: ignore[arg-type]
    saver.checkpointer = PortableCheckpointer(home, keep_last=None)
    taken = str(history.checkpoint) if Resumer(saver).resume() else None
    return taken, trained

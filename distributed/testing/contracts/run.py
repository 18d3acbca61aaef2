"""Contracts of a run: data order (C3), cursor (C4), evaluation (C5), schedules (C7), decisions (C8)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.reference_problem import problem
from distributed.testing.suite import EXACT, Run, Suite

__all__ = ["RunContracts"]


class StopOn(Callback):
    """Request a stop on one rank only."""

    all_ranks = True

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, context: Context) -> None:
        """Request the stop, on that rank."""
        if context.world.rank == self.rank and context.progress.step == self.step:
            context.request_stop(f"rank {self.rank} has seen enough")


class RunContracts(Suite):
    """Whole runs, continued, evaluated, scheduled and stopped."""

    # -- C3, C4 ------------------------------------------------------------------------

    def test_c3_every_sample_is_used_once_an_epoch(self) -> None:
        """One weight per sample: after an epoch of SGD each has moved by exactly 1 / batch."""
        for length in (7, 12):
            for ranks in self.sizes:
                model = self.bench.memory_model(length)
                trainer = self.trainer(
                    model,
                    ranks,
                    batch_size=2,
                    optimizer=self.bench.optimizer("sgd"),
                    learning_rate=1.0,
                    **self.bench.memory_task(),
                )
                trainer.fit(self.bench.data(torch.arange(length)), epochs=1)
                batch = 2 * self.slices(ranks)
                sizes = [min(batch, length - start) for start in range(0, length, batch)]
                expected = sorted(-1.0 / size for size in sizes for _ in range(size))
                (cells,) = self.bench.weights(model)
                assert sorted(cells.tolist()) == pytest.approx(expected, abs=EXACT)

    def test_c3_the_seed_decides_the_order(self) -> None:
        """Another seed is another order, and again the same on any number of ranks. With a lossy codec the
        weights stay as they are, so that the losses depend on the samples alone."""
        rate = 1e-30 if self.lossy else 0.3
        for ranks in self.sizes:
            found = self.compare(ranks, problem(25), Run(steps=10, seed=7, rate=rate))
            assert found.distance < EXACT
            assert found.history.steps["loss"] == pytest.approx(found.oracle.losses, abs=EXACT)

    def test_c4_a_second_fit_continues_at_the_exact_sample(self) -> None:
        """Six steps, which end within an epoch on one to four ranks, and then fourteen are the same as
        twenty: optimizer, schedule, cursor."""
        data = self.bench.data(*problem(25))
        run = Run(optimizer="momentum", rate=0.1, given={"warmup_steps": 9})
        for ranks in self.sizes:
            whole, _ = self.train(ranks, problem(25), run)
            parts = self.bench.model(torch.float64)
            trainer = self.trainer(
                parts,
                ranks,
                batch_size=2,
                optimizer=self.bench.optimizer("momentum"),
                learning_rate=0.1,
                warmup_steps=9,
            )
            trainer.fit(data, max_steps=6)
            trainer.fit(data, max_steps=14)
            assert self.distance(whole, parts) < EXACT

    # -- C5 ----------------------------------------------------------------------------

    def test_c5_every_validation_sample_counts_once(self) -> None:
        """For every one of `lengths` the reduced sums are those of the whole set, also where they
        are beyond what float32 can count; and for batches of which one rank alone has the last."""
        data = self.bench.data(*problem(4))
        for ranks in self.sizes:
            model = self.bench.model(torch.float64)
            trainer = self.trainer(model, ranks, batch_size=2, **self.bench.validation_task())
            first = 2**24 + 1
            for length in self.lengths:
                x, _ = problem(length)
                history = trainer.fit(data, self.bench.data(x, first + torch.arange(length)), epochs=1)
                assert history.epochs[-1]["val_id"] == first + (length - 1) / 2
            length = 2 * ranks + 1
            samples = TensorDataset(problem(length)[0], first + torch.arange(length))
            ready = DataLoader(samples, batch_sampler=torch.arange(length).split(2))
            history = trainer.fit(data, ready, epochs=1)
            assert history.epochs[-1]["val_id"] == first + (length - 1) / 2

    # -- C7 ----------------------------------------------------------------------------

    def test_c7_schedules_count_optimizer_steps(self) -> None:
        """Warm-up and cosine go by optimizer steps, whatever ranks and accumulation."""
        falling = [0.05 * (1 + torch.cos(torch.tensor(torch.pi * k / 6)).item()) for k in range(6)]
        for ranks in self.sizes:
            for accumulation in (1, 2) if self.capabilities.accumulation else (1,):
                trainer = self.trainer(
                    self.bench.model(torch.float64),
                    ranks,
                    global_batch_size=12,
                    learning_rate=0.1,
                    gradient_accumulation_steps=accumulation,
                    scheduler="cosine",
                    warmup_steps=2,
                )
                history = trainer.fit(self.bench.data(*problem(48)), epochs=2)
                expected = [0.05, 0.1, *falling]
                assert history.steps["learning_rate"] == pytest.approx(expected, abs=1e-7)

    def test_c7_a_users_scheduler_steps_once_an_epoch(self) -> None:
        """A scheduler object follows epochs, as in a plain torch loop, by default."""
        for ranks in self.sizes:
            trainer = self.trainer(
                self.bench.model(torch.float64),
                ranks,
                global_batch_size=6,
                learning_rate=0.1,
                optimizer=self.bench.optimizer("sgd"),
                scheduler=self.bench.halving_schedule(),
            )
            history = trainer.fit(self.bench.data(*problem(12)), epochs=3)
            assert history.steps["learning_rate"] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])

    # -- C8 ----------------------------------------------------------------------------

    def test_c8_one_ranks_wish_to_stop_stops_all(self, tmp_path: Path) -> None:
        """Only the last rank requests a stop; all stop after the same step and no rank hangs. A run that is
        resumed there stays stopped."""
        data, reason = self.bench.data(*problem(60)), "rank {} has seen enough"
        for ranks in self.sizes:
            given = {"checkpoint_dir": tmp_path / str(ranks)} if self.capabilities.checkpoint else {}
            models = [self.bench.model(torch.float64) for _ in range(2)]
            trainer = self.trainer(models[0], ranks, batch_size=2, log_every_n_steps=2, **given)
            trainer.callbacks = [StopOn(rank=ranks - 1, step=3)]
            history = trainer.fit(data, epochs=5)
            assert history.stop_reason == reason.format(ranks - 1)
            assert len(history.steps["loss"]) == 4
            if given:
                resumed = self.trainer(models[1], ranks, batch_size=2, resume_from_checkpoint=True, **given)
                history = resumed.fit(data, epochs=5)
                assert history.stop_reason == reason.format(ranks - 1)
                assert history.steps["loss"] == []
                assert self.distance(*models) == 0.0

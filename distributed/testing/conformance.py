"""BackendConformance: subclass it, name a backend, and every contract is a test.

::

    from distributed.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"

Needs the fixture `rank_pool`, which comes with the package's pytest plugin.
"""

from __future__ import annotations

import pytest
import torch

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.testing.problem import distance, masked_mean, problem, small_model, weighted_mean
from distributed.testing.suite import EXACT, Run, Suite

__all__ = ["BackendConformance", "distance", "problem", "small_model"]


class StopOn(Callback):
    """Asks for a stop on one rank alone."""

    all_ranks = True

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, context: Context) -> None:
        """Ask once, from the one rank."""
        if context.world.rank == self.rank and context.progress.step == self.step:
            context.request_stop(f"rank {self.rank} has seen enough")


class BackendConformance(Suite):
    """The contracts C1 to C8 as tests of `backend`; see `Suite` for what a subclass may set."""

    # -- C1 ----------------------------------------------------------------------------

    def test_c1_global_batch_is_kept_on_any_number_of_ranks(self) -> None:
        """The same global batch from one, two or three ranks is the same training."""
        data = problem(60)
        reference, _ = self.train_oracle(12, data, Run(steps=10))
        for ranks in self.sizes:
            model = self.bench.model(torch.float64)
            trainer = self.trainer(
                model,
                ranks,
                batch_size=2,
                global_batch_size=12,
                learning_rate=0.3,
                optimizer=self.bench.optimizer("sgd"),
            )
            history = trainer.fit(self.bench.data(*data), epochs=2)
            assert history.batch["global_batch_size"] == 12
            assert len(history.steps["loss"]) == 10
            assert self.distance(model, reference) < EXACT

    # -- C2, C3 ------------------------------------------------------------------------

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    @pytest.mark.parametrize("length", [24, 13, 25, 1])
    def test_c2_c3_parity_with_the_oracle(self, accumulation: int, length: int) -> None:
        """Parameters and losses equal the single process's, also where nothing divides: 13 and
        25 samples leave last batches smaller than the number of ranks, 1 sample is all."""
        if accumulation > 1 and not self.capabilities.accumulation:
            pytest.skip("does not claim accumulation")
        for ranks in self.sizes:
            found = self.compare(ranks, problem(length), Run(accumulation))
            assert found.distance < EXACT, f"{ranks} ranks: parameters {found.distance:.1e} from the oracle"
            assert found.history.steps["loss"] == pytest.approx(found.oracle.losses, abs=EXACT)

    @pytest.mark.parametrize(("kind", "limit"), [("sgd", 1e-6), ("adamw", 1e-5)])
    def test_c2_parity_in_float32(self, kind: str, limit: float) -> None:
        """float32 stays within what rounding explains (AdamW with eps=1e-4)."""
        for ranks in self.sizes:
            run = Run(dtype=torch.float32, optimizer=kind, rate=0.05)
            found = self.compare(ranks, problem(25, torch.float32), run)
            assert found.distance < limit, f"{ranks} ranks: {found.distance:.1e}"

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_c2_masked_tokens_weigh_alike(self, accumulation: int) -> None:
        """With ignore_index the mean is over unmasked tokens, however unevenly ranks hold them."""
        x, y = problem(26)
        y = torch.where(torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6, -100, y)
        # 3 a rank: counts over it are not exact in float32, where a careless product would land.
        run = Run(accumulation, batch_size=3, max_norm=0.5)
        for ranks in self.sizes:
            assert self.compare(ranks, (x, y), run, loss_fn=masked_mean).distance < EXACT

    def test_c2_a_loss_may_say_its_own_count(self) -> None:
        """A loss that returns (sum, count) is divided by the count of the whole global batch."""
        run = Run(batch_size=3, given={"loss_fn": self.bench.weighted_loss()})
        for ranks in self.sizes:
            assert self.compare(ranks, problem(13), run, loss_fn=weighted_mean).distance < EXACT

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
                    training_step=self.bench.memory_step(),
                )
                trainer.fit(self.bench.data(torch.arange(length)), epochs=1)
                batch = 2 * self.slices(ranks)
                sizes = [min(batch, length - start) for start in range(0, length, batch)]
                expected = sorted(-1.0 / size for size in sizes for _ in range(size))
                (cells,) = self.bench.weights(model)
                assert sorted(cells.tolist()) == pytest.approx(expected, abs=EXACT)

    def test_c4_a_second_fit_continues_at_the_exact_sample(self) -> None:
        """Seven steps and then thirteen are the same as twenty: optimizer, schedule, cursor."""
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
            trainer.fit(data, max_steps=7)
            trainer.fit(data, max_steps=13)
            assert self.distance(whole, parts) < EXACT

    # -- C5 ----------------------------------------------------------------------------

    def test_c5_every_validation_sample_counts_once(self) -> None:
        """For every length from 1 to 50 the reduced sums are those of the whole set."""
        data = self.bench.data(*problem(4))
        for ranks in self.sizes:
            model = self.bench.model(torch.float64)
            trainer = self.trainer(model, ranks, batch_size=2, validation_step=self.bench.validation_step())
            for length in range(1, 51):
                x, _ = problem(length)
                history = trainer.fit(data, self.bench.data(x, torch.arange(length)), epochs=1)
                assert history.epochs[-1]["val_id"] == pytest.approx((length - 1) / 2, abs=EXACT)

    # -- C6 ----------------------------------------------------------------------------

    def test_c6_clips_the_whole_gradient_once(self) -> None:
        """Norm and clipped training equal torch's own on the whole batch."""
        if not self.capabilities.clipping:
            pytest.skip("does not claim clipping")
        for ranks in self.sizes:
            found = self.compare(ranks, problem(13), Run(2, max_norm=0.05))
            assert found.distance < EXACT
            norms = [log["grad_norm"] for log in found.history.logs if "grad_norm" in log]
            assert norms == pytest.approx(found.oracle.norms, abs=EXACT)

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
        """A scheduler object follows epochs, as in a plain torch loop, unless told otherwise."""
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

    def test_c8_one_ranks_wish_to_stop_stops_all(self) -> None:
        """The last rank alone asks; all stop after the same step and nobody hangs."""
        for ranks in self.sizes:
            trainer = self.trainer(self.bench.model(torch.float64), ranks, batch_size=2, log_every_n_steps=2)
            trainer.callbacks = [StopOn(rank=ranks - 1, step=3)]
            history = trainer.fit(self.bench.data(*problem(60)), epochs=5)
            assert history.stop_reason == f"rank {ranks - 1} has seen enough"
            assert len(history.steps["loss"]) == 4

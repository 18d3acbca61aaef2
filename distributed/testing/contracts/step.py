"""Contracts of an optimizer step: the batch (C1), the loss (C2) and clipping (C6)."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from distributed.errors import UserError
from distributed.testing.oracle import oracle_fit
from distributed.testing.reference_problem import (
    OwnLoss,
    make_optimizer,
    masked_mean,
    problem,
    small_model,
    weighted_mean,
)
from distributed.testing.suite import EXACT, Run, Suite

__all__ = ["StepContracts"]


class StepContracts(Suite):
    """Steps against the oracle's."""

    # -- C1 ----------------------------------------------------------------------------

    def test_c1_global_batch_is_kept_on_any_number_of_ranks(self) -> None:
        """The same global batch from one, two or three ranks is the same training, also with a micro-batch
        that the most ranks choose, where that is claimed."""
        data = problem(60)
        reference, _ = self.train_oracle(12, data, Run(steps=10))
        chosen: list[tuple[int, int | str]] = (
            [(self.sizes[-1], "auto")] if self.capabilities.auto_batch else []
        )
        for ranks, size in [*((ranks, 2) for ranks in self.sizes), *chosen]:
            model = self.bench.model(torch.float64)
            trainer = self.trainer(
                model,
                ranks,
                batch_size=size,
                global_batch_size=12,
                learning_rate=0.3,
                optimizer=self.bench.optimizer("sgd"),
            )
            history = trainer.fit(self.bench.data(*data), epochs=2)
            assert history.batch["global_batch_size"] == 12
            assert len(history.steps["loss"]) == 10
            assert self.lossy or self.distance(model, reference) < EXACT

    # -- C2, C3 ------------------------------------------------------------------------

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    @pytest.mark.parametrize("length", [24, 13, 23, 1])
    def test_c2_c3_parity_with_the_oracle(self, accumulation: int, length: int) -> None:
        """Parameters and losses equal the single process's, also where nothing divides: 13
        samples leave a rank without any, 23 give the ranks unequal shares, 1 sample is all."""
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

    def test_c2_a_model_may_compute_its_own_loss(self) -> None:
        """A model that takes its batch by name and returns a mean is weighed by what that averages over; or
        it is refused, where `by_name` is false."""
        if self.spec.framework != "torch":
            pytest.skip("the model is a torch module")
        x, y = problem(26)
        y = torch.where(torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6, -100, y)
        samples = [{"inputs": a, "labels": b} for a, b in zip(x, y, strict=True)]
        given = {"batch_size": 3, "gradient_accumulation_steps": 2 if self.capabilities.accumulation else 1}
        for ranks in self.sizes:
            model, run = OwnLoss(self.bench.model(torch.float64)), Run(steps=8)
            trainer = self.trainer(model, ranks, optimizer="sgd", learning_rate=run.rate, **given)
            if not self.by_name:
                with pytest.raises(UserError):
                    trainer.fit(samples, max_steps=run.steps)
                continue
            history = trainer.fit(samples, max_steps=run.steps)
            reference, seen = self.train_oracle(
                math.prod(given.values()) * self.slices(ranks), (x, y), run, loss_fn=masked_mean
            )
            assert self.distance(model.body, reference) < EXACT
            assert history.steps["loss"] == pytest.approx(seen.losses, abs=EXACT)

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

    def test_c6_c7_a_step_that_is_not_finite_is_left_out_by_all(self) -> None:
        """One sample is infinite and on_nan=skip: no rank steps, and the schedule waits."""
        x, y = problem(13)
        x[5] = torch.inf
        for ranks in self.sizes:
            run = Run(steps=12, rate=0.1, given={"on_nan": "skip", "warmup_steps": 5})
            model, history = self.train(ranks, (x, y), run)
            reference = small_model()
            optimizer = make_optimizer("sgd", reference.parameters(), 0.1)
            seen = oracle_fit(
                reference,
                optimizer,
                x,
                y,
                global_batch_size=2 * self.slices(ranks),
                steps=12,
                scheduler=LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
                skip_non_finite=True,
            )
            assert self.lossy or self.distance(model, reference) < EXACT
            assert history.num_skipped_steps == sum(not math.isfinite(norm) for norm in seen.norms)
            assert history.steps["learning_rate"] == pytest.approx(seen.rates)

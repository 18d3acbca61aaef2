"""BackendConformance: subclass it, name a backend, and every contract is a test.

::

    from distributed.testing.conformance import BackendConformance

    class TestMine(BackendConformance):
        backend = "mine"

Needs the fixture `rank_pool`, which comes with the package's pytest plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from distributed import Callback, Trainer
from distributed.config import DistributedConfig
from distributed.interfaces.backend import Capabilities
from distributed.interfaces.callback import Context
from distributed.plugin_manager import get_catalog
from distributed.testing.oracle import OracleResult, oracle_fit
from distributed.testing.pool import RankPool

__all__ = ["BackendConformance", "problem", "small_model"]

STEPS = 20
EXACT = 1e-9
"""float64: decides whether an implementation is right; correct code reaches 1e-11."""


def small_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """6 -> 8 -> 3, the same weights every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def problem(length: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """`length` samples of 6 numbers with a class in 0..2."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(length, 6, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randint(0, 3, (length,), generator=generator)


def distance(a: nn.Module, b: nn.Module) -> float:
    """Largest difference between parameters of equal name."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


class StopOn(Callback):
    """Asks for a stop on one rank alone."""

    all_ranks = True

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_step_end(self, context: Context) -> None:
        """Ask once, from the one rank."""
        if context.world.rank == self.rank and context.progress.step == self.step:
            context.request_stop(f"rank {self.rank} has seen enough")


class BackendConformance:
    """The contracts C1 to C8 as tests of `backend`.

    Attributes:
        backend: the name it is registered under.
        sizes: numbers of ranks to try; 1 alone for a backend that is one process.
        options: configuration fields that every run gets besides.
    """

    backend: str = ""
    sizes: tuple[int, ...] = (1, 2, 3)
    options: Mapping[str, Any] = MappingProxyType({})

    @pytest.fixture(autouse=True)
    def _use_pool(self, rank_pool: RankPool) -> None:
        self.pool = rank_pool

    @property
    def capabilities(self) -> Capabilities:
        """What the backend claims; what it does not claim is not asked of it."""
        return get_catalog().backend(self.backend).capabilities

    def slices(self, ranks: int) -> int:
        """Into how many slices `ranks` ranks cut a global batch; fewer where they share a model."""
        size = get_catalog().backend(self.backend).data_parallel_size
        return ranks if size is None else size(DistributedConfig(backend=self.backend), ranks)

    def trainer(self, model: nn.Module, ranks: int, **given: Any) -> Trainer:
        """A trainer on `ranks` CPU ranks of the pool."""
        trainer = Trainer(
            model,
            backend=self.backend,
            num_processes=ranks,
            device="cpu",
            **{"log_every_n_steps": 1, **self.options, **given},
        )
        trainer.launcher = self.pool
        return trainer

    def compare(
        self,
        ranks: int,
        accumulation: int,
        length: int,
        *,
        steps: int = STEPS,
        batch_size: int = 2,
        dtype: torch.dtype = torch.float64,
        max_norm: float | None = None,
        rate: float = 0.3,
        optimizer: Any = torch.optim.SGD,
        **given: Any,
    ) -> tuple[float, Any, OracleResult]:
        """(parameter distance, history, oracle's record) after `steps` steps of both."""
        x, y = problem(length, dtype)
        model, reference = small_model(dtype), small_model(dtype)
        trainer = self.trainer(
            model,
            ranks,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            optimizer=optimizer,
            learning_rate=rate,
            gradient_clipping=max_norm,
            **given,
        )
        history = trainer.fit((x, y), max_steps=steps)
        seen = oracle_fit(
            reference,
            optimizer(reference.parameters(), lr=rate),
            x,
            y,
            global_batch_size=batch_size * accumulation * self.slices(ranks),
            steps=steps,
            max_norm=max_norm,
        )
        return distance(model, reference), history, seen

    # -- C1 ----------------------------------------------------------------------------

    def test_c1_global_batch_is_kept_on_any_number_of_ranks(self) -> None:
        """The same global batch from one, two or three ranks is the same training."""
        x, y = problem(60)
        reference = small_model()
        oracle_fit(
            reference, torch.optim.SGD(reference.parameters(), lr=0.3), x, y, global_batch_size=12, steps=10
        )
        for ranks in self.sizes:
            model = small_model()
            trainer = self.trainer(
                model, ranks, batch_size=2, global_batch_size=12, learning_rate=0.3, optimizer=torch.optim.SGD
            )
            history = trainer.fit((x, y), epochs=2)
            assert history.batch["global_batch_size"] == 12
            assert len(history.steps["loss"]) == 10
            assert distance(model, reference) < EXACT

    # -- C2, C3 ------------------------------------------------------------------------

    @pytest.mark.parametrize("accumulation", [1, 2, 4])
    @pytest.mark.parametrize("length", [24, 13, 25, 1])
    def test_c2_c3_parity_with_the_oracle(self, accumulation: int, length: int) -> None:
        """Parameters and losses equal the single process's, also where nothing divides: 13 and
        25 samples leave last batches smaller than the number of ranks, 1 sample is all."""
        if accumulation > 1 and not self.capabilities.accumulation:
            pytest.skip("does not claim accumulation")
        for ranks in self.sizes:
            off, history, seen = self.compare(ranks, accumulation, length)
            assert off < EXACT, f"{ranks} ranks: parameters {off:.1e} from the oracle"
            assert history.steps["loss"] == pytest.approx(seen.losses, abs=EXACT)

    @pytest.mark.parametrize(("kind", "limit"), [("SGD", 1e-6), ("AdamW", 1e-5)])
    def test_c2_parity_in_float32(self, kind: str, limit: float) -> None:
        """float32 stays within what rounding explains (AdamW with eps=1e-4)."""
        for ranks in self.sizes:
            optimizer = partial(torch.optim.SGD) if kind == "SGD" else partial(torch.optim.AdamW, eps=1e-4)
            off, _, _ = self.compare(ranks, 1, 25, dtype=torch.float32, optimizer=optimizer, rate=0.05)
            assert off < limit, f"{ranks} ranks: {off:.1e}"

    @pytest.mark.parametrize("accumulation", [1, 2])
    def test_c2_masked_tokens_weigh_alike(self, accumulation: int) -> None:
        """With ignore_index the mean is over unmasked tokens, however unevenly ranks hold them."""
        x, y = problem(26)
        y = torch.where(torch.rand(26, generator=torch.Generator().manual_seed(3)) < 0.6, -100, y)
        for ranks in self.sizes:
            model, reference = small_model(), small_model()
            # 3 a rank: counts over it are not exact in float32, where a careless product would land.
            trainer = self.trainer(
                model,
                ranks,
                batch_size=3,
                gradient_accumulation_steps=accumulation,
                optimizer=torch.optim.SGD,
                learning_rate=0.3,
                gradient_clipping=0.5,
            )
            trainer.fit((x, y), max_steps=STEPS)
            oracle_fit(
                reference,
                torch.optim.SGD(reference.parameters(), lr=0.3),
                x,
                y,
                max_norm=0.5,
                global_batch_size=3 * accumulation * self.slices(ranks),
                steps=STEPS,
                loss_fn=_masked,
            )
            assert distance(model, reference) < EXACT

    def test_c2_a_loss_may_say_its_own_count(self) -> None:
        """A loss that returns (sum, count) is divided by the count of the whole global batch."""
        x, y = problem(13)
        for ranks in self.sizes:
            model, reference = small_model(), small_model()
            trainer = self.trainer(
                model,
                ranks,
                batch_size=3,
                optimizer=torch.optim.SGD,
                learning_rate=0.3,
                loss_fn=_sum_and_count,
            )
            trainer.fit((x, y), max_steps=STEPS)
            oracle_fit(
                reference,
                torch.optim.SGD(reference.parameters(), lr=0.3),
                x,
                y,
                steps=STEPS,
                global_batch_size=3 * self.slices(ranks),
                loss_fn=lambda o, t: _sum_and_count(o, t)[0] / (t + 1).sum(),
            )
            assert distance(model, reference) < EXACT

    # -- C3, C4 ------------------------------------------------------------------------

    def test_c3_every_sample_is_used_once_an_epoch(self) -> None:
        """One weight per sample: after an epoch of SGD each has moved by exactly 1 / batch."""
        for length in (7, 12):
            for ranks in self.sizes:
                model = _Memory(length)
                trainer = self.trainer(
                    model,
                    ranks,
                    batch_size=2,
                    optimizer=torch.optim.SGD,
                    learning_rate=1.0,
                    training_step=_read_memory,
                )
                trainer.fit(torch.arange(length), epochs=1)
                batch = 2 * self.slices(ranks)
                sizes = [min(batch, length - start) for start in range(0, length, batch)]
                expected = sorted(-1.0 / size for size in sizes for _ in range(size))
                assert sorted(model.cells.tolist()) == pytest.approx(expected, abs=EXACT)

    def test_c4_a_second_fit_continues_at_the_exact_sample(self) -> None:
        """Seven steps and then thirteen are the same as twenty: optimizer, schedule, cursor."""
        x, y = problem(25)
        for ranks in self.sizes:
            whole, parts = small_model(), small_model()
            options: dict[str, Any] = {"batch_size": 2, "optimizer": _momentum, "warmup_steps": 9}
            self.trainer(whole, ranks, **options).fit((x, y), max_steps=20)
            trainer = self.trainer(parts, ranks, **options)
            trainer.fit((x, y), max_steps=7)
            trainer.fit((x, y), max_steps=13)
            assert distance(whole, parts) < EXACT

    # -- C5 ----------------------------------------------------------------------------

    def test_c5_every_validation_sample_counts_once(self) -> None:
        """For every length from 1 to 50 the reduced sums are those of the whole set."""
        x, y = problem(4)
        for ranks in self.sizes:
            model = small_model()
            trainer = self.trainer(model, ranks, batch_size=2, validation_step=_ids)
            for length in range(1, 51):
                vx, _ = problem(length)
                history = trainer.fit((x, y), (vx, torch.arange(length)), epochs=1)
                assert history.epochs[-1]["val_id"] == pytest.approx((length - 1) / 2, abs=EXACT)

    # -- C6 ----------------------------------------------------------------------------

    def test_c6_clips_the_whole_gradient_once(self) -> None:
        """Norm and clipped training equal torch's own on the whole batch."""
        if not self.capabilities.clipping:
            pytest.skip("does not claim clipping")
        for ranks in self.sizes:
            off, history, seen = self.compare(ranks, 2, 13, max_norm=0.05)
            assert off < EXACT
            assert [log["grad_norm"] for log in history.logs if "grad_norm" in log] == pytest.approx(
                seen.norms, abs=EXACT
            )

    # -- C7 ----------------------------------------------------------------------------

    def test_c7_schedules_count_optimizer_steps(self) -> None:
        """Warm-up and cosine go by optimizer steps, whatever ranks and accumulation."""
        x, y = problem(48)
        for ranks in self.sizes:
            for accumulation in (1, 2):
                trainer = self.trainer(
                    small_model(),
                    ranks,
                    global_batch_size=12,
                    learning_rate=0.1,
                    gradient_accumulation_steps=accumulation,
                    scheduler="cosine",
                    warmup_steps=2,
                )
                history = trainer.fit((x, y), epochs=2)
                expected = [
                    0.05,
                    0.1,
                    *(0.05 * (1 + torch.cos(torch.tensor(torch.pi * k / 6))).item() for k in range(6)),
                ]
                assert history.steps["learning_rate"] == pytest.approx(expected, abs=1e-7)

    def test_c7_a_users_scheduler_steps_once_an_epoch(self) -> None:
        """A scheduler object follows epochs, as in a plain torch loop, unless told otherwise."""
        x, y = problem(12)
        for ranks in self.sizes:
            trainer = self.trainer(
                small_model(),
                ranks,
                global_batch_size=6,
                learning_rate=0.1,
                optimizer=torch.optim.SGD,
                scheduler=_halving,
            )
            history = trainer.fit((x, y), epochs=3)
            assert history.steps["learning_rate"] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])

    # -- C8 ----------------------------------------------------------------------------

    def test_c8_one_ranks_wish_to_stop_stops_all(self) -> None:
        """The last rank alone asks; all stop after the same step and nobody hangs."""
        x, y = problem(60)
        for ranks in self.sizes:
            trainer = self.trainer(small_model(), ranks, batch_size=2, log_every_n_steps=2)
            trainer.callbacks = [StopOn(rank=ranks - 1, step=3)]
            history = trainer.fit((x, y), epochs=5)
            assert history.stop_reason == f"rank {ranks - 1} has seen enough"
            assert len(history.steps["loss"]) == 4


class _Memory(nn.Module):
    """A weight per sample, so that a sample's use can be read off it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(length, dtype=torch.float64))

    def forward(self, index: Tensor) -> Tensor:
        return self.cells[index]


def _read_memory(model: nn.Module, batch: list[Tensor]) -> Tensor:
    result: Tensor = model(batch[0]).mean()
    return result


def _masked(output: Tensor, target: Tensor) -> Tensor:
    # A global batch may hold masked targets alone; its mean is then nothing, not NaN.
    return cross_entropy(output, target, reduction="sum") / (target != -100).sum().clamp(min=1)


def _sum_and_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    weight = target + 1
    return (cross_entropy(output, target, reduction="none") * weight).sum(), weight.sum()


def _ids(model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    model(batch[0])
    return {"id": (batch[1].sum(), len(batch[1]))}


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

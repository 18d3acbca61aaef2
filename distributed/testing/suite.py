"""Base of the conformance tests: a trainer of the backend under test, and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer
from distributed.config import load
from distributed.interfaces.backend_spec import BackendSpec, Capabilities
from distributed.interfaces.history import History
from distributed.planner.backend_choice import chosen_backend
from distributed.planner.mesh import data_parallel_size, resolve_dims
from distributed.registry.catalog import get_catalog
from distributed.testing.oracle import OracleResult, oracle_fit
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import make_optimizer, small_model
from distributed.testing.workbench import Workbench, find_workbench

__all__ = ["EXACT", "Compared", "Run", "Suite"]

EXACT = 1e-9
"""float64: decides whether an implementation is right; correct code reaches 1e-11."""

_OF_WEIGHTS = (
    "test_c2_",
    "test_c3_every_sample_is_used_once",
    "test_c6_clips_the_whole_gradient_once",
    "test_c11_",
    "test_a_claimed_precision_is_used",
    "test_claimed_compilation_changes_the_last_bits",
)
"""Tests whose only subject are trained weights, as the oracle has them or to the last bits."""


@dataclass(frozen=True)
class Run:
    """A training that a backend and the oracle can both do.

    Attributes:
        accumulation: micro-batches per step.
        steps: optimizer steps.
        batch_size: samples per slice and micro-batch.
        optimizer: kind of optimizer, from `problem.OPTIMIZERS`.
        rate: learning rate.
        max_norm: largest gradient norm, or None.
        dtype: dtype of weights and inputs.
        given: further arguments of the backend's `Trainer`.
        seed: seed of the data's order.
    """

    accumulation: int = 1
    steps: int = 20
    batch_size: int = 2
    optimizer: str = "sgd"
    rate: float = 0.3
    max_norm: float | None = None
    dtype: torch.dtype = torch.float64
    given: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Compared:
    """Results of a `Run`: distance between the weights, the backend's record, the oracle's."""

    distance: float
    history: History
    oracle: OracleResult


class Suite:
    """Base of the tests.

    Attributes:
        backend: the name it is registered under.
        sizes: numbers of ranks to try; 1 alone for a backend that is one process.
        options: configuration that every trainer of these tests gets, e.g. ``{"zero_stage": 2}``.
        framework: of the models that are trained, where the backend trains those of another one, too, by
            its `BackendSpec.collectives`; None for the backend's own.
        workbench: the framework's part of the tests; None finds it by the backend's `framework`.
        lengths: lengths of validation sets to try. A backend that is slow to start may try fewer: from 13 on
            they repeat what 3 ranks and batches of 2 can be left with.
        by_name: whether, under `options`, a model may take its batch by name and compute the loss.
        lossy: whether `options` set a gradient codec that changes what is trained. Tests that compare trained
            weights with the oracle's are then skipped, or compare the rest.
        pooled: ranks are shared by all tests, in a process group over gloo that is there already;
            False starts new ones for every `fit`, as a user's does, which is slower.
    """

    backend: str = ""
    sizes: tuple[int, ...] = (1, 2, 3)
    options: Mapping[str, Any] = MappingProxyType({})
    framework: str | None = None
    workbench: type[Workbench] | None = None
    lengths: range = range(1, 51)
    by_name: bool = True
    lossy: bool = False
    pooled: bool = True

    @pytest.fixture(autouse=True)
    def _use_pool(self, rank_pool: RankPool) -> None:
        self.pool = rank_pool

    @pytest.fixture(autouse=True)
    def _skip_exact_tests(self, request: pytest.FixtureRequest) -> None:
        if self.lossy and request.node.name.startswith(_OF_WEIGHTS):
            pytest.skip("the codec changes what is trained")

    @property
    def spec(self) -> BackendSpec:
        """Spec of the backend under `options`; for a backend that only starts ranks, that of the ranks."""
        config = load(overrides={"backend": self.backend, **self.options})
        return chosen_backend(config, get_catalog(), self.framework)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the backend claims; others are not tested."""
        return self.spec.capabilities

    @cached_property
    def bench(self) -> Workbench:
        """Builds what is trained."""
        if self.workbench is not None:
            return self.workbench()
        return find_workbench(self.spec.framework)

    def slices(self, ranks: int) -> int:
        """Number of slices of a global batch for `ranks` ranks; fewer where they share a model."""
        config = load(overrides={"backend": self.backend, **self.options})
        return data_parallel_size(config, self.spec, resolve_dims(config, self.spec, ranks))

    def trainer(self, model: Any, ranks: int, **given: Any) -> Trainer:
        """A trainer of `model` on `ranks` CPU ranks. `options` are this backend's alone: with
        ``backend=`` of another they are left out."""
        fields = {"backend": self.backend, "num_processes": ranks, "log_every_n_steps": 1, **given}
        own = self.options if fields["backend"] == self.backend else {}
        trainer = Trainer(model, **{"device": "cpu", **own, **fields})
        trainer.launcher = self.pool if self.pooled else None
        return trainer

    def train(self, ranks: int, data: tuple[Tensor, Tensor], run: Run) -> tuple[Any, History]:
        """(trained model, history) of the backend."""
        model = self.bench.model(run.dtype)
        trainer = self.trainer(
            model,
            ranks,
            batch_size=run.batch_size,
            gradient_accumulation_steps=run.accumulation,
            optimizer=self.bench.optimizer(run.optimizer),
            learning_rate=run.rate,
            gradient_clipping=run.max_norm,
            seed=run.seed,
            **run.given,
        )
        return model, trainer.fit(self.bench.data(*data), max_steps=run.steps)

    def train_oracle(
        self, global_batch_size: int, data: tuple[Tensor, Tensor], run: Run, **given: Any
    ) -> tuple[nn.Module, OracleResult]:
        """(trained model, record) of one process without any backend."""
        model = small_model(run.dtype)
        optimizer = make_optimizer(run.optimizer, model.parameters(), run.rate)
        options = {"steps": run.steps, "max_norm": run.max_norm, "seed": run.seed, **given}
        return model, oracle_fit(model, optimizer, *data, global_batch_size=global_batch_size, **options)

    def compare(
        self,
        ranks: int,
        data: tuple[Tensor, Tensor],
        run: Run,
        loss_fn: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
    ) -> Compared:
        """Both after the same steps; `loss_fn` is the oracle's."""
        model, history = self.train(ranks, data, run)
        batch = run.batch_size * run.accumulation * self.slices(ranks)
        reference, seen = self.train_oracle(batch, data, run, loss_fn=loss_fn)
        return Compared(self.distance(model, reference), history, seen)

    def distance(self, model: Any, reference: Any) -> float:
        """Largest difference between the weights of `model` and those of `reference`, which may
        be a torch module."""
        ours, theirs = self.bench.weights(model), self._weights(reference)
        return max(float((a.cpu() - b.cpu()).abs().max()) for a, b in zip(ours, theirs, strict=True))

    def _weights(self, model: Any) -> list[Tensor]:
        if isinstance(model, nn.Module):
            return [p.detach().double() for p in model.parameters()]
        return self.bench.weights(model)

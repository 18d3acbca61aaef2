"""Sparse gradients, parameters without elements, complex ones and closures: exact or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import Trainer, UserError
from distributed.testing.conformance import distance, problem
from distributed.testing.oracle import sample_order
from distributed.testing.rank_pool import RankPool

STEPS = 6


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.embed((x[:, :2] * 2).long() % 5).sum(1))
        return result


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.none = nn.Linear(6, 3), nn.Parameter(torch.zeros(0, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x) + self.none.sum()
        return result


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.phase = nn.Linear(6, 3), nn.Parameter(torch.ones(3, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(x) * (self.phase * self.phase).real + self.phase.imag
        return result


def seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = kind()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.double()
    return model


def plain(kind: type[nn.Module], max_norm: float | None) -> nn.Module:
    """Four samples a step, in one process; a sparse gradient is clipped as the dense one it stands for."""
    model, (x, y) = seeded(kind), problem(24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in sample_order(24, 0, 0).split(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def fit(pool: RankPool, kind: type[nn.Module], backend: str, **given: Any) -> nn.Module:
    model = seeded(kind)
    options = {"num_processes": 1 if backend == "serial" else 2, "device": "cpu", "log_every_n_steps": 1}
    trainer = Trainer(
        model,
        backend=backend,
        global_batch_size=4,
        optimizer=torch.optim.SGD,
        learning_rate=0.3,
        **{**options, **given},
    )
    trainer.launcher = pool if backend != "serial" else None
    trainer.fit(problem(24), max_steps=STEPS)
    return model


@pytest.mark.parametrize(
    ("kind", "backend", "max_norm"),
    [
        (Sparse, "serial", None),
        (Sparse, "serial", 0.05),
        (Sparse, "pytorch-ddp", 0.05),
        (Empty, "serial", None),
        (Empty, "pytorch-ddp", None),
        (Empty, "fsdp", 0.05),
        (Complex, "serial", None),
        (Complex, "pytorch-ddp", None),
    ],
)
def test_exact(rank_pool: RankPool, kind: type[nn.Module], backend: str, max_norm: float | None) -> None:
    model = fit(rank_pool, kind, backend, gradient_clipping=max_norm)
    assert distance(*(_with_elements(m) for m in (model, plain(kind, max_norm)))) < 1e-9


def _with_elements(model: nn.Module) -> nn.Module:
    """Without parameters that have no elements, whose largest difference does not exist."""
    if isinstance(model, Empty):
        del model.none
    return model


@pytest.mark.parametrize(
    ("kind", "backend", "given", "message"),
    [
        (Sparse, "fsdp", {}, "'embed.weight', which has sparse gradients.*sparse=False"),
        (Sparse, "deepspeed", {}, "'embed.weight', which has sparse gradients.*sparse=False"),
        (Sparse, "horovod", {}, "embed.weight is sparse.*sparse=False"),
        (Empty, "deepspeed", {"zero_stage": 3}, "'none', which has no elements.*zero_stage 2.*leave it out"),
        (Complex, "fsdp", {}, "different dtypes"),
        (Complex, "deepspeed", {}, "which is complex"),
        (Complex, "horovod", {}, "'phase', which is complex.*view_as_real"),
    ],
)
def test_refused(
    rank_pool: RankPool, kind: type[nn.Module], backend: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit(rank_pool, kind, backend, **given)

"""Optimizers in host memory and in fewer bits, and matrix products in fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed import DistributedConfig, UserError
from distributed.checkpoint.reader import PortableReader
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance, problem, small_model
from distributed.training.host_optimizer import HostStep
from distributed.training.low_bit import low_bit_optimizer
from tests.support.training import make_trainer

pytestmark = pytest.mark.starts_processes  # the compiler of torchao's steps does


# -- host memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.AdamW, lr=0.01, foreach=True),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ],
    ids=["adamw", "foreach", "momentum"],
)
def test_a_step_in_host_memory_is_the_same_step(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """The parameters keep their identity and memory, and the step sees copies of them and their gradients."""
    x, y = problem(24)
    models = [small_model(), small_model()]
    optimizers = [kind(model.parameters()) for model in models]
    host = HostStep(optimizers[1])
    memory = [p.data_ptr() for p in models[1].parameters()]
    seen: list[int] = []
    optimizers[1].register_step_pre_hook(
        lambda o, a, k: seen.extend(p.data_ptr() for p in o.param_groups[0]["params"])
    )
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            nn.functional.cross_entropy(model(x), y).backward()
            if step == 2:  # a parameter without a gradient stays
                model[0].bias.grad = None  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        assert distance(*models) == 0.0
        assert [p.data_ptr() for p in models[1].parameters()] == memory
    assert not set(seen[:4]) & set(memory)
    host.undo()
    seen.clear()
    nn.functional.cross_entropy(models[1](x), y).backward()
    optimizers[1].step()
    assert seen == memory


def test_deepspeed_offloads_by_its_own_means(rank_pool: RankPool) -> None:
    models = []
    for offload in (False, True):
        model = small_model()
        make_trainer(
            model, 2, rank_pool, backend="deepspeed", zero_stage=1, batch_size=3, learning_rate=0.01,
            optimizer_offload=offload,
        ).fit(problem(24), max_steps=6)  # fmt: skip
        models.append(model)
    assert distance(*models) < 1e-9


# -- fewer bits -------------------------------------------------------------------------------------

WIDTH = 64


def wide() -> nn.Module:
    """Weights of 64 x 64, which 8 and 4 bits hold, and biases, which stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
        )


def train(
    bits: int,
    steps: int = 20,
    folder: Path | None = None,
    ranks: int = 1,
    pool: RankPool | None = None,
    build: Callable[[], nn.Module] = wide,
    **given: Any,
) -> tuple[nn.Module, Any]:
    resume = {"resume_from_checkpoint": True} if folder else {}
    trainer = make_trainer(
        build, ranks, pool, folder=folder, backend="serial" if ranks == 1 else "pytorch-ddp",
        global_batch_size=12, learning_rate=0.01, optimizer_bits=bits, **resume, **given,
    )  # fmt: skip
    history = trainer.fit(problem(60, torch.float32), max_steps=steps)
    return trainer.model, history


@pytest.fixture
def eager() -> Iterator[None]:
    """torchao's step without its compiler, which takes seconds for each shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("bits", "near"), [(8, 0.01), (4, 0.1)])
def test_fewer_bits_stay_near_32(bits: int, near: float, tmp_path: Path) -> None:
    """The distance of 20 steps, a resumed run, and a checkpoint that 32 bits load and save."""
    exact, history = train(32)
    found, low = train(bits, folder=tmp_path / "whole")
    assert 0 < distance(found, exact) < near
    assert low.steps["loss"] == pytest.approx(history.steps["loss"], abs=near)
    assert low.steps["learning_rate"] == pytest.approx(history.steps["learning_rate"], rel=1e-6)
    saved = PortableReader(low.checkpoint)
    shapes = {name: shape for (key, name), shape in saved.tensors().items() if key == "optimizer.exp_avg"}
    assert shapes == {name: tuple(p.shape) for name, p in found.named_parameters()}
    train(bits, 10, tmp_path / "parts")
    resumed, _ = train(bits, 20, tmp_path / "parts")
    assert distance(resumed, found) < near
    for first, second in ((32, bits), (bits, 32)):
        folder = tmp_path / f"{first}-{second}"
        train(first, 10, folder)
        crossed, _ = train(second, 20, folder)
        assert distance(crossed, exact) < near


def eager_wide() -> nn.Module:
    torch.compiler.set_stance("force_eager")
    return wide()


@pytest.mark.usefixtures("eager")
def test_ranks_take_the_steps_of_one_process() -> None:
    """With a schedule, which sets the learning rate of each step."""
    alone, _ = train(8, 6, scheduler="linear")
    with closing(RankPool()) as pool:
        found, _ = train(8, 6, ranks=2, pool=pool, scheduler="linear", build=eager_wide)
    constant, _ = train(8, 6)
    assert distance(found, alone) < 1e-3 < distance(constant, alone)


def test_the_compiled_step_is_the_eager_one() -> None:
    weights = []
    for stance in ("default", "force_eager"):
        weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        optimizer = low_bit_optimizer(DistributedConfig(optimizer_bits=8))([weight], lr=0.01)
        with torch.compiler.set_stance(stance):
            for _ in range(3):
                weight.grad = weight.detach().sin()
                optimizer.step()
        weights.append(weight.detach())
    assert float((weights[0] - weights[1]).abs().max()) < 1e-6


def test_an_optimizer_of_the_users_is_refused() -> None:
    with pytest.raises(UserError, match=r"^optimizer_bits: .*one was passed to the trainer.*torchao.optim"):
        train(8, optimizer=torch.optim.AdamW)


# -- fp8 and TF32 -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "ranks"), [("serial", 1), ("pytorch-ddp", 2), ("fsdp", 2)])
def test_fp8_rounds_linear_layers_and_keeps_their_names(
    backend: str, ranks: int, rank_pool: RankPool
) -> None:
    models = []
    for precision in ("default", "fp8"):
        model = wide()
        trainer = make_trainer(
            model, ranks, rank_pool if ranks > 1 else None, backend=backend, optimizer=torch.optim.SGD,
            global_batch_size=12, learning_rate=0.1, matmul_precision=precision,
        )  # fmt: skip
        trainer.fit(problem(60, torch.float32), max_steps=10)
        models.append(model)
    assert 1e-6 < distance(*models) < 0.02
    assert list(models[1].state_dict()) == list(wide().state_dict())
    assert all(type(module) in (nn.Sequential, nn.Linear, nn.Tanh) for module in models[1].modules())


def test_a_model_without_a_layer_for_fp8_is_refused() -> None:
    trainer = make_trainer(small_model(), backend="serial", matmul_precision="fp8")
    with pytest.raises(
        UserError, match=r"^matmul_precision: Sequential has no linear layer that fp8.*multiples of 16"
    ):
        trainer.fit(problem(12), max_steps=1)


def precision_of(model: nn.Module, batch: list[Tensor]) -> Tensor:
    assert torch.get_float32_matmul_precision() == "high"
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("fails", [False, True])
def test_tf32_lasts_as_long_as_the_run(fails: bool) -> None:
    before = torch.get_float32_matmul_precision()
    trainer = make_trainer(
        small_model(), backend="serial", matmul_precision="tf32", training_step=precision_of,
        max_steps=1, on_nan="stop",
    )  # fmt: skip
    x, y = problem(12)
    if fails:
        with pytest.raises(UserError):
            trainer.fit((x * torch.nan, y))
    else:
        trainer.fit((x, y))
    assert torch.get_float32_matmul_precision() == before != "high"

"""The Horovod backend beyond the kit: what is reduced, in which format, and what is rejected."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import HorovodTrainer, UserError, WorkerError
from distributed.config import DistributedConfig, load
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.system.addresses import loopback_interface
from distributed.testing.conformance import distance, problem, small_model
from distributed.testing.rank_pool import RankPool
from tests.support.training import Die, SameWeights, make_trainer


@pytest.fixture
def pool(rank_pool: RankPool) -> RankPool:
    return rank_pool


trainer_of = partial(
    make_trainer, ranks=2, backend="horovod", batch_size=4, optimizer=torch.optim.SGD, learning_rate=0.3
)


def trained(model: nn.Module, pool: RankPool, ranks: int = 2, steps: int = 12, **given: Any) -> nn.Module:
    dtype = next(model.parameters()).dtype
    trainer_of(model, pool=pool, ranks=ranks, **given).fit(problem(25, dtype), max_steps=steps)
    return model


def bits(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


# -- what is sent ----------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_gradient_is_sent_once_a_window(pool: RankPool, accumulation: int, tmp_path: Path) -> None:
    """Counted in Horovod's own record of what it did."""
    timeline = tmp_path / "made" / "timeline.json"
    trained(
        small_model(), pool, gradient_accumulation_steps=accumulation, horovod={"timeline": str(timeline)}
    )
    events = [e for e in json.loads(timeline.read_text().rstrip().rstrip(",]") + "]") if e]
    lanes = {e["pid"]: e["args"].get("name") for e in events if e.get("name") == "process_name"}
    sent = [lanes[e["pid"]] for e in events if e.get("name") == "ALLREDUCE"]
    gradients = [name for name in sent if "gradient." in name]
    assert len(set(gradients)) == 4
    assert len(gradients) == 4 * 12


def test_compressed_gradients_train_nearly_alike(pool: RankPool) -> None:
    exact, rounded = (
        trained(small_model(), pool),
        trained(small_model(), pool, horovod={"compression": "fp16"}),
    )
    assert 1e-6 < distance(exact, rounded) < 5e-3


class Count(nn.Module):
    """Its gradient is 2048 a sample, which float16 holds; the count of 4099 it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * 2048.0 * len(x)


def _odd_count(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return output, torch.tensor(4099 * len(target))


def test_the_count_of_tokens_is_never_rounded(pool: RankPool) -> None:
    model = Count()
    given = {"loss_fn": _odd_count, "batch_size": 1, "learning_rate": 1.0, "horovod": {"compression": "fp16"}}
    trainer_of(model, pool=pool, **given).fit(problem(2), max_steps=1)
    # Gradients are rounded on each rank, and their sum is. A count rounded to 8200 would give others.
    gradient, other = (torch.tensor(2048 / count, dtype=torch.float16) for count in (2 * 4099, 8200))
    assert gradient != other
    assert model.weight.item() == -2 * gradient.item()


def test_an_overflow_is_skipped_by_all_ranks(pool: RankPool) -> None:
    model, plain = small_model(torch.float32), small_model(torch.float32)
    trainer = trainer_of(model, pool=pool, mixed_precision="fp16", scaler_init_scale=2.0**26)
    trainer.callbacks = [SameWeights()]
    skipped = trainer.fit(problem(24, torch.float32), max_steps=24).num_skipped_steps
    assert 3 < skipped < 20
    assert distance(model, plain) > 1e-3


def test_bf16_autocast_is_ddps(pool: RankPool) -> None:
    models = [
        trained(small_model(torch.float32), pool, backend=backend, mixed_precision="bf16")
        for backend in ("pytorch-ddp", "horovod")
    ]
    assert distance(*models) < 1e-6


def test_weights_of_a_dtype_that_horovod_lacks_train(pool: RankPool) -> None:
    model, reference = small_model(torch.bfloat16), small_model(torch.bfloat16)
    trained(reference, pool, ranks=1, batch_size=8)
    trained(model, pool)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert distance(reference, small_model(torch.bfloat16)) > 0
    assert distance(model, reference) < 0.02


class Deep(nn.Module):
    """Many small gradients, so that there is much to fuse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(nn.functional.pad(x, (0, 10))))
        return result


def test_deterministic_runs_end_with_the_same_bits(pool: RankPool) -> None:
    """On three ranks, where the order of additions shows; fusion would make it depend on timing."""
    given: dict[str, Any] = {"ranks": 3, "steps": 10, "deterministic": True, "batch_size": 2}
    first, *others = (bits(trained(Deep(), pool, **given)) for _ in range(2))
    assert all(other == first for other in others)


def test_deterministic_turns_fusion_off_and_nothing_else_does() -> None:
    """The test above sees fusion only when timing has it."""
    from distributed_backends.horovod.world import _settings

    assert _settings(load(overrides={"deterministic": True})) == {"HOROVOD_FUSION_THRESHOLD": "0"}
    assert _settings(load()) == {}


# -- what takes part -------------------------------------------------------------------------


class Branches(nn.Module):
    """Ranks use one branch or the other by their samples; the third nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = (nn.Linear(6, 3).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (self.left if float(x[0, 0]) > 0 else self.right)(x)
        return result


def test_unused_parameters_are_as_under_ddp(pool: RankPool) -> None:
    """Weight decay would show whether an unused parameter is stepped."""
    decay = partial(torch.optim.AdamW, weight_decay=0.1, eps=1e-4)
    models = [
        trained(Branches(), pool, backend=backend, optimizer=decay, find_unused_parameters=True, batch_size=1)
        for backend in ("pytorch-ddp", "horovod")
    ]
    assert distance(*models) < 1e-9
    assert distance(models[1].never, Branches().never) == 0.0
    assert distance(models[1].left, Branches().left) > 0.0


def test_a_missing_gradient_is_named(pool: RankPool) -> None:
    with pytest.raises(UserError, match=r"find_unused_parameters: no gradient for .*never\.weight"):
        trained(Branches(), pool)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.table(x[:, 0].abs().long())
        return result


def test_sparse_gradients_are_refused(pool: RankPool) -> None:
    with pytest.raises(UserError, match=r"gradient of table\.weight is sparse.*sparse=False"):
        trainer_of(Sparse(), pool=pool).fit(problem(8, torch.float32), max_steps=1)


@pytest.mark.parametrize(("nodes", "address"), [(1, "127.0.0.1"), (2, "0.0.0.0")])
def test_one_node_meets_on_loopback_alone(pool: RankPool, nodes: int, address: str) -> None:
    """Horovod's own server listens on every interface."""
    from distributed_backends.horovod.world import _rendezvous

    def listening() -> set[str]:
        connections = psutil.Process().net_connections()
        return {f"{c.laddr.ip}:{c.laddr.port}" for c in connections if c.status == psutil.CONN_LISTEN}

    place = LauncherEnvironment("torchrun", 0, 2, 0, 2 // nodes, 0, nodes, "node0", 29500)
    before = listening()
    with _rendezvous(place, dist.HashStore()) as variables:
        (found,) = listening() - before
        assert found == f"{address}:{variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}"
        assert variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == ("127.0.0.1" if nodes == 1 else "node0")
        assert variables.get("HOROVOD_GLOO_IFACE") == (loopback_interface() if nodes == 1 else None)
    assert listening() == before


def test_a_rank_that_waits_leaves_its_core_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's own wait polls without a pause, so that it is called once there is a result."""
    from distributed_backends.horovod import collectives

    pending, pauses = [False] * 40, list[float]()
    monkeypatch.setattr(collectives.hvd, "poll", lambda handle: not pending)
    monkeypatch.setattr(collectives.hvd, "synchronize", lambda handle: (handle, len(pending)))
    monkeypatch.setattr(collectives.time, "sleep", lambda pause: (pauses.append(pause), pending.pop()))
    assert collectives.wait(7) == (7, 0)
    assert len(pauses) == 40
    assert pauses == sorted(pauses)
    assert 0 <= pauses[0] < 5e-5
    assert pauses[-1] == 1e-3


def test_a_killed_rank_is_named(pool: RankPool) -> None:
    trainer = trainer_of(small_model(), callbacks=[Die(1, rank=1)])
    with pytest.raises(WorkerError, match=r"rank 1 \(.*SIGKILL") as caught:
        trainer.fit(problem(25))
    assert caught.value.rank == 1


# -- going on elsewhere ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [(("serial", 1), ("horovod", 2)), (("horovod", 2), ("serial", 1)),
     (("horovod", 3), ("pytorch-ddp", 2)), (("pytorch-ddp", 2), ("horovod", 3)),
     (("horovod", 2), ("horovod", 3))],
)  # fmt: skip
def test_checkpoints_go_to_and_from_horovod(
    pool: RankPool, first: tuple[str, int], second: tuple[str, int], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"global_batch_size": 6, "batch_size": None, "learning_rate": 0.01,
                             "optimizer": torch.optim.AdamW, "gradient_clipping": 0.5}  # fmt: skip
    whole = trained(small_model(), pool, ranks=1, backend="serial", **given)
    parts = small_model()
    for (backend, ranks), steps in ((first, 6), (second, 12)):
        parts = small_model()
        trained(parts, pool, ranks, steps, backend=backend, checkpoint_dir=str(tmp_path),
                resume_from_checkpoint=True, checkpoint={"every_n_steps": 6}, **given)  # fmt: skip
    assert distance(whole, parts) < 1e-9


# -- configuration ---------------------------------------------------------------------------


def test_horovods_options_are_refused_elsewhere() -> None:
    for name, value in (("compression", "fp16"), ("timeline", "t.json")):
        config = DistributedConfig(backend="pytorch-ddp", num_processes=2, horovod={name: value})
        with pytest.raises(UserError, match=f"horovod.{name}: backend 'pytorch-ddp' does not read"):
            resolve(config, get_catalog(), Facts(), Resources(), None)


def test_the_named_trainer_takes_what_horovods_users_write(pool: RankPool) -> None:
    import horovod.torch as hvd

    trainer = HorovodTrainer(
        small_model(), loss_fn=nn.CrossEntropyLoss(), verbose=False, compression=hvd.Compression.fp16
    )
    config = trainer.config
    assert (config.backend, config.horovod.compression, config.tracking.progress) == (
        "horovod",
        "fp16",
        "off",
    )
    assert HorovodTrainer(small_model(), compression="none").config.horovod.compression == "none"
    assert HorovodTrainer(small_model(), backend="serial").config.backend == "serial"
    assert trainer.metric_average(torch.tensor(0.25), name="accuracy") == 0.25
    with pytest.raises(UserError, match=r"horovod\.compression.*allowed|Allowed"):
        HorovodTrainer(small_model(), compression="topk")

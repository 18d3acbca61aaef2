"""Ranks that are threads of this process (``launch: threads``) train as processes do."""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed import Callback, DistributedConfig, Trainer, UserError
from distributed.communication import thread_arithmetic
from distributed.errors import WorkerError
from distributed.interfaces.plan import Facts, Resources
from distributed.launch.thread_state import RankState
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.testing.rank_pool import RankPool
from distributed.testing.reference_problem import distance, problem, small_model
from distributed.testing.suite import EXACT
from tests.gpu.mesh_cases import MESHES
from tests.parallel.expert_models import EXPERT_ENTRIES
from tests.parallel.models import ENTRIES, tokens, train_plainly
from tests.support.training import make_trainer

DATA = tokens(21)
STEPS, BATCH, MAX_NORM = 6, 8, 0.5


def build(name: str) -> nn.Module:
    return {**ENTRIES, **EXPERT_ENTRIES}[name].build()


def distance_from_serial(mesh: str) -> float:
    """How far weights of a mesh of threads are from those of plain PyTorch. Clipping, accumulation, masked
    tokens and a last window of 5 sequences."""
    case = MESHES[mesh]
    model = build(case.model)
    trainer = make_trainer(
        model,
        case.ranks,
        launch="threads",
        backend=case.backend,
        parallel=dict(case.parallel),
        global_batch_size=BATCH,
        gradient_accumulation_steps=2,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4),
        gradient_clipping=MAX_NORM,
    )
    trainer.fit(DATA, max_steps=STEPS)
    options = {"global_batch_size": BATCH, "steps": STEPS, "max_norm": MAX_NORM}
    expected = train_plainly(build(case.model), DATA, **options).weights
    return max(float((p.detach() - expected[name]).abs().max()) for name, p in model.named_parameters())


@pytest.mark.parametrize("mesh", MESHES)
def test_meshes_train_as_one_process_does(mesh: str) -> None:
    if MESHES[mesh].model == "llama":
        pytest.importorskip("transformers")
    assert distance_from_serial(mesh) < EXACT


# -- groups that lose what a rank has sent -------------------------------------------------------------------


def without_last_sum(patch: pytest.MonkeyPatch) -> None:
    """Reductions of a layer's values leave out the last rank's."""
    real = thread_arithmetic._reduced

    def reduced(op: Any, parts: Sequence[Tensor]) -> Tensor:
        values = parts[0].dtype == torch.float64 and parts[0].numel() > 20
        return real(op, parts[: len(parts) - 1] if values else parts)

    patch.setattr(thread_arithmetic, "_reduced", reduced)


def without_last_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows of values that the last rank sends arrive as zeros."""
    real = thread_arithmetic.ARITHMETIC["all_to_all_single"]

    def exchanged(calls: Sequence[thread_arithmetic.Call]) -> None:
        (values,) = calls[-1].inputs[0]
        lost = replace(calls[-1], inputs=[[torch.zeros_like(values)]])
        real([*calls[:-1], lost] if values.is_floating_point() else calls)

    patch.setitem(thread_arithmetic.ARITHMETIC, "all_to_all_single", exchanged)


def rounded_messages(patch: pytest.MonkeyPatch) -> None:
    """Values arrive in half precision."""
    real = thread_arithmetic.copy

    def copy(target: Tensor, source: Tensor) -> None:
        real(target, source.half().to(source.dtype) if source.dtype == torch.float64 else source)

    patch.setattr("distributed.communication.thread_group.copy", copy)


BROKEN: list[tuple[str, Callable[[pytest.MonkeyPatch], None], str]] = [
    ("tensor-2", without_last_sum, "computes something else"),
    ("dp2-tp2", without_last_sum, "computes something else"),
    ("pipeline-1f1b", rounded_messages, "computes something else"),
    ("context-ulysses", without_last_rows, "computes something else"),
    ("expert", without_last_rows, "computes something else"),
    ("fsdp-2", without_last_sum, ""),
    ("ddp-2", without_last_sum, ""),
]
"""(mesh, what its group does, what the refusal before the first step says; empty where weights show it)."""


@pytest.mark.parametrize(("mesh", "broken", "refusal"), BROKEN)
def test_what_a_group_loses_is_seen(
    mesh: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    refusal: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken(monkeypatch)
    if refusal:
        with pytest.raises(UserError, match=refusal):
            distance_from_serial(mesh)
    else:
        assert distance_from_serial(mesh) > 1e-4


# -- what belongs to each rank -------------------------------------------------------------------------------


def with_dropout() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 3)).double()


def trained(factory: Any, pool: RankPool | None, **given: Any) -> nn.Module:
    model = factory()
    trainer = make_trainer(model, 2, pool, backend="pytorch-ddp", batch_size=4, learning_rate=0.05, **given)
    trainer.fit(problem(24), epochs=2)
    return model


def test_each_rank_draws_its_own_numbers(rank_pool: RankPool) -> None:
    """Masks of dropout are those of processes, which a rank that drew the other's would change."""
    threads, processes = trained(with_dropout, None, launch="threads"), trained(with_dropout, rank_pool)
    assert distance(threads, processes) < EXACT


def test_shared_generators_are_seen(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankState, "restore", lambda self, state: None)
    threads, processes = trained(with_dropout, None, launch="threads"), trained(with_dropout, rank_pool)
    assert distance(threads, processes) > 1e-4


def switches() -> list[Any]:
    return [
        torch.backends.mha.get_fastpath_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        sys.excepthook,
        list(warnings.filters),
        random.getstate(),
        torch.get_rng_state().tolist(),
        threading.active_count(),
        dist.is_initialized(),
    ]


def test_a_run_leaves_the_process_as_it_was() -> None:
    before = switches()
    trained(small_model, None, launch="threads", deterministic=True)
    assert distance_from_serial("tensor-2") < EXACT
    assert switches() == before


def test_a_second_fit_continues() -> None:
    model, once = small_model(), small_model()
    for each, epochs in ((model, (1, 1)), (once, (2,))):
        trainer = make_trainer(each, 2, backend="pytorch-ddp", launch="threads", batch_size=4)
        for number in epochs:
            trainer.fit(problem(24), epochs=number)
    assert distance(model, once) < EXACT


# -- failures and refusals -----------------------------------------------------------------------------------


class Fails(Callback):
    """Raises on rank 1 after its second step."""

    all_ranks = True

    def on_step_end(self, context: Any) -> None:
        if context.world.rank == 1 and context.progress.step == 2:
            raise ArithmeticError("on purpose")


def test_the_rank_that_failed_is_named() -> None:
    trainer = make_trainer(
        small_model(), 3, backend="pytorch-ddp", launch="threads", batch_size=2, callbacks=[Fails()]
    )
    with pytest.raises(WorkerError, match="ArithmeticError: on purpose") as caught:
        trainer.fit(problem(24))
    assert (caught.value.rank, caught.value.exc_type) == (1, "ArithmeticError")
    assert "on_step_end" in caught.value.worker_traceback


class Hangs(Callback):
    """Rank 1 does not come back from its second step until `RELEASED`."""

    all_ranks = True

    def on_step_end(self, context: Any) -> None:
        if context.world.rank == 1 and context.progress.step == 2:
            RELEASED.wait()


RELEASED = threading.Event()


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    trainer = make_trainer(
        small_model(),
        2,
        backend="pytorch-ddp",
        launch="threads",
        batch_size=2,
        collective_timeout=1,
        callbacks=[Hangs()],
    )
    try:
        with pytest.raises(WorkerError, match="did not wait for another rank") as caught:
            trainer.fit(problem(24))
    finally:
        RELEASED.set()
    assert caught.value.rank == 1
    assert "RELEASED.wait()" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_nodes": 2}, "num_nodes"),
        ({"communication_backend": "gloo"}, "communication_backend"),
        ({"compile": "blocks"}, "compile"),
        ({"checkpoint_dir": "checkpoints"}, "checkpoint_dir"),
        ({"low_communication": {"mode": "local-sgd", "period": 2}}, "low_communication.mode"),
        ({"profile": {"enabled": True}}, "profile.enabled"),
        ({"batch_size": "auto", "global_batch_size": 8}, "batch_size"),
        ({"backend": "deepspeed"}, "launch"),
        ({"backend": "serial"}, "launch"),
    ],
)
def test_what_threads_cannot_do_is_refused(given: dict[str, Any], field: str) -> None:
    config = DistributedConfig(**{"launch": "threads", "num_processes": 2, "backend": "pytorch-ddp", **given})
    with pytest.raises(UserError) as caught:
        resolve(config, get_catalog(), Facts(), Resources(0))
    assert caught.value.field == field


def test_threads_share_a_gpu_and_a_launcher_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DistributedConfig(launch="threads", num_processes=4, device="cuda", parallel={"tensor": 2})
    plan = resolve(config, get_catalog(), Facts(), Resources(1))
    assert (plan.mode, plan.device, plan.communication_backend) == ("spawn", "cuda", "threads")
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert isinstance(Trainer(small_model(), launch="threads", num_processes=2, device="cpu"), Trainer)
    assert distance(trained(small_model, None, launch="threads"), small_model()) > 1e-4

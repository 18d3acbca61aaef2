"""Settings of torch that a script makes are those of the ranks that it starts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback, UserError
from distributed.communication.task_file import load_task, save_task
from distributed.communication.torch_settings import (
    apply_settings,
    caller_settings,
    read_settings,
    without_tf32,
)
from distributed.interfaces.callback import Context
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

backends: Any = torch.backends
"""Its modules have attributes that type checkers do not see."""


def put(place: Any, name: str, value: Any) -> Callable[[], None]:
    return partial(setattr, place, name, value)


CHANGES: dict[str, Callable[[], Any]] = {
    "set_float32_matmul_precision": partial(torch.set_float32_matmul_precision, "medium"),
    "matmul.allow_tf32": put(backends.cuda.matmul, "allow_tf32", True),
    "cudnn.allow_tf32": put(backends.cudnn, "allow_tf32", False),
    "fp32_precision": put(backends, "fp32_precision", "tf32"),
    "matmul.fp32_precision": put(backends.cuda.matmul, "fp32_precision", "tf32"),
    "conv.fp32_precision": put(backends.cudnn.conv, "fp32_precision", "ieee"),
    "mkldnn.matmul.fp32_precision": put(backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "cudnn.enabled": put(backends.cudnn, "enabled", False),
    "cudnn.benchmark": put(backends.cudnn, "benchmark", True),
    "cudnn.deterministic": put(backends.cudnn, "deterministic", True),
    "reduced bf16": put(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "reduced fp16": put(backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", (False, False)),
    "fp16 accumulation": put(backends.cuda.matmul, "allow_fp16_accumulation", True),
    "flash": partial(backends.cuda.enable_flash_sdp, False),
    "mem_efficient": partial(backends.cuda.enable_mem_efficient_sdp, False),
    "math": partial(backends.cuda.enable_math_sdp, False),
    "cudnn attention": partial(backends.cuda.enable_cudnn_sdp, False),
    "math reduction": partial(backends.cuda.allow_fp16_bf16_reduction_math_sdp, True),
    "preferred library": partial(backends.cuda.preferred_linalg_library, "cusolver"),
    "fast path": partial(backends.mha.set_fastpath_enabled, False),
    "mkldnn.enabled": put(backends.mkldnn, "enabled", False),
    "mkldnn.deterministic": put(backends.mkldnn, "deterministic", True),
    "nnpack": partial(backends.nnpack.set_flags, False),
    "opt_einsum": put(backends.opt_einsum, "enabled", False),
    "deterministic": partial(torch.use_deterministic_algorithms, True, warn_only=True),
    "fill": put(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "flush_denormal": partial(torch.set_flush_denormal, True),
    "detect_anomaly": partial(torch.autograd.set_detect_anomaly, True, check_nan=False),
    "default_dtype": partial(torch.set_default_dtype, torch.float64),
    "default_device": partial(torch.set_default_device, "cpu"),
}
ABSENT = {"preferred library"}
"""What a build without CUDA refuses to set."""


@pytest.fixture
def restored() -> Iterator[dict[str, Any]]:
    """What was set before, which is put back."""
    before, threads = read_settings(), torch.get_num_threads()
    yield before
    apply_settings(before)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")  # torch warns of older names, of anomaly detection, and of cuSOLVER
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_goes_with_the_task(name: str, restored: dict[str, Any], tmp_path: Path) -> None:
    try:
        CHANGES[name]()
    except RuntimeError:
        assert name in ABSENT
        return
    there = read_settings()
    assert there != restored
    save_task(None, tmp_path / "task")
    apply_settings(restored)
    assert read_settings() == restored
    load_task(tmp_path / "task")
    assert read_settings() == there


def test_the_number_of_threads_goes_where_the_script_has_set_it(
    restored: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    assert caller_settings() == restored  # as OMP_NUM_THREADS asks: ranks share the processors
    torch.set_num_threads(3)
    found = caller_settings()
    torch.set_num_threads(1)
    apply_settings(found)
    assert torch.get_num_threads() == 3


def test_what_torch_does_not_take_is_refused(restored: dict[str, Any]) -> None:
    for settings, said in (
        ({"torch.backends.quantized.engine": "none such"}, "none such"),
        ({"torch.backends.newer": True}, "has no such setting"),
    ):
        with pytest.raises(UserError, match=rf"^{next(iter(settings))}: the script's setting.*{said}"):
            apply_settings(settings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("allowed", ["older name", "newer name", "by default"])
def test_a_block_without_tf32_leaves_what_was_set(allowed: str, restored: dict[str, Any]) -> None:
    if allowed == "older name":
        torch.set_float32_matmul_precision("high")
    elif allowed == "newer name":
        backends.cuda.matmul.fp32_precision = "tf32"
    before = read_settings()
    with without_tf32(), without_tf32():
        inside = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision
    assert inside == ("ieee", "ieee")
    assert read_settings() == before


# -- in ranks ----------------------------------------------------------------------------------------------


class Note(Callback):
    """Writes the settings of each rank to a file."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_step_end(self, context: Context) -> None:
        found = {name: str(value) for name, value in read_settings().items()}
        found["threads"] = str(torch.get_num_threads())
        (self.folder / f"rank-{context.world.rank}").write_text(json.dumps(found), encoding="utf-8")


def build() -> nn.Module:
    """As in many scripts; ``torch.backends.cudnn`` is an object of a class of its own."""
    torch.backends.cudnn.benchmark = True
    return nn.Linear(4, 2)


@pytest.mark.parametrize("backend", ["serial", "pytorch-ddp", "fsdp"])
def test_ranks_compute_as_the_script_has_asked(
    backend: str, restored: dict[str, Any], rank_pool: RankPool, tmp_path: Path
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_num_threads(7)
    ranks = 1 if backend == "serial" else 2
    trainer: Any = make_trainer(
        build, ranks, rank_pool, backend=backend, callbacks=[Note(tmp_path)], global_batch_size=4, max_steps=1
    )
    trainer.fit((torch.randn(8, 4), torch.randint(0, 2, (8,))))
    for rank in range(ranks):
        there = json.loads((tmp_path / f"rank-{rank}").read_text(encoding="utf-8"))
        assert there["torch.set_float32_matmul_precision"] == "high"
        assert there["torch.backends.cuda.enable_flash_sdp"] == "False"
        assert there["torch.backends.cudnn.benchmark"] == "True"
        assert there["threads"] == "7"


def build_unlike() -> nn.Module:
    from torch import distributed

    torch.backends.cudnn.allow_tf32 = distributed.get_rank() == 0
    return nn.Linear(4, 2)


def test_ranks_that_differ_are_refused(restored: dict[str, Any], rank_pool: RankPool) -> None:
    trainer = make_trainer(build_unlike, 2, rank_pool, global_batch_size=4, max_steps=1)
    with pytest.raises(UserError, match=r"cudnn\.allow_tf32: .*False on rank 1 and True on rank 0"):
        trainer.fit((torch.randn(8, 4), torch.randint(0, 2, (8,))))


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (partial(torch.autocast, "cpu", torch.bfloat16), r"mixed_precision: .*mixed_precision=bf16"),
        (torch.no_grad, r"gradients are switched off.*Got 'torch\.no_grad'"),
        (torch.inference_mode, r"gradients are switched off.*Got 'torch\.inference_mode'"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_around_fit_that_ranks_would_not_know_is_refused(
    ranks: int, mode: Callable[[], Any], said: str, rank_pool: RankPool
) -> None:
    trainer = make_trainer(nn.Linear(4, 2), ranks, rank_pool, global_batch_size=4, max_steps=1)
    data = torch.randn(8, 4), torch.randint(0, 2, (8,))
    with mode(), pytest.raises(UserError, match=said):
        trainer.fit(data)
    trainer.fit(data)

"""Every name of the guides runs as the table in docs/coming-from-names.md has it."""

from __future__ import annotations

import argparse
import ast
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import distributed
from distributed import Callback
from distributed.cli import main
from distributed.testing.rank_pool import RankPool
from tests.seeds.row import Row
from tests.seeds.table import BEGIN, END, GUIDES, PAGE, table
from tests.support.training import make_trainer

CASES = [pytest.param(row, id=f"{subject}-{row.name}") for subject, rows in GUIDES.items() for row in rows]
COMMANDS = ("python -m distributed.cli", "horovodrun", "python -m torch", "srun", "torchrun")


class Names(dict[str, Any]):
    """The variables that the guides have, and the names of `distributed`."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        x = torch.randn(24, 6)
        y = x[:, :4].argmax(dim=1)
        model, dataset = nn.Linear(6, 4), TensorDataset(x, y)
        loader = DataLoader(dataset, batch_size=8)
        super().__init__(
            {"x": x, "y": y, "data": x[:8], "target": y[:8], "model": model, "dataset": dataset},
            loader=loader, dataloader=loader, train_loader=loader, val_loader=loader,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(), loss_fn=nn.CrossEntropyLoss(),
            rank=0, world_size=1,
            torch=torch, nn=nn, dist=dist, os=os, argparse=argparse, Path=Path,
            DataLoader=DataLoader, DistributedSampler=DistributedSampler,
        )  # fmt: skip

    def run(self, code: str) -> None:
        """Run `code`; the value of its last expression is ``_``. Only names that occur are imported."""
        for name in {*re.findall(r"\w+", code)} & {*distributed._HOMES}:
            self.setdefault(name, getattr(distributed, name))
        tree = ast.parse(code)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(ast.Module(tree.body[:-1] if last else tree.body, []), "<row>", "exec"), self)
        if last is not None:
            self["_"] = eval(compile(ast.Expression(last.value), "<row>", "eval"), self)


def check(row: Row) -> None:
    """Run the row's code, and compare what it promises."""
    names = Names()
    names.run(row.given)
    names.run(row.code)
    value = names.get("_")
    names.run(row.holds)
    assert names["_"] is True or bool(names["_"]), f"{row.holds}: {value!r}"


class OnRanks(Callback):
    """Checks a row on every rank, in the run's process group."""

    all_ranks = True

    def __init__(self, row: Row) -> None:
        self.row = row

    def on_run_start(self, context: Any) -> None:
        before = torch.get_default_dtype()
        try:
            check(self.row)
        finally:
            torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """MLflow's store, whose tables are made once; Ray, which a row starts, ends with it."""
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    ray = sys.modules.get("ray")
    if ray is not None:
        ray.shutdown()


@pytest.fixture(autouse=True)
def place(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty folder, and no process group or environment that is left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def on_ranks(row: Row, pool: RankPool) -> None:
    trainer = make_trainer(nn.Linear(6, 4), row.ranks, pool, batch_size=8, callbacks=[OnRanks(row)])
    trainer.fit((torch.zeros(16, 6), torch.zeros(16, dtype=torch.long)), max_steps=1)


def command(words: list[str]) -> int:
    """Exit status of a command line of ours, without starting ranks."""
    try:
        return main([*words[3:], *(["--dry-run"] if words[3] == "train" else [])])
    except SystemExit as error:
        return int(error.code or 0)


@pytest.mark.starts_processes
@pytest.mark.parametrize("row", CASES)
def test_a_row_runs_as_it_is_written(row: Row, rank_pool: RankPool) -> None:
    if row.code.startswith(COMMANDS):
        Names().run(row.given)
        assert command(shlex.split(row.code)) == 0
    elif row.ranks:
        on_ranks(row, rank_pool)
    else:
        check(row)


@pytest.mark.starts_processes
@pytest.mark.parametrize("row", [case for case in CASES if case.values[0].error])
def test_what_a_guide_writes_names_what_runs_here(row: Row) -> None:
    names = Names()
    names.run(row.given)
    with pytest.raises(Exception, match=re.escape(row.error)):
        names.run("\n".join([*_imports(row.name), row.there]))


def _imports(name: str) -> list[str]:
    return [f"from distributed import {name}"] if name in distributed._REPLACED else []


# -- the page ------------------------------------------------------------------------------------


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{table()}\n{END}" in text, "run python -m tests.seeds.table"


def test_no_cell_is_empty() -> None:
    cells = [
        cell for line in table().splitlines() if line.startswith("|") for cell in line[1:-1].split(" | ")
    ]
    assert len(cells) > 3 * 80
    assert all(cell.strip() for cell in cells)


def test_every_name_of_the_guides_is_in_the_table() -> None:
    """Public classes and functions that the five guides define or import as their own."""
    written = " ".join(f"{row.name} {row.there}" for rows in GUIDES.values() for row in rows)
    assert [name for name in NAMES.split() if not re.search(rf"\b{name}\b", written)] == []


NAMES = """
setup_distributed cleanup_distributed DistributedSketchedModel train_distributed AdvancedDistributedTrainer
synchronize_sketching_matrices train_epoch PipelineParallelSketchedModel MicrobatchPipelineTrainer
forward_backward_pipeline TensorParallelSKLinear TensorParallelModel HybridParallelTrainer
setup_process_groups create_hybrid_model DistributedMetricsCollector update_metric compute_global_metrics
print_metrics profile_communication_overhead choose_parallelism_strategy SKLinear DistributedTrainer
train_step setup_horovod HorovodTrainer create_distributed_model allreduce_example allgather_example
broadcast_example CustomCommunication ring_allreduce GradientCompression compress_gradients
decompress_gradients OverlappedTrainer train_step_overlapped PerformanceMonitor start_timer end_timer
monitor_training profile_communication create_dataloader RingDistributedDilatedAttention
BlockSparseRingDistributedDilatedAttention DistributedMultiheadDilatedAttention
DistributedImprovedMultiheadDilatedAttention DeepSpeedDilatedAttentionEngine initialize_deepspeed
monitor_memory profile_training_step use_deepspeed zero_stage use_sequence_parallel use_model_parallel
cpu_offload use_gradient_checkpointing use_bf16 use_fp16 train_batch_size micro_batch_size
gradient_accumulation_steps FSDP MixedPrecision ShardingStrategy ColumnParallelLinear gpipe_forward
compress_gradient random_sparse async_checkpoint FileSystemWriter estimate_memory PyTorchDDPTrainer
metric_average RayTrainer TensorFlowDistributedTrainer DistributedConfig DistributedTuner
"""


# -- names that are none ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("TensorParalelModel", "Did you mean 'TensorParallelModel'?"),
        ("SKLinaer", "Did you mean 'SKLinear'?"),
        ("estimate_memry", "Did you mean 'estimate_memory'?"),
        ("gpipe_foward", "Did you mean 'gpipe_forward'?"),
        ("HorovodTrianer", "Did you mean 'HorovodTrainer'?"),
        *((name, text) for name, text in distributed._REPLACED.items()),
    ],
)
def test_a_name_that_is_none_is_answered(name: str, text: str) -> None:
    with pytest.raises(ImportError, match=re.escape(text)):
        exec(f"from distributed import {name}")
    with pytest.raises(AttributeError, match=re.escape(text)):
        getattr(distributed, name)
    assert not hasattr(distributed, name)


def test_modules_and_other_attributes_are_found_as_before() -> None:
    exec("from distributed import config, trainer, trainers")
    with pytest.raises(ImportError, match="cannot import name 'xyz'"):
        exec("from distributed import xyz")
    with pytest.raises(AttributeError, match="no attribute '__wrapped__'"):
        distributed.__wrapped__  # noqa: B018

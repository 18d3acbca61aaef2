"""`bench comm`: table, JSON, wrong results and arguments (under torchrun: test_communication_names)."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Callback
from distributed.cli import main
from distributed.commands.parser import byte_count
from distributed.communication.collective_costs import OPERATIONS
from distributed.errors import UserError, WorkerError
from distributed.operations.bench import comm_rank
from distributed.operations.bench.collectives import Collective
from distributed.operations.bench.comm import Plan, Report, Row, check_memory
from distributed.operations.bench.comm_page import cells_of, headline
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

RANKS = 3
FACTORS = {
    "all-reduce": 2 * (RANKS - 1) / RANKS,
    "reduce-scatter": (RANKS - 1) / RANKS,
    "all-gather": (RANKS - 1) / RANKS,
    "broadcast": 1,
    "all-to-all": (RANKS - 1) / RANKS,
    "send-recv": 1,
}
"""busbw / algbw, from PERFORMANCE.md of nccl-tests."""


@pytest.mark.starts_processes
def test_every_operation_is_measured_on_ranks_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "comm.html"
    flags = "--num-processes 3 --device cpu --algorithm all --dtype float64 --iterations 3 --warmup 1 --json"
    sizes = "--min-bytes 1K --max-bytes 300K --factor 300"
    assert main(["bench", "comm", *flags.split(), *sizes.split(), "--output", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ranks"], found["hosts"], found["transport"]) == (RANKS, 1, "gloo")
    rows = found["rows"]
    named = [("all-reduce", name) for name in ("library", "ring", "tree", "halving-doubling")]
    assert list(dict.fromkeys((row["operation"], row["algorithm"]) for row in rows)) == [
        *named,
        *((operation, "library") for operation in OPERATIONS[1:]),
    ]
    for row in rows:
        assert len(row["seconds"]) == 3
        assert row["median"] == median(row["seconds"])
        assert row["algbw"] == pytest.approx(row["nbytes"] / row["median"])
        assert row["busbw"] == pytest.approx(row["algbw"] * FACTORS[row["operation"]])
        # Equal parts: of 1 KiB in float64, the ranks share 126 elements of 128.
        assert row["nbytes"] == row["count"] * 8 <= row["nbytes"] + 8 * RANKS
        if row["nbytes"] > 2**18 and row["operation"] != "reduce-scatter":
            assert row["sent"] == pytest.approx(row["formula"], rel=0.02)
    # gloo sends as much for a reduce-scatter as for an all-reduce, which the page says.
    sent = {row["operation"]: row["sent"] for row in rows if row["nbytes"] > 2**18}
    assert sent["reduce-scatter"] == pytest.approx(sent["all-reduce"], rel=0.02)
    text = page.read_text()
    assert "convention of nccl-tests" in text
    assert "3 ranks on 1 host, gloo between CPUs, float64" in text
    assert "halving-doubling" in text


# -- wrong results -------------------------------------------------------------------------------------------


class Broken(Collective):
    """A transport that changes one element of what rank 1 receives."""

    def run(self) -> None:
        super().run()
        if self._peers.rank == 1:
            self._got[-1] += 1


class Misplaced(Collective):
    """A transport that gives the parts of its result in another order."""

    def run(self) -> None:
        super().run()
        half = self._got.numel() // 2
        self._got.copy_(self._got.roll(half))


class Measures(Callback):
    """Measures every operation on every rank, sound and broken."""

    all_ranks = True

    def on_run_start(self, context: Any) -> None:
        plan, world = Plan(sizes=[4096], warmup=1, iterations=2), context.world
        for operation in OPERATIONS:
            case = (plan, operation, "library", 4096, "gloo", world)
            assert comm_rank._measure(*case).num_ranks == world.size
            for broken in (Broken, Misplaced):
                comm_rank.Collective = broken  # type: ignore[misc]
                try:
                    with pytest.raises(WorkerError, match=r"wrong result of .* on rank . \(") as caught:
                        comm_rank._measure(*case)
                    assert caught.value.rank == (1 if broken is Broken else 0)
                finally:
                    comm_rank.Collective = Collective  # type: ignore[misc]


def test_a_wrong_result_is_an_error_that_names_the_rank(rank_pool: RankPool) -> None:
    make_trainer(
        nn.Linear(1, 1),
        2,
        rank_pool,
        batch_size=1,
        backend="pytorch-ddp",
        loss_fn=nn.MSELoss(),
        callbacks=[Measures()],
    ).fit((torch.zeros(2, 1), torch.zeros(2, 1)), max_steps=1)


# -- arguments and cells -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--num-processes", "1"], "--num-processes: a single rank has no other to communicate with. Got 1."),
        (["--min-bytes", "2M", "--max-bytes", "1M"], "--min-bytes: the smallest size is above the largest"),
        (
            ["--operations", "allreduce"],
            "--operations: bench comm has no 'allreduce'. Did you mean 'all-reduce'?",
        ),
        (["--operations", ","], "--operations: takes names"),
        (["--algorithm", "rings"], "--algorithm: bench comm has no 'rings'. Did you mean 'ring'?"),
        (["--algorithm", "ring", "--operations", "broadcast"], "Add all-reduce to --operations"),
        (["--dtype", "fp32"], "Did you mean 'float32'?"),
        (["--dtype", "int8,int32"], "--dtype: takes one name"),
        (["--max-bytes", "1X"], "--max-bytes: not a number of bytes. Got '1X'. Allowed: 512, 64K"),
        (["--min-bytes", "0"], "--min-bytes: not a number of bytes"),
        (["--factor", "1"], "--factor: sizes that do not grow"),
        (["--iterations", "0"], "--iterations: must be a positive integer"),
        (["--warmup", "-1"], "--warmup: must be a positive integer"),
        (["--max-bytes", "900000G"], "--max-bytes: 2 ranks with 4 buffers each need"),
        (
            ["--set", "num_nodes=2", "--set", "node_rank=0", "--set", "rdzv_endpoint=a:1"],
            "torchrun on each host",
        ),
        (["--set", "world=3"], "--set: unknown configuration field 'world'"),
    ],
)
def test_wrong_arguments_are_refused_before_ranks_start(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "comm", "--device", "cpu", *flags]) == 2
    assert text in capsys.readouterr().err


def test_sizes_are_those_of_nccl_tests() -> None:
    texts = ("512", "64K", "1m", "2G", "3KiB", "4 MB")
    assert [byte_count(text, "--max-bytes") for text in texts] == [512, 2**16, 2**20, 2**31, 3 * 2**10, 2**22]
    with pytest.raises(UserError, match=r"--max-bytes: not a number of bytes\. Got '1\.5M'"):
        byte_count("1.5M", "--max-bytes")


def test_memory_is_checked_for_all_ranks_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    memory = type("Memory", (), {"available": 32 * 2**20})()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    check_memory(Plan(sizes=[1, 2**20]), 8)
    with pytest.raises(UserError, match=r"9 ranks with 4 buffers.*at most 932,067"):
        check_memory(Plan(sizes=[1, 2**20]), 9)


def test_cells_have_units_and_no_exponents() -> None:
    plan = Plan(sizes=[2**20], iterations=1, warmup=2)
    row = Row("all-reduce", "ring", 2**20, 2**18, 4, [1e-3, 4e-3, 2e-3], None, 1.5 * 2**20)
    assert cells_of(row)[2:] == [
        "1M",
        "2,000.0",
        "1,000.0 to 4,000.0",
        "0.524",
        "0.786",
        "ok",
        "",
        "1,572,864",
    ]
    slow = Row("broadcast", "library", 1000, 250, 4, [3.0], 750.0, 750.0)
    assert cells_of(slow)[2:] == [
        *("1000", "3,000,000.0", "3,000,000.0 to 3,000,000.0", "0.000000333", "0.000000333", "ok"),
        *("750", "750"),
    ]
    report = Report(plan, "nccl", "cuda", 8, 2, [row])
    assert headline(report) == "8 ranks on 2 hosts, nccl between GPUs, float32; 1 timed call after 2"

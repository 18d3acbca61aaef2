"""The GPU program runs on the CPU with small sizes, and says so where a row fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tests.gpu import bootstrap, probes, report
from tests.gpu.bootstrap import ROOT
from tests.gpu.catalog import CHECKS
from tests.gpu.checks import NEEDS_GPU, NOT_DRY, Check, Row, Settings, decide, rows_of
from tests.gpu.runner import Results, run_checks
from tests.gpu.worker import Notes, run_check

PAGE = ROOT / "docs" / "benchmarks-gpu.md"


def run(output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", "--output", str(output), *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.starts_processes
@pytest.mark.timeout(900)  # one to three minutes where other programs run beside it
def test_every_row_passes_but_those_that_need_a_gpu(tmp_path: Path) -> None:
    done = run(tmp_path / "results.json", "--dry-run", "--scratch", str(tmp_path / "scratch"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["name"]: row for row in json.loads((tmp_path / "results.json").read_text())["rows"]}
    for check, row in rows_of(CHECKS):
        became = found[row.name]
        if row.gpu_only or not check.dry:
            assert became["detail"] == (NEEDS_GPU if row.gpu_only else NOT_DRY), became
        else:
            assert became["status"] == "pass", became


@pytest.mark.starts_processes
def test_without_a_gpu_a_full_run_says_so(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu", "--output", str(tmp_path / "results.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, "no CUDA device" in done.stderr) == (2, True)


# -- what goes wrong is seen -------------------------------------------------------------


def probe(target: str, *limits: float | None) -> Check:
    rows = tuple(Row(f"probe/{target}/{number}", "x", limit, "") for number, limit in enumerate(limits))
    return Check(f"probe/{target}", f"tests.gpu.probes:{target}", rows)


def became(check: Check, folder: Path) -> list[tuple[str, str]]:
    path = folder / f"{check.name.replace('/', '-')}.jsonl"
    run_check(check, Settings("cpu", 0, True, str(folder)), Notes(path))
    return [(row["status"], row.get("detail", "")) for row in map(json.loads, path.read_text().splitlines())]


def test_what_becomes_of_rows(tmp_path: Path) -> None:
    """A value beyond its limit fails, NaN fails, an exception is an error of the rows that are left."""
    assert became(probe("values", 1.0, 1.0, 1.0, None), tmp_path) == [
        ("pass", "one"), ("fail", "two"), ("fail", "nan"), ("pass", "nan")]  # fmt: skip
    assert became(probe("raises", 1.0, 1.0), tmp_path) == [("pass", ""), ("error", "ValueError: first line")]
    assert became(probe("declines", 1.0), tmp_path) == [("skipped", "not here")]


@pytest.mark.starts_processes
def test_a_process_that_dies_or_hangs_takes_only_its_own_rows(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", resume=False)
    setting = Settings("cpu", 0, True, str(tmp_path))
    for check, seconds in zip(probes.CHECKS, (60.0, 8.0), strict=True):
        run_checks([check], setting, results, seconds)
    found = {name: (row["status"], row["detail"]) for name, row in results.rows.items()}
    assert found["probe/dies/0"][0] == found["probe/hangs/0"][0] == "pass"
    assert found["probe/dies/1"] == ("error", "the process was ended by SIGABRT")
    assert found["probe/hangs/1"] == ("error", "no result within 8 s")


def test_a_resumed_run_keeps_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path, resume=False)
    rows = [row for _, row in rows_of(CHECKS)]
    first.add(rows[0], {"status": "pass", "value": 1.0}, path)
    first.add(rows[1], {}, path)
    first.write()
    assert list(Results(path, resume=True).rows) == [rows[0].name]
    assert Results(path, resume=False).rows == {}


def test_nan_and_missing_limits() -> None:
    assert decide(Row("a", "x", None, ""), float("nan")) == "pass"
    assert decide(Row("a", "x", 0, ""), float("nan")) == "fail"


# -- around the run ----------------------------------------------------------------------


def test_a_checkout_needs_no_installation(tmp_path: Path) -> None:
    bootstrap.write_metadata(tmp_path)
    (folder,) = tmp_path.iterdir()
    points = PathDistribution(folder).entry_points
    assert points.select(group="distributed.backends", name="fsdp")
    assert points.select(group="pytest11")


def test_the_page_says_what_each_row_means() -> None:
    """Written by ``python -m tests.gpu --markdown``; what it means is the catalog's."""
    text = PAGE.read_text(encoding="utf-8")
    assert report.page([], {}).partition("## Rows")[2] == text.partition("## Rows")[2]

"""The page of plans in a real browser: every column is on the screen of a desk, and the page fits a phone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import distributed
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.operations.planning.plan_page import write_page
from distributed.planner.estimates.split import Split
from tests.browser.browser import Browser
from tests.browser.test_report_pages import drawn

_HIDDEN = "const box = document.querySelector('.table'); return box.scrollWidth - box.clientWidth"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The longest cells that a plan has: a pipeline with every axis, its schedule, and offloading."""
    sizes = {"parameters": 8e9, "global_batch": 64}
    plans = distributed.plan(sizes, hardware="H100", num_devices=16, mixed_precision="bf16")
    dims = ParallelDims(pipeline=16, data=128, shard=16, context=2, tensor=8)
    split = Split(
        dims, "pytorch-ddp", schedule="interleaved-zero-bubble", offload=True, micro_batch=16,
        num_micro_batches=1024, codec="powersgd",
    )  # fmt: skip
    rows = [replace(row, split=split) for row in plans.rows]
    plans = replace(plans, table=replace(plans.table, plans=rows))
    path = tmp_path_factory.mktemp("plans") / "plans.html"
    write_page(plans, path)
    return path


@pytest.mark.parametrize("width", [1400, 1280])
def test_every_column_is_seen(width: int, page: Path, browser: Browser) -> None:
    visit = browser.open(page.as_uri(), width=width)
    drawn(browser)
    assert (visit.failed, visit.console, visit.overflow) == ([], [], 0)
    assert browser.script("return document.querySelectorAll('.table th').length") >= 10
    assert browser.script(_HIDDEN) == 0


def test_a_phone_scrolls_the_table_in_its_own_box(page: Path, browser: Browser) -> None:
    visit = browser.open(page.as_uri(), width=390)
    assert visit.overflow == 0
    assert browser.script(_HIDDEN) > 0

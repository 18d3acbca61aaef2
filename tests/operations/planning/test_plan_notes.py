"""Notes of a table of plans: memory that may not fit, assumed sizes, the precision of parameters."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import distributed
from distributed.cli import main
from distributed.operations.planning import plan_text
from distributed.operations.planning.plan_page import write_page
from distributed.operations.planning.plans import Plans
from distributed.planner.estimates.ledger import MemoryParts

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 1024, "sequence": 128, "global_batch": 16}


@pytest.fixture(scope="module")
def plans() -> Plans:
    return distributed.plan(SIZES, hardware="H100", num_devices=4, num_plans=4)


def with_memory(plans: Plans, *totals: float) -> Plans:
    """`plans` with rows whose memory is `totals`, in shares of a device."""
    rows = [
        replace(row, memory=MemoryParts(parameters=round(total * plans.profile.memory)))
        for row, total in zip(plans.rows, totals, strict=True)
    ]
    return replace(plans, table=replace(plans.table, plans=rows))


def page_of(plans: Plans, folder: Path) -> str:
    write_page(plans, folder / "page.html")
    return re.sub(r"<[^>]+>", "", (folder / "page.html").read_text(encoding="utf-8"))


# -- memory ------------------------------------------------------------------------------------------


def test_plans_that_may_not_fit_are_named_below_the_table(plans: Plans, tmp_path: Path) -> None:
    """The interval of a formula is a factor of 1.45: half a device surely fits, 0.7 of one may not."""
    pytest.importorskip("plotly")
    shown = with_memory(plans, 0.7, 0.99, 0.5, 0.69)
    assert shown.memory_spread == 0.45
    text = "the upper end of the interval of memory is above the device's for plans 1, 2, 4"
    assert plan_text.uncertainty(shown) == text
    assert shown.to_dict()["uncertain_memory"] == [1, 2, 4]
    assert text in page_of(shown, tmp_path).replace("&#x27;", "'")
    (one, sure) = (with_memory(plans, *totals) for totals in ((0.1, 0.1, 0.8, 0.1), (0.1,) * 4))
    assert str(plan_text.uncertainty(one)).endswith("for plan 3")
    assert plan_text.uncertainty(sure) is None
    assert sure.to_dict()["uncertain_memory"] == []


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    """13e9 parameters with 20 bytes each on 4 devices of 80 GB."""
    words = ["--parameters", "13e9", "--hardware", "H100", "--devices", "4", "--global-batch-size", "4"]
    assert main(["plan", *words]) == 0
    assert "note: the upper end of the interval of memory is above" in capsys.readouterr().out


def test_the_file_says_what_its_memory_leaves_out(plans: Plans) -> None:
    """A line that a YAML reader skips; the table's figure is in it."""
    row, text = plans[1], plans.yaml(1)
    (line,) = [line for line in text.splitlines() if "memory_bytes:" in line]
    assert row.memory.total > row.memory.live
    assert line == (
        f"  memory_bytes: {row.memory.live}  # tensors alone; {row.memory.total} with framework and"
        " fragmentation, as in the table"
    )
    assert yaml.safe_load(text)["planned"]["memory_bytes"] == row.memory.live


# -- sizes that were not given -----------------------------------------------------------------------


def test_assumed_sizes_are_named_with_their_values(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    words = ["--parameters", "8e9", "--heads", "32", "--hardware", "H100", "--devices", "8"]
    page = tmp_path / "page.html"
    assert main(["plan", *words, "--html", str(page)]) == 0
    out = capsys.readouterr().out
    (note,) = [line for line in out.splitlines() if line.startswith("note: not given and assumed: ")]
    values = dict(word.split("=") for word in note.removeprefix("note: not given and assumed: ").split(", "))
    assert set(values) == {
        *("layers", "hidden", "kv_heads", "ffn", "vocabulary", "sequence", "global_batch", "family")
    }
    assert values["kv_heads"] == "32"
    assert (values["sequence"], values["global_batch"], values["family"]) == ("2048", "1", "llama")
    assert note.removeprefix("note: ") in page.read_text(encoding="utf-8")
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["notes"] == [note.removeprefix("note: ")]


def test_sizes_that_are_given_are_no_assumptions() -> None:
    given = {**SIZES, "kv_heads": 2, "ffn": 512, "family": "llama"}
    options: dict[str, Any] = {"hardware": "H100", "num_devices": 2, "num_plans": 1}
    assert distributed.plan(given, **options).notes == ()
    del given["global_batch"]
    assert distributed.plan(given, global_batch_size=1, batch_size=1, **options).notes == ()
    (note,) = distributed.plan(given, **options).notes
    assert note == "not given and assumed: global_batch=1"
    mixture = {**given, "experts": 4, "global_batch": 8}
    assert distributed.plan(mixture, **options).notes == ("not given and assumed: experts_per_token=2",)


# -- precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "mixed_precision", "text"),
    [
        (torch.float32, False, "2 x CPU, fp32, adamw"),
        (torch.float64, False, "2 x CPU, fp64 parameters, adamw"),
        (torch.float32, "bf16", "2 x CPU, bf16, adamw"),
        (torch.bfloat16, False, "2 x CPU, bf16 parameters, adamw"),
    ],
)
def test_the_precision_of_parameters_is_in_the_head(
    dtype: torch.dtype, mixed_precision: Any, text: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1)).to(dtype)
    data = torch.randn(32, 8, dtype=dtype), torch.randn(32, 1, dtype=dtype)
    options: dict[str, Any] = {"hardware": "CPU", "num_devices": 2, "num_plans": 1, "axes": ["data"]}
    plans = distributed.plan(
        model, data, loss_fn=nn.MSELoss(), mixed_precision=mixed_precision, global_batch_size=8, **options
    )
    assert text in plan_text.headline(plans)
    assert plans.to_dict()["precision"] in text

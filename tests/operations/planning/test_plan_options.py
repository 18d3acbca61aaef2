"""Arguments of `distributed.plan` that are no fields of the configuration, and the profile of any CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import distributed
from distributed import UserError
from distributed.operations.planning.options import PlanOptions
from distributed.planner.estimates.hardware import load_profile, shipped_profiles

SIZES = {"layers": 4, "hidden": 256, "heads": 4, "vocabulary": 1024, "sequence": 128, "global_batch": 16}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"num_devices": 2.0}, "num_devices: it has to be a positive integer. Got 2.0"),
        ({"num_devices": True}, "num_devices: it has to be a positive integer. Got True"),
        ({"num_devices": "2"}, "num_devices: it has to be a positive integer. Got '2'"),
        ({"num_devices": 0}, "num_devices: it has to be a positive integer. Got 0"),
        ({"num_plans": 2.5}, "num_plans: it has to be a positive integer. Got 2.5"),
        ({"axes": ["data", "data"]}, "axes: a name is given twice. Got 'data'"),
        ({"axes": []}, "axes: no axis is named"),
        ({"axes": "datas"}, "axes: the mesh has no such axis. Got 'datas'"),
        ({"codecs": ["fp16", "fp16"]}, "codecs: a name is given twice. Got 'fp16'"),
        ({"codecs": "gzip"}, "codecs: no codec is called 'gzip'"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as caught:
        distributed.plan(SIZES, hardware="H100", **given)
    assert str(caught.value).startswith(text)
    assert caught.value.remedy


def test_an_integer_of_numpy_is_a_number_of_devices() -> None:
    number = PlanOptions(num_devices=np.int64(2)).num_devices  # type: ignore[arg-type]
    assert (number, type(number)) == (2, int)


def test_a_string_is_one_name() -> None:
    assert PlanOptions(axes="data", codecs="fp16") == PlanOptions(axes=("data",), codecs=("fp16",))
    options: dict[str, Any] = {"hardware": "H100", "num_devices": 4, "num_plans": 99}
    plans = distributed.plan(SIZES, axes="data", codecs="fp16", **options)
    assert {row.split.dims.data for row in plans.rows} == {4}
    assert {row.split.codec for row in plans.rows} == {"none", "fp16"}


@pytest.mark.parametrize("size", ["auto", 2])
def test_a_micro_batch_that_is_chosen_by_a_run_is_noted(size: Any) -> None:
    given = {**SIZES, "kv_heads": 2, "ffn": 512, "family": "llama"}
    plans = distributed.plan(given, hardware="H100", num_devices=2, axes="data", batch_size=size)
    if size == "auto":
        (note,) = plans.notes
        assert note.startswith("batch_size=auto: every plan has a micro-batch of its own")
        assert isinstance(plans.fields(0)["batch_size"], int), "which a run does not search again"
    else:
        assert plans.notes == ()


def test_assumed_rates_have_an_interval_as_wide_as_they_were_wrong() -> None:
    """docs/planning.md: 22 of 25 steps took a tenth to ten times what the profile CPU predicted."""
    options: dict[str, Any] = {"hardware": "CPU", "num_devices": 2, "num_plans": 3}
    plans = distributed.plan({**SIZES, "global_batch": 2}, **options)
    for row in plans.rows:
        low, high = plans.intervals(row)["time"]
        assert high >= 10 * row.time.total * (1 - 1e-12)
        assert low <= row.time.total / 10 * (1 + 1e-12)
        least, most = plans.intervals(row)["mfu"]
        assert 0.0 < least < row.mfu < most <= 1.0
    assert load_profile("CPU").achievable.spread >= 9.0
    for name in set(shipped_profiles()) - {"CPU"}:
        assert load_profile(name).achievable.spread < 1.0, f"{name} is fitted to runs, or near one that is"

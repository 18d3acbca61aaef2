"""The three functions of the seeds, in the forms in which these call them."""

from __future__ import annotations

import pytest

from distributed import UserError
from distributed.planner.estimates.numbers import model_numbers
from distributed.planner.estimates.quick_answers import (
    choose_parallelism_strategy,
    estimate_memory,
    predict_memory,
    predict_scaling_efficiency,
    scaling_efficiency,
)


def guide(params_b: float, precision: str = "bf16") -> float:
    """The guide's own function."""
    bytes_per_param = 2 if precision == "bf16" else 4
    model_mem = params_b * bytes_per_param
    grad_mem = params_b * bytes_per_param
    opt_mem = params_b * 8
    act_mem = params_b * 2 * bytes_per_param
    return model_mem + grad_mem + opt_mem + act_mem


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [0.1, 7, 70])
def test_estimate_memory_is_the_guides(size: float, precision: str) -> None:
    assert estimate_memory(size, precision) == pytest.approx(guide(size, precision), rel=1e-12)
    assert estimate_memory(size, precision=precision) == estimate_memory(size * 1e9, precision)


def test_predict_memory() -> None:
    """Weights, gradients, two moments and the roots of one of them in the update: 20 bytes a parameter. To
    it come workspaces of 64 MiB; a fifth is reserved besides, and a gigabyte is the libraries'."""
    assert predict_memory(7) == pytest.approx((7 * 20 + 64 * 2**20 / 1e9) * 1.2 + 1)
    assert predict_memory(7, precision="bf16") == predict_memory(7)
    assert predict_memory(7, "fp32") == predict_memory(7)
    sizes = [predict_memory(size) for size in (0.1, 1, 7, 70)]
    assert sizes == sorted(sizes)


def test_a_number_of_parameters_is_taken_as_it_is() -> None:
    assert estimate_memory(num_parameters=50_000) == estimate_memory(50_000 / 1e9)
    assert estimate_memory(num_parameters=50_000) == pytest.approx(50_000 * 16 / 1e9)
    assert estimate_memory(50_000) == pytest.approx(50_000 * 16)
    assert predict_memory(num_parameters=50_000) == predict_memory(50_000 / 1e9)
    assert choose_parallelism_strategy(num_parameters=50_000, num_gpus=1) == ["data_parallel"]
    with pytest.raises(UserError, match=r"params_b, num_parameters: it is given twice\. Got '7 and 9'"):
        estimate_memory(7, num_parameters=9)
    with pytest.raises(UserError, match=r"model_size, num_parameters: it is missing\. .*in billions below"):
        choose_parallelism_strategy(num_gpus=8, memory_per_gpu=80)
    with pytest.raises(UserError, match=r"num_parameters: it has to be a whole number\. Got 0\.5"):
        estimate_memory(num_parameters=0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model_size", "num_gpus", "memory_per_gpu", "first", "absent"),
    [
        (1e8, 8, 80e9, None, None),
        (7e9, 8, 80e9, None, "data_parallel"),
        (7, 8, 80, None, "data_parallel"),
        (70, 64, 80, None, "data_parallel"),
    ],
)
def test_choose_parallelism_strategy(
    model_size: float, num_gpus: int, memory_per_gpu: float, first: str | None, absent: str | None
) -> None:
    strategies = choose_parallelism_strategy(model_size, num_gpus, memory_per_gpu)
    assert strategies
    assert absent not in strategies
    known = {"data_parallel", "sharded_data_parallel", "tensor_parallel", "model_parallel", "hybrid_parallel"}
    assert set(strategies) <= known
    assert len(set(strategies)) == len(strategies)


def test_a_small_model_is_fastest_as_copies() -> None:
    assert choose_parallelism_strategy(1e8, 8, 80e9)[0] in ("data_parallel", "sharded_data_parallel")
    assert "data_parallel" in choose_parallelism_strategy(1e8, 8, 80e9)
    assert choose_parallelism_strategy(1e8, 1, 80e9) == ["data_parallel"]


def test_units_may_be_billions_and_gigabytes() -> None:
    assert choose_parallelism_strategy(7e9, 8, 80e9) == choose_parallelism_strategy(7, 8, 80)


def test_a_model_that_fits_nowhere_names_a_cluster() -> None:
    with pytest.raises(UserError, match=r"^num_gpus: the model does not fit.*devices of this kind"):
        choose_parallelism_strategy(70e9, 2, 80e9)


def test_scaling_efficiency() -> None:
    """The guide's formula: (Time_1GPU / Time_NGPU) / N."""
    assert scaling_efficiency(100.0, 12.5, 8) == 1.0
    assert scaling_efficiency(100.0, 25.0, 8) == 0.5


def test_predicted_scaling_efficiency() -> None:
    numbers = model_numbers(layers=24, hidden=2048, heads=16, global_batch=64)
    few, many = (predict_scaling_efficiency(numbers, "A100", n) for n in (2, 64))
    assert 0.0 < many < few <= 1.05


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_values_that_cannot_be_are_refused(value: float) -> None:
    for estimate in (estimate_memory, predict_memory):
        with pytest.raises(UserError):
            estimate(value)
    with pytest.raises(UserError):
        choose_parallelism_strategy(7, 8, value)
    with pytest.raises(UserError):
        scaling_efficiency(1.0, value, 8)
    with pytest.raises(UserError, match="bf16"):
        estimate_memory(7, "int3")


def test_sizes_are_in_units_or_in_billions() -> None:
    assert estimate_memory(7e9) == estimate_memory(7)
    assert choose_parallelism_strategy(7e9, 8, 80e9) == choose_parallelism_strategy(7, 8, 80)


def test_what_is_no_number_of_devices_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_gpus: it has to be a whole number. Got 2.5"):
        choose_parallelism_strategy(7, 2.5, 80)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="num_gpus: it has to be a whole number"):
        scaling_efficiency(100.0, 14.0, 8.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="params_b: it has to be a positive number"):
        estimate_memory("7b")  # type: ignore[arg-type]


def test_a_truth_value_is_no_number() -> None:
    wrong = (
        lambda: estimate_memory(True),
        lambda: predict_memory(True),
        lambda: estimate_memory(num_parameters=True),
        lambda: choose_parallelism_strategy(True, 8, 80),
        lambda: choose_parallelism_strategy(7, True, 80),
        lambda: choose_parallelism_strategy(7, 8, True),
        lambda: scaling_efficiency(True, 1.0, 8),
        lambda: scaling_efficiency(1.0, True, 8),
        lambda: scaling_efficiency(1.0, 1.0, True),
    )
    for call in wrong:
        with pytest.raises(UserError, match=r"it has to be a positive number. Got True"):
            call()


def test_a_number_of_devices_may_be_a_float_of_a_whole_number() -> None:
    assert choose_parallelism_strategy(7, 8.0, 80) == choose_parallelism_strategy(7, 8, 80)  # type: ignore[arg-type]

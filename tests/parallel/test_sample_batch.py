"""The forward pass with the first samples: where it computes, and how exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distributed.data import Source
from distributed.interfaces.task import Task
from distributed.parallel.cut_check import CutCheck
from distributed.parallel.sample_batch import forward_of


def task_of(**given: Any) -> Task:
    data = TensorDataset(torch.ones(3, 4), torch.zeros(3))
    return Task(model=None, train_data=Source.of(data, "train_loader"), **given)


def test_samples_are_where_the_model_is_when_it_is_called() -> None:
    """Layers that are cut lie on the ranks' GPUs, and the samples were read before. The meta device takes the
    place of a GPU."""
    model = nn.Linear(4, 2)
    forward, batch = forward_of(task_of(), model)
    assert [forward().device.type, batch[0].device.type] == ["cpu", "cpu"]
    model.to("meta")
    assert forward().device.type == "meta"


def test_samples_go_to_the_device_that_is_given() -> None:
    """The first parameter of a later stage is on the meta device."""
    task = task_of(training_step=lambda _, batch: batch[0])
    forward, _ = forward_of(task, nn.Linear(4, 2, device="meta"), device="cpu")
    assert forward().device.type == "cpu"


@pytest.mark.parametrize("precision", [None, "ieee", "tf32"])
def test_outputs_are_compared_without_tf32(precision: str | None) -> None:
    """torch raises an error where older names of these settings are read after newer ones were set."""
    convolutions: Any = torch.backends.cudnn.conv
    products: Any = torch.backends.cuda.matmul
    default = convolutions.fp32_precision
    convolutions.fp32_precision = before = precision or default
    seen: list[str] = []

    def forward() -> Tensor:
        seen.extend([convolutions.fp32_precision, products.fp32_precision])
        return torch.zeros(1)

    try:
        CutCheck(nn.Linear(1, 1), forward, "parallel.tensor")
        assert convolutions.fp32_precision == before
    finally:
        convolutions.fp32_precision = default
    assert seen == ["ieee", "ieee"]

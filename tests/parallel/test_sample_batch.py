"""The forward pass with the first samples follows the model to its device."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.data import Source
from distributed.interfaces.task import Task
from distributed.parallel.sample_batch import forward_of


def test_samples_are_where_the_model_is_when_it_is_called() -> None:
    """Layers that are cut lie on the ranks' GPUs, and the samples were read before. The meta device takes the
    place of a GPU."""
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.ones(3, 4), torch.zeros(3))
    forward, batch = forward_of(Task(model=model, train_data=Source.of(data, "train_loader")), model)
    assert [forward().device.type, batch[0].device.type] == ["cpu", "cpu"]
    model.to("meta")
    assert forward().device.type == "meta"

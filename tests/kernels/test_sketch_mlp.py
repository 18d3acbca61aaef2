"""SketchedMLP: ranks as shares of each layer's inputs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from distributed_kernels import DistributedSketchedModel, KernelError, SketchedMLP, SKLinear
from torch import nn


def test_layers() -> None:
    model = SketchedMLP(64, [256, 128], 10, [0.5, 0.25, None], train_both=False, seed=5)
    first, second, last = model.model[0], model.model[2], model.model[4]
    assert [type(m) for m in model.model] == [SKLinear, nn.ReLU, SKLinear, nn.ReLU, nn.Linear]
    assert (first.rank, second.rank, last.out_features) == (32, 64, 10)
    assert (first.sketch.seed, second.sketch.seed) == (5, 6)
    x = torch.randn(3, 64)
    expected = last(torch.relu(second(torch.relu(first(x)))))
    torch.testing.assert_close(model(x), expected)


@pytest.mark.slow
def test_the_seeds_call() -> None:
    """Its four ratios for three hidden layers; the last is the output layer's. None saves anything."""
    given: dict[str, Any] = {"input_size": 1024, "hidden_sizes": [512, 256, 128], "output_size": 10}
    with pytest.raises(KernelError, match=r"sketch_ratios\[0\]: rank 512 of 1024 -> 512 is above break-even"):
        SketchedMLP(**given, sketch_ratios=[0.5, 0.6, 0.7, 0.8])
    with pytest.warns(UserWarning, match="save nothing") as caught:
        model = DistributedSketchedModel(**given, sketch_ratios=[0.5, 0.6, 0.7, 0.8])
    (warning,) = caught
    weights = 512 * (1024 + 512) + 307 * (512 + 256) + 179 * (256 + 128) + 102 * (128 + 10)
    dense = 1024 * 512 + 512 * 256 + 256 * 128 + 128 * 10
    assert "4 of 4 sketched layers save nothing: 1024 -> 512 rank 512 (break-even 341)" in str(
        warning.message
    )
    assert f"take {weights / dense:.2f} times the weights of dense ones" in str(warning.message)
    assert warning.filename == __file__
    with pytest.raises(KernelError, match="is above break-even"):
        DistributedSketchedModel(**given, sketch_ratios=[0.5, 0.6, 0.7, 0.8], allow_costly=False)
    assert [m.rank for m in model.model if isinstance(m, SKLinear)] == [512, 307, 179, 102]
    assert model(torch.zeros(2, 1024)).shape == (2, 10)


def test_ratios_that_save_something_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = DistributedSketchedModel(64, [64, 64], 64, [0.25, 0.125])
    assert [m.rank for m in model.model if isinstance(m, SKLinear)] == [16, 8, 8]


def test_one_ratio_less_repeats_the_last() -> None:
    model = SketchedMLP(64, [64, 64], 64, [0.25, 0.125])
    assert [m.rank for m in model.model if isinstance(m, SKLinear)] == [16, 8, 8]


@pytest.mark.parametrize(("into", "out"), [(64, 256), (1000, 10), (7, 300), (4096, 4096)])
def test_the_ratios_that_an_error_names_do_work(into: int, out: int) -> None:
    with pytest.raises(KernelError) as caught:
        SketchedMLP(into, [out], out, [1.5, None])
    low, high = (float(word) for word in caught.value.allowed.split(" to "))
    with torch.device("meta"):
        smallest, largest = (SketchedMLP(into, [out], out, [r, None]).model[0].rank for r in (low, high))
    assert smallest == 1
    assert largest * (into + out) < into * out <= (largest + 1) * (into + out)


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        ([0.5], "Got 1. Allowed: 2 or 3 ratios"),
        ([0.2] * 4, "Got 4. Allowed: 2 or 3 ratios"),
        ([0.2, 0.001, None], "rank 0 of 256 -> 128 is too small. Got 0.001. Allowed: 0.005859 to 0.334"),
        ([0.2, 0.2, 0.2], r"sketch_ratios\[2\]: rank 25 of 128 -> 10 is above break-even, which is rank 9"),
    ],
)
def test_bad_input(ratios: list[float | None], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        SketchedMLP(64, [256, 128], 10, ratios)

"""Errors of the user's model, loss and dataset come with the batch's shapes and the usual remedy."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from distributed import WorkerError
from distributed.testing.rank_pool import RankPool
from tests.support.training import make_trainer

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def notes_of(data: Any, error: type[Exception], **given: Any) -> str:
    trainer = make_trainer(nn.Linear(4, 2), batch_size=4, **given)
    with pytest.raises(error) as caught:
        trainer.fit(*data)
    notes = "\n".join(getattr(caught.value, "__notes__", []))
    del caught
    gc.collect()  # The error's frames hold the loader, and with it workers that hold sockets of the pool.
    return notes


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ((X, Y + 1), IndexError, ["int64 (4,) from 1 to 2", "0 to C - 1"]),
        ((X, Y - 1), IndexError, ["from -1 to 0", "ignore_index"]),
        ((X, Y.int()), RuntimeError, ["int32 (4,)", ".long()"]),
        ((X, Y.bool()), RuntimeError, ["bool (4,)", ".long()"]),
        ((X, Y[:, None]), RuntimeError, ["int64 (4, 1)", "squeeze(1)"]),
        ((X[:, :3], Y), RuntimeError, ["float32 (4, 3)", "weight: float32 (2, 4)", "another size"]),
        ((X.double(), Y), RuntimeError, ["float64 (4, 4)", ".float()"]),
        ((X.long(), Y), RuntimeError, ["int64 (4, 4)", ".float()"]),
    ],
)
def test_errors_of_models_and_losses(data: Any, error: type[Exception], words: list[str]) -> None:
    notes = notes_of((data,), error)
    for word in ["The batch was list of float", *words] if data[0].is_floating_point() else words:
        assert word in notes, notes


def test_errors_of_a_loss_over_numbers() -> None:
    notes = notes_of(((X, Y),), ValueError, loss_fn=nn.BCEWithLogitsLoss())
    assert "int64 (4,)" in notes
    assert "convert them with .float()" in notes


def test_errors_in_validation() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(IndexError) as caught:
        make_trainer(model, batch_size=4).fit((X, Y), (X, Y + 1))
    assert "from 1 to 2" in "".join(caught.value.__notes__)


def test_errors_of_a_rank(rank_pool: RankPool) -> None:
    with pytest.raises(WorkerError) as caught:
        make_trainer(nn.Linear(4, 2), 2, rank_pool, batch_size=2).fit((X[:, :3], Y))
    assert "The batch was list of float32 (2, 3)" in str(caught.value)


class Samples(Dataset[Any]):
    """Samples that `kind` makes unusable."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.change = (lambda x: x) if kind == "lambda" else None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.kind == "long" and index > 5:
            raise IndexError(index)
        if self.kind == "none":
            return None
        unusable = {"ragged": X[index, : 4 - index % 2], "object": object(), "string": str(index)}
        return unusable.get(self.kind, X[index]), Y[index]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("ragged", RuntimeError, "pad_sequence"),
        ("none", TypeError, "a sample, or a part of one, is None"),
        ("object", TypeError, "Return tensors, numbers or strings"),
        ("long", IndexError, "__len__ of the dataset is larger"),
    ],
)
def test_errors_of_datasets(kind: str, error: type[Exception], words: str, workers: int) -> None:
    notes = notes_of((DataLoader(Samples(kind), 4, num_workers=workers),), error)
    assert words in notes
    assert notes.startswith("train_loader: ")


def test_lambdas_do_not_reach_spawned_workers() -> None:
    loader = DataLoader(Samples("lambda"), 4, num_workers=1, multiprocessing_context="spawn")
    assert "set num_workers=0" in notes_of((loader,), AttributeError)


def test_strings_in_a_batch() -> None:
    notes = notes_of((DataLoader(Samples("string"), 4),), TypeError)
    assert "give the DataLoader a collate_fn" in notes

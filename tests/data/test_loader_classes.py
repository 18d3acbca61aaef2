"""Loaders whose class changes what they yield are refused, and not read as if they were torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from distributed.data import Feed, Source
from distributed.errors import UserError

DATA = TensorDataset(torch.arange(12))


class Doubled(DataLoader[Any]):
    """Changes its batches."""

    def __iter__(self) -> Any:
        return ([2 * part for part in batch] for batch in super().__iter__())


class Inherited(Doubled):
    pass


class Iterated(DataLoader[Any]):
    """As torch_geometric's NodeLoader does."""

    def _get_iterator(self) -> Any:
        return super()._get_iterator()


class Named(DataLoader[Any]):
    """Changes nothing that is yielded."""

    title = "train"

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("kind", "method"), [(Doubled, "__iter__"), (Inherited, "__iter__"), (Iterated, "_get_iterator")]
)
@pytest.mark.parametrize("argument", ["train_loader", "val_loader"])
def test_a_loader_with_an_iteration_of_its_own_is_refused(
    kind: type[DataLoader[Any]], method: str, argument: str
) -> None:
    with pytest.raises(UserError, match=f"has its own {method}, which would be ignored") as caught:
        Source.of(kind(DATA, batch_size=4), argument)
    assert caught.value.field == argument
    assert caught.value.got == kind.__name__
    assert "IterableDataset that yields samples" in str(caught.value.remedy)


def test_a_loader_that_only_adds_to_torchs_is_read() -> None:
    source = Source.of(Named(DATA, batch_size=4, shuffle=True), "train_loader")
    assert (source.dataset, source.batch_size, source.order) == (DATA, 4, "random")


def torchdatas_loader() -> DataLoader[Any]:
    """The shape of torchdata's StatefulDataLoader, with its own iteration and random sampler."""

    def draw(self: Any) -> Iterator[int]:
        return iter(torch.randperm(12).tolist())

    module = "torchdata.stateful_dataloader.stateful_dataloader"
    sampler_kind = type(
        "RandomSampler",
        (Sampler,),
        {"__module__": "torchdata.stateful_dataloader.sampler", "__iter__": draw, "replacement": False,
         "_num_samples": None, "__len__": lambda self: 12},
    )  # fmt: skip
    kind = type("StatefulDataLoader", (DataLoader,), {"__module__": module, "__iter__": DataLoader.__iter__})
    return kind(DATA, batch_size=4, sampler=sampler_kind())


def test_torchdatas_loader_is_read_as_torchs() -> None:
    source = Source.of(torchdatas_loader(), "train_loader")
    assert (source.dataset, source.batch_size, source.order) == (DATA, 4, "random")
    ours = Source.of(DataLoader(DATA, batch_size=4, sampler=RandomSampler(DATA)), "train_loader")
    found, expected = (
        [w.micro_batches[0].batch[0].tolist() for w in Feed(s, 4).windows(1)] for s in (source, ours)
    )
    assert found == expected


class Duck:
    """A loader without torch's base class, as those of DALI, FFCV or timm."""

    batch_size = 4

    def __iter__(self) -> Iterator[Any]:
        return iter([])

    def __len__(self) -> int:
        return 3


class IndexedDuck(Duck):
    dataset = DATA

    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize("kind", [Duck, IndexedDuck])
def test_a_loader_of_another_kind_is_refused(kind: Any) -> None:
    with pytest.raises(UserError, match="a loader of this class is not read") as caught:
        Source.of(kind(), "val_loader")
    assert (caught.value.field, caught.value.got) == ("val_loader", kind.__name__)
    assert "DataLoader over a dataset" in str(caught.value.remedy)


def test_a_web_loader_yields_batches_and_no_samples() -> None:
    members = {"__module__": "webdataset.compat", "__iter__": lambda self: iter(())}
    kind = type("WebLoader", (IterableDataset,), members)
    with pytest.raises(UserError, match="a WebLoader yields complete batches"):
        Source.of(kind(), "train_loader")


class Own(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("several", "named"),
    [
        ([DataLoader(DATA), DataLoader(DATA)], "list with DataLoader"),
        ((DataLoader(DATA), None), "tuple with DataLoader"),
        ([Own(), Own()], "list with Own"),
        ({"a": DataLoader(DATA)}, "dict with DataLoader"),
        ([Duck()], "list with Duck"),
    ],
)
def test_several_loaders_are_refused(several: Any, named: str) -> None:
    for argument in ("train_loader", "val_loader"):
        with pytest.raises(UserError, match="several loaders or datasets were given") as caught:
            Source.of(several, argument)
        assert (caught.value.field, caught.value.got) == (argument, named)
        assert "ConcatDataset" in str(caught.value.remedy)


class Table:
    """A sequence of samples with a `dataset` of its own, as a library's may have."""

    dataset = "imagenet"

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_sequences_of_samples_are_still_read() -> None:
    for data in (Table(), [(torch.zeros(2), 1)] * 3, [[1, 2], [3, 4]], list(range(3))):
        assert Source.of(data, "train_loader").length in (2, 3)

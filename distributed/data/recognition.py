"""Recognise loaders and datasets of other libraries, and refuse those that would be read in another way.

They are recognised by their classes' names, because none of these libraries is imported here.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from distributed.data.samplers import inner_samplers
from distributed.errors import UserError

__all__ = ["check_loader", "check_shards", "check_stream", "is_random", "refuse_loaders"]

_STATEFUL_LOADER = "torchdata.stateful_dataloader"
_INSTEAD = (
    "Give a DataLoader over a dataset whose samples are final, with collate_fn for work on batches, or an"
    " IterableDataset that yields samples"
)
_WORLDS = ("num_replicas", "world_size", "num_processes")
"""Names that samplers and streams of libraries give to the number of ranks."""
_FIRST = 8
"""Elements of a sequence that are looked at."""


def check_loader(loader: DataLoader[Any], argument: str) -> None:
    """Raise a UserError for a DataLoader whose class changes what it yields: only its settings are read."""
    for name in ("__iter__", "_get_iterator"):
        owner = next(kind for kind in type(loader).__mro__ if name in vars(kind))
        if owner is not DataLoader and not owner.__module__.startswith(_STATEFUL_LOADER):
            raise UserError(
                f"the class of this DataLoader has its own {name}, which would be ignored: the trainer reads"
                " the dataset, the sampler and the settings of a loader, and draws no batches from it",
                field=argument,
                got=type(loader).__name__,
                allowed="torch.utils.data.DataLoader, or torchdata's StatefulDataLoader",
                remedy=_INSTEAD,
            )


def refuse_loaders(data: Any, argument: str) -> None:
    """Raise a UserError for several loaders, and for a loader that is no DataLoader."""
    several = data if isinstance(data, (list, tuple)) else []
    several = list(data.values()) if isinstance(data, Mapping) else several
    found = [part for part in several[:_FIRST] if isinstance(part, Dataset) or _is_loader(part)]
    if found:
        raise UserError(
            "several loaders or datasets were given, and one is needed",
            field=argument,
            got=f"{type(data).__name__} with {type(found[0]).__name__}",
            allowed="one DataLoader, dataset or set of tensors",
            remedy="Join the datasets with torch.utils.data.ConcatDataset"
            + ("" if argument == "train_loader" else ", or give validation sets by name: {'name': loader}"),
        )
    if _is_loader(data):
        raise UserError(
            "a loader of this class is not read, because its batches cannot be split evenly over the ranks",
            field=argument,
            got=type(data).__name__,
            allowed="torch.utils.data.DataLoader, or torchdata's StatefulDataLoader",
            remedy=_INSTEAD,
        )


def _is_loader(data: Any) -> bool:
    """Whether `data` is a DataLoader, or iterates like one and has its attributes."""
    if isinstance(data, DataLoader):
        return True
    if isinstance(data, (Dataset, type)) or not hasattr(type(data), "__iter__"):
        return False
    named = sum(hasattr(data, name) for name in ("dataset", "batch_size", "sampler", "batch_sampler"))
    return named > (1 if hasattr(type(data), "__getitem__") else 0)


def check_shards(sampler: Any, argument: str) -> None:
    """Raise a UserError for a sampler, or one inside of it, that was made for one of several ranks."""
    for part in inner_samplers(sampler):
        _check_world(part, (*_WORLDS, "num_shards"), "sampler", argument)


def _check_world(part: Any, names: tuple[str, ...], kind: str, argument: str, other: str = "") -> None:
    """Raise a UserError for what states several ranks under one of `names`; `other` is allowed."""
    for name in (*names, *(f"_{name}" for name in names)):
        number = None
        with suppress(Exception):  # a property of the user's class raises anything
            number = getattr(part, name, None)
        if isinstance(number, int) and number > 1:
            raise UserError(
                f"a {kind} made for one of {number} ranks yields a part of the data, which would be"
                " dealt out to the ranks once more",
                field=argument,
                got=f"{type(part).__name__} with {name}={number}",
                allowed=f"a {kind} that yields the samples of all ranks{other}",
                remedy=f"Make it for a world of one ({name}=1), as its rank 0: each rank gets its part",
            )


def check_stream(dataset: Any, argument: str) -> None:
    """Raise a UserError for streams that are known to yield batches, or the samples of one rank alone."""
    kinds = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(dataset).__mro__]
    if ("webdataset", "WebLoader") in kinds:
        raise UserError(
            "a WebLoader yields complete batches, whose samples cannot be split evenly over ranks",
            field=argument,
            got="WebLoader",
            allowed="a dataset that yields single samples",
            remedy="Give the WebDataset, or a torch DataLoader over it with batch_size",
        )
    if isinstance(dataset, IterableDataset) and getattr(dataset, "shards_itself", None) is None:
        other = ", or declares shards_itself: True where each rank makes its own, False where it yields all"
        _check_world(dataset, _WORLDS, "stream", argument, other)
    split = getattr(dataset, "_distributed", None)
    if ("datasets", "IterableDataset") not in kinds or getattr(split, "world_size", 1) == 1:
        return
    if not getattr(dataset, "shards_itself", False):
        raise UserError(
            "the dataset yields the samples of one rank alone, and would be split over the ranks once more",
            field=argument,
            got=f"IterableDataset after split_dataset_by_node for {getattr(split, 'world_size', 1)} ranks",
            allowed="the whole dataset on every rank, or a dataset that declares shards_itself",
            remedy="Leave split_dataset_by_node out, or set shards_itself = True on the dataset",
        )


def is_random(sampler: Any) -> bool:
    """Whether `sampler` is torch's RandomSampler, or the one of torchdata that takes its place."""
    kind = type(sampler)
    return kind is RandomSampler or (
        kind.__name__ == "RandomSampler" and kind.__module__.startswith(_STATEFUL_LOADER)
    )

"""Source: the user's loader, dataset or tensors as a picklable description of the data."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from distributed.data.recognition import check_loader, check_shards, check_stream, is_random, refuse_loaders
from distributed.data.samplers import length_of, size_of_batches
from distributed.errors import UserError
from distributed.system.addresses import check_worker_sockets

logger = logging.getLogger("distributed")

__all__ = ["Source", "validation_sources"]

Order = Literal["sequential", "random", "sampler", "batch_sampler"]
_KEPT = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "prefetch_factor",
    "persistent_workers",
    "multiprocessing_context",
)


@dataclass
class Source:
    """The user's data and how it wants to be read.

    Attributes:
        dataset: map-style or iterable.
        batch_size: the loader's own, per rank; None when it has none.
        order: where the order of samples comes from.
        sampler: the user's sampler or batch sampler, for the orders named after them.
        drop_last: drop the last, smaller global batch.
        collate_fn: makes a batch of a list of samples.
        options: what a DataLoader keeps besides: workers, pinning, ...
        argument: the name of the argument it was given as, for messages.
    """

    dataset: Any
    batch_size: int | None = None
    order: Order = "sequential"
    sampler: Any = None
    drop_last: bool = False
    collate_fn: Any = default_collate
    options: dict[str, Any] = field(default_factory=dict)
    argument: str = "train_loader"

    @classmethod
    def of(
        cls,
        data: Any,
        argument: str,
        shuffle: bool | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Source:
        """Read a DataLoader, a Dataset, tensors, or a sequence of samples.

        Args:
            argument: its name, for messages.
            shuffle: None follows the DataLoader, and shuffles a bare dataset or tensors
                given for training.
            collate_fn: makes a batch of samples of data without a DataLoader.
            options: arguments of a DataLoader over such data.

        Raises:
            UserError: not one of these, empty, or made of tensors of unequal length.
        """
        if isinstance(data, DataLoader):
            check_loader(data, argument)
            source = _of_loader(data, argument)
            if argument == "train_loader":
                _refuse_settings(collate_fn, options)
        else:
            if options and options.get("num_workers"):
                check_worker_sockets()
            dataset = data if collate_fn and isinstance(data, list) else _dataset(data, argument)
            bare: Order = "random" if argument == "train_loader" and _is_map(dataset) else "sequential"
            source = cls(dataset, order=bare, argument=argument)
            source.collate_fn, source.options = collate_fn or default_collate, dict(options or {})
        if shuffle is not None and source.order in ("sequential", "random") and source.is_map:
            source.order = "random" if shuffle else "sequential"
        check_stream(source.dataset, argument)
        _check_length(source)
        return source

    @property
    def is_map(self) -> bool:
        """Whether samples can be asked for by index."""
        return _is_map(self.dataset)

    @property
    def length(self) -> int | None:
        """Samples in an epoch; None if unknown before reading."""
        if not self.is_map:
            return self._stream_length()
        if self.order == "batch_sampler":
            return None
        if self.order == "sampler":
            return length_of(self.sampler)
        return len(self.dataset)

    def _stream_length(self) -> int | None:
        known: int | None = getattr(self.dataset, "num_stream_samples", None)
        # The length of a stream that shards itself may be that of one rank.
        if known is not None or self.shards_itself:
            return known
        return length_of(self.dataset)

    @property
    def shards_itself(self) -> bool:
        """Whether an iterable dataset declares that each rank's stream is that rank's shard."""
        return bool(getattr(self.dataset, "shards_itself", False))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...] | None:
        """The tensors of an in-memory dataset that can be indexed a whole batch at a time."""
        plain = type(self.dataset) is TensorDataset and self.collate_fn is default_collate
        return self.dataset.tensors if plain and not self.options.get("num_workers") else None


def _refuse_settings(collate_fn: Any, options: Mapping[str, Any] | None) -> None:
    """Raise a UserError for settings of a loader beside a DataLoader, which has its own."""
    given = {} if collate_fn is None else {"collate_fn": getattr(collate_fn, "__name__", "a function")}
    for name, value in {**given, **{f"data.{n}": v for n, v in (options or {}).items()}}.items():
        raise UserError(
            "a DataLoader has settings of its own, beside which this one would be ignored",
            field=name,
            got=value,
            allowed="a dataset, tensors or a sequence of samples as train_loader, with this setting",
            remedy=f"Set {name.removeprefix('data.')} in the DataLoader, or give its dataset in place of it",
        )


def validation_sources(data: Any, read: Callable[[Any, str], Any], **reading: Any) -> dict[str, Source]:
    """Validation sets by name; one without a name is called "".

    Args:
        data: as `Source.of` takes it, or a mapping from names to such; None is no set.
        read: (data, argument) -> what `Source.of` takes.
        reading: ``collate_fn`` and ``options`` of `Source.of`.

    Raises:
        UserError: as `Source.of`; or a name contains anything but letters, digits and ``_-.``.
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping) or not data or any(_is_array(part) for part in data.values()):
        return {"": Source.of(read(data, "val_loader"), "val_loader", **reading)}
    wrong = [name for name in data if not re.fullmatch(r"[\w.-]+", str(name))]
    if wrong:
        raise UserError(
            "the name of a validation set is part of the names of its metrics",
            field="val_loader",
            got=wrong[0],
            allowed="letters, digits, _, - and .",
        )
    arguments = {str(name): f"val_loader[{name!r}]" for name in data}
    parts = {str(name): part for name, part in data.items()}
    return {n: Source.of(read(parts[n], argument), argument, **reading) for n, argument in arguments.items()}


def _check_length(source: Source) -> None:
    """Raise a UserError for map-style data without a length, or data of length 0."""
    kind = type(source.dataset).__name__
    if source.is_map and source.order in ("sequential", "random") and not hasattr(source.dataset, "__len__"):
        raise UserError(
            "the dataset has no length, so its samples cannot be split over ranks",
            field=source.argument,
            got=f"{kind} without __len__",
            allowed="a Dataset with __getitem__ and __len__, or an IterableDataset",
        )
    if source.length != 0:
        return
    if source.order == "sampler":
        raise UserError(
            "its sampler draws no sample", field=source.argument, got=type(source.sampler).__name__
        )
    training = source.argument == "train_loader"
    raise UserError(
        f"the dataset is empty, so there is nothing to {'train on' if training else 'validate on'}",
        field=source.argument,
        got=f"{kind} of length 0",
        allowed="a dataset with at least one sample",
        remedy="Check the path and the filter it was built with"
        + ("" if training else ", or leave val_loader out"),
    )


def _is_map(dataset: Any) -> bool:
    return not isinstance(dataset, IterableDataset)


def _tensor(part: Any, argument: str) -> torch.Tensor:
    if str(getattr(part, "dtype", "")) == "object":
        raise UserError(
            "an array holds objects instead of numbers",
            field=argument,
            got="dtype object",
            allowed="arrays of numbers",
            remedy="Convert it, e.g. array.astype('float32')",
        )
    return torch.as_tensor(part)


def _dataset(data: Any, argument: str) -> Any:
    if isinstance(data, Dataset):
        return data
    refuse_loaders(data, argument)
    if type(data).__module__.partition(".")[0] == "pandas":
        raise UserError(
            "a table is indexed by its columns, and samples are rows",
            field=argument,
            got=type(data).__name__,
            allowed="tensors with a row for each sample",
            remedy="Give (torch.tensor(table[inputs].values), torch.tensor(table[target].values))",
        )
    if isinstance(data, torch.Tensor):
        return TensorDataset(data)
    if isinstance(data, (tuple, list)) and data and all(_is_array(part) for part in data):
        parts = [_tensor(part, argument) for part in data]
        lengths = [len(part) if part.dim() else 0 for part in parts]
        _check_columns(data, parts, argument)
        if len(set(lengths)) > 1:
            raise UserError(
                "the tensors differ in length",
                field=argument,
                got=lengths,
                allowed="tensors with the same first dimension",
            )
        return TensorDataset(*parts)
    if isinstance(data, list) and data and looks_like_batch(data[0]):
        logger.warning(
            "%s is a list whose elements look like batches, and each is read as one sample: a batch would"
            " stack several of them. Give the DataLoader itself, or a list of single samples as tuples",
            argument,
        )
    if isinstance(data, Mapping):  # it has a length too, but of columns
        raise UserError(
            "not a readable data source: a mapping is indexed by names of columns, and samples are rows",
            field=argument,
            got=f"{type(data).__name__} with {', '.join(map(repr, list(data)[:4])) or 'no names'}",
            allowed="a Dataset whose samples are mappings; of a mapping of datasets, one of them",
            remedy="Give a Dataset with `__len__`, the number of rows, and `__getitem__`, which returns"
            " {name: column[index] for each column}; datasets.Dataset.from_dict(columns).with_format('torch')"
            " is one",
        )
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str):
        return data
    raise UserError(
        "not a readable data source",
        field=argument,
        got=type(data).__name__,
        allowed="a DataLoader, a Dataset (map-style or iterable), tensors, or a sequence of samples",
        remedy="A generator of batches can be wrapped in an IterableDataset that yields samples",
    )


def _check_columns(data: Any, parts: list[torch.Tensor], argument: str) -> None:
    """Raise a UserError for a list whose tensors may be samples as well as columns."""
    if isinstance(data, list) and len(parts) > 2 and len({(p.dim(), p.dtype) for p in parts}) == 1:
        raise UserError(
            "a list of tensors of one kind may hold a sample in each, or a column of all samples",
            field=argument,
            got=f"a list of {len(parts)} tensors, the first of shape {tuple(parts[0].shape)}",
            allowed="a tuple of columns, such as (inputs, targets), or one tensor of all samples",
            remedy=f"Give tuple({argument}) for columns, and torch.stack({argument}) or a DataLoader over the"
            " list for samples",
        )


def looks_like_batch(sample: Any) -> bool:
    """True for a list of tensors of the same length, as a DataLoader yields them."""
    if not isinstance(sample, list) or not all(isinstance(p, torch.Tensor) and p.dim() for p in sample):
        return False
    return len(sample) > 1 and len({len(part) for part in sample}) == 1 and len(sample[0]) > 1


def _is_array(part: Any) -> bool:
    return isinstance(part, torch.Tensor) or (type(part).__module__ == "numpy" and hasattr(part, "dtype"))


def _of_loader(loader: DataLoader[Any], argument: str) -> Source:
    options = {name: getattr(loader, name) for name in _KEPT if getattr(loader, name, None) is not None}
    if not options.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context"):
            options.pop(name, None)
    else:
        check_worker_sockets()
    source = Source(
        loader.dataset,
        loader.batch_size,
        drop_last=loader.drop_last,
        collate_fn=loader.collate_fn,
        options=options,
        argument=argument,
    )
    if getattr(loader, "next_iter_state", None) is not None:
        raise UserError(
            "the state that was loaded into the loader would be ignored: the trainer keeps its own position",
            field=argument,
            got=f"{type(loader).__name__} after load_state_dict",
            allowed="a loader at its beginning",
            remedy="Give a new loader, and set resume_from_checkpoint=True to continue a run of the trainer",
        )
    if loader.batch_size is None and (not source.is_map or loader.batch_sampler is None):
        raise UserError(
            "a DataLoader with batch_size=None yields complete batches, whose samples cannot be split"
            " evenly over ranks",
            field=argument,
            got="batch_size=None",
            remedy="Let the dataset yield single samples and give the DataLoader a batch_size",
        )
    if source.is_map:
        _read_sampler(source, loader)
    return source


def _read_sampler(source: Source, loader: DataLoader[Any]) -> None:
    sampler = loader.sampler
    if source.batch_size is None:
        batches = loader.batch_sampler
        if type(batches) is not BatchSampler:
            source.order, source.sampler = "batch_sampler", batches
            check_shards(batches, source.argument)
            if source.argument == "train_loader":
                source.batch_size = size_of_batches(batches, source.dataset)
            return
        source.batch_size, source.drop_last, sampler = batches.batch_size, batches.drop_last, batches.sampler
    source.order, source.sampler = _order_of(sampler, source.dataset)
    check_shards(source.sampler, source.argument)


def _order_of(sampler: Any, dataset: Any) -> tuple[Order, Any]:
    drawn_from = getattr(sampler, "dataset", getattr(sampler, "data_source", sampler))
    if drawn_from is not dataset and length_of(drawn_from) != length_of(dataset):
        return "sampler", sampler  # its indices are of other data
    if type(sampler) is SequentialSampler:
        return "sequential", None
    if type(sampler) is DistributedSampler:
        # Its slices are for another number of ranks; only the shuffle flag is kept.
        return ("random" if sampler.shuffle else "sequential"), None
    if is_random(sampler) and not sampler.replacement and sampler._num_samples is None:
        return "random", None
    return "sampler", sampler

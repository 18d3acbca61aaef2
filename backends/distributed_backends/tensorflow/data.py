"""tf.data, Keras datasets and nested arrays as what the one feed deals out, sample by sample (C3 to C5).

A tf.data pipeline travels as its graph. Before each epoch its shuffles are given seeds that follow
from their own seed, or from the run's where they have none, and the epoch: so every rank reads the
same order, and a resumed run continues in it.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distributed.communication.environment import detect
from distributed.config import DistributedConfig
from distributed.data.order import mix
from distributed.errors import UserError
from distributed.system.output import print_line
from distributed_backends.tensorflow.pipeline_graph import (
    graph_of,
    random_ops,
    reseeded,
    restored,
    unseeded_shuffles,
)

__all__ = ["BatchesStream", "NestedArrays", "PipelineStream", "read_data"]

_KEEP_COUNT = ("Prefetch", "Map", "Options", "Cache", "Assert")
_BLOCK = 256
"""Samples read from an unbatched pipeline at once."""


def read_data(data: Any, argument: str, config: DistributedConfig) -> Any:
    """TensorFlow's and Keras's own kinds of data, in a form that `Source.of` reads.

    Args:
        data: a ``tf.data.Dataset``, a function that returns one, a ``keras.utils.PyDataset``,
            (nested) arrays, or anything else, which is given back.
        argument: name of the argument, for messages.
        config: configuration: limits of training, seed, shuffling.

    Raises:
        UserError: an endless pipeline, or one whose order cannot be reproduced.
    """
    make = None
    if inspect.isfunction(data) or (callable(data) and not hasattr(data, "__getitem__")):
        if isinstance(data, (tf.data.Dataset, Dataset, DataLoader)):
            pass
        elif detect(os.environ) is not None:
            # TensorFlow must not start before the rendezvous of the ranks: read there.
            return PipelineStream(None, data, config.seed)
        else:
            make, data = data, data()
    if isinstance(data, tf.data.Dataset):
        return _pipeline(data, make, argument, config)
    if isinstance(data, keras.utils.PyDataset):
        return _batches(data, argument, config)
    if tf.is_tensor(data):
        return data.numpy()
    if isinstance(data, tuple) and data and _is_nested(data):
        return _nested(data, argument, config)
    if isinstance(data, (tuple, list)) and any(tf.is_tensor(part) for part in data):
        return type(data)(part.numpy() if tf.is_tensor(part) else part for part in data)
    return data


def collate(samples: list[Any]) -> Any:
    """Samples of nested arrays as one batch of them."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(collate(list(parts)) for parts in zip(*samples, strict=True))
    return np.stack(samples)


# -- tf.data -----------------------------------------------------------------------------


class PipelineStream(IterableDataset[Any]):
    """A tf.data pipeline, sample by sample, in the same order for the same epoch.

    Args:
        dataset: the pipeline; None where `make` is called in the ranks only.
        make: a function that returns it, for one whose graph cannot travel.
        seed: seed of the run, for shuffles without a seed.

    Attributes:
        num_stream_samples: samples of an epoch, None when unknown before reading.
        batch_size: size of its own batches; None when it yields samples.
    """

    num_stream_samples: int | None = None
    batch_size: int | None = None

    def __init__(self, dataset: Any, make: Callable[[], Any] | None, seed: int) -> None:
        self.seed, self.epoch, self._make, self._dataset = seed, 0, make, None
        self._graph: bytes | None = None
        if dataset is not None:
            self._take(dataset)

    def _take(self, dataset: Any) -> None:
        self._spec = dataset.element_spec
        self.batch_size, self.num_stream_samples = _batching(dataset)
        self._graph = graph_of(dataset)
        self._dataset = dataset if self._graph is None else None

    def set_epoch(self, epoch: int) -> None:
        """Read the order of `epoch` from now on."""
        self.epoch = epoch

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self._graph is None:
            if self._make is None:
                raise TypeError(
                    "a tf.data pipeline that calls Python (from_generator, py_function) cannot leave this"
                    " process; give a function that returns the pipeline"
                )
            state["_dataset"] = None
        return state

    def __iter__(self) -> Iterator[Any]:
        for block in self._blocks().as_numpy_iterator():
            yield from _rows(block)

    def _blocks(self) -> Any:
        """The pipeline of this epoch, its elements batched."""
        if self._graph is None and self._dataset is None:
            assert self._make is not None
            self._take(self._make())
        if self._graph is not None:
            dataset = restored(reseeded(self._graph, mix(self.seed, self.epoch), self.epoch), self._spec)
        else:
            dataset = self._dataset
        options = tf.data.Options()
        options.deterministic = True
        dataset = dataset.with_options(options)
        if self.batch_size is not None:
            return dataset
        known = all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(self._spec))
        return dataset.batch(_BLOCK if known else 1)


def _pipeline(dataset: Any, make: Any, argument: str, config: DistributedConfig) -> Any:
    _check_elements(dataset, argument)
    stream = PipelineStream(dataset, make, config.seed)
    training = argument == "train_loader"
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY and not (training and config.max_steps):
        raise UserError(
            "the pipeline never ends, but an epoch is one pass over it",
            field=argument,
            got="tf.data.Dataset with .repeat()",
            remedy="Leave .repeat() out" + ("" if not training else ", or set max_steps"),
        )
    _check_order(dataset, stream, argument)
    return DataLoader(stream, batch_size=stream.batch_size or _batch_size(config), collate_fn=collate)


def _batch_size(config: DistributedConfig) -> int:
    return config.batch_size if isinstance(config.batch_size, int) else 32


def _check_order(dataset: Any, stream: PipelineStream, argument: str) -> None:
    """Refuse an order that cannot be reproduced; note one that we could seed."""
    if stream._graph is None:
        if unseeded_shuffles(dataset):
            raise UserError(
                "the pipeline shuffles without a seed and calls Python, so that it cannot be given one:"
                " ranks would read different orders, and samples would be repeated and left out",
                field=argument,
                got="Dataset.shuffle without seed",
                remedy="Call shuffle(n, seed=...)",
            )
        return
    drawn = random_ops(stream._graph)
    if drawn:
        print_line(
            f"note: {argument} draws random numbers without a seed ({', '.join(drawn)}); two runs differ in"
            " them. tf.random.stateless_* or a seed make them repeat",
            sys.stdout,
        )


def _check_elements(dataset: Any, argument: str) -> None:
    kinds = {type(spec).__name__ for spec in tf.nest.flatten(dataset.element_spec)} - {"TensorSpec"}
    if kinds:
        raise UserError(
            "samples of these types cannot be split into single samples",
            field=argument,
            got=", ".join(sorted(kinds)),
            allowed="dense tensors",
            remedy="Map them to dense tensors, e.g. with to_tensor() or tf.sparse.to_dense",
        )


def _batching(dataset: Any) -> tuple[int | None, int | None]:
    """(size of the pipeline's batches, None when it yields samples; its samples, None if unknown)."""
    keeps, node = True, dataset
    while node is not None:
        name = type(node).__name__
        if "Unbatch" in name:
            break
        if "Batch" in name and hasattr(node, "_batch_size"):
            size, inputs = int(node._batch_size), node._inputs()
            total = int(inputs[0].cardinality()) if keeps else -1
            if total >= 0 and bool(getattr(node, "_drop_remainder", False)):
                total -= total % size
            return size, total if total >= 0 else None
        keeps = keeps and any(word in name for word in _KEEP_COUNT)
        node = next(iter(node._inputs()), None)
    total = int(dataset.cardinality())
    return None, total if total >= 0 else None


# -- Keras -------------------------------------------------------------------------------


class BatchesStream(IterableDataset[Any]):
    """A Keras PyDataset, whose items are batches, sample by sample.

    Args:
        shuffle: take the batches in an order that follows from seed and epoch, as Keras's own
            fit shuffles batches and not samples.
    """

    def __init__(self, dataset: Any, seed: int, shuffle: bool) -> None:
        self.dataset, self.seed, self.shuffle, self.epoch = dataset, seed, shuffle, 0

    def set_epoch(self, epoch: int) -> None:
        """Read the order of `epoch` from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        length = self.dataset.num_batches
        if length is None:
            raise UserError("the PyDataset never ends", field="train_loader", remedy="Give it a length")
        order: Any = range(length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
            order = torch.randperm(length, generator=generator).tolist()
        for index in order:
            yield from _rows(_arrays(self.dataset[index]))
        self.dataset.on_epoch_end()


def _batches(dataset: Any, argument: str, config: DistributedConfig) -> Any:
    shuffle = argument == "train_loader" and config.data.shuffle is not False
    size = len(tf.nest.flatten(_arrays(dataset[0]))[0])
    stream = BatchesStream(dataset, config.seed, shuffle)
    return DataLoader(stream, batch_size=size, collate_fn=collate)


# -- arrays ------------------------------------------------------------------------------


class NestedArrays(Dataset[Any]):
    """Arrays in tuples and mappings, by sample.

    Args:
        arrays: nested; all of the same first dimension.
    """

    def __init__(self, arrays: Any) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(tf.nest.flatten(self.arrays)[0])

    def __getitem__(self, index: int) -> Any:
        return tf.nest.map_structure(lambda array: array[index], self.arrays)


def _is_nested(data: tuple[Any, ...]) -> bool:
    return any(isinstance(part, (Mapping, tuple, list)) and _holds_arrays(part) for part in data)


def _holds_arrays(part: Any) -> bool:
    leaves = tf.nest.flatten(part)
    return bool(leaves) and all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in leaves)


def _nested(data: Any, argument: str, config: DistributedConfig) -> Any:
    arrays = _arrays(data)
    lengths = sorted({len(array) for array in tf.nest.flatten(arrays)})
    if len(lengths) > 1:
        raise UserError(
            "the arrays differ in length",
            field=argument,
            got=lengths,
            allowed="arrays with the same first dimension",
        )
    shuffle = argument == "train_loader" and config.data.shuffle is not False
    size = _batch_size(config)
    return DataLoader(NestedArrays(arrays), batch_size=size, shuffle=shuffle, collate_fn=collate)


def _arrays(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _arrays(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(_arrays(part) for part in value if part is not None)
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def _rows(block: Any) -> Iterator[Any]:
    leaves = tf.nest.flatten(block)
    for index in range(len(leaves[0])):
        yield tf.nest.map_structure(lambda leaf, at=index: leaf[at], block)

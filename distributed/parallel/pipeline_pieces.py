"""The pieces of micro-batches that are in a pipeline at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distributed.errors import UserError
from distributed.interfaces.backend import MicroBatch, Window
from distributed.planner.pipeline import PipelineShape

__all__ = ["batch_tensors", "check_inputs", "cut_window", "rows_of"]


def rows_of(batch: Any) -> int:
    """Number of samples in a batch, stand-ins included.

    Raises:
        UserError: it holds no tensor with a dimension of samples.
    """
    found = [t for t in batch_tensors(batch) if t.dim()]
    if not found:
        raise UserError(
            "a pipeline reads the number of samples from the tensors of a batch, and this one has none",
            field="train_loader",
            got=f"a batch of type {type(batch).__name__}",
            allowed="tuples, lists and dictionaries of tensors (samples, ...)",
        )
    return found[0].shape[0]


def cut_window(window: Window, shape: PipelineShape) -> Window:
    """Cut each micro-batch into pieces, as many in every window. Where samples are missing, a piece is a
    stand-in: the first sample, with weight zero.

    Raises:
        UserError: a batch cannot be cut.
    """
    pieces: list[MicroBatch] = []
    for batch, num_samples in window.micro_batches:
        if shape.pieces == 1:
            pieces.append(MicroBatch(batch, num_samples))
            continue
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        rows = rows_of(batch)
        _check_cut(batch, rows, shape.pieces)
        for start in range(0, shape.pieces * shape.piece_rows, shape.piece_rows):
            end = min(start + shape.piece_rows, rows)
            # A stand-in has no samples that count, however many rows it has.
            count = min(num_samples, end) - start
            pieces.append(_piece(batch, start, end, count) if count > 0 else _piece(batch, 0, 1, 0))
    while len(pieces) < shape.num_microbatches:
        first = pieces[0].batch
        pieces.append(_piece(first, 0, 1, 0) if shape.pieces > 1 else MicroBatch(first, 0))
    return Window(pieces, window.num_samples)


def check_inputs(batch: Any, expected: tuple[tuple[int, ...], ...]) -> None:
    """Raise a UserError if the tensors of `batch` have other shapes than those of the first samples. All
    stages of a pipeline find the same, so that none waits for another."""
    found = tuple(tuple(t.shape[1:]) for t in batch_tensors(batch))
    if found != expected:
        pairs = zip(found, expected, strict=False)
        own, other = next(((a, b) for a, b in pairs if a != b), (found, expected))
        raise UserError(
            "the samples of a batch have another shape than the first samples of the data, from which the"
            " stages of the pipeline were read",
            field="parallel.pipeline",
            got=str(own),
            allowed=str(other),
            remedy="Pad all samples to one length in the dataset or in collate_fn",
        )


def _piece(batch: Any, start: int, end: int, num_samples: int) -> MicroBatch:
    return MicroBatch(tree_map_only(Tensor, lambda t: t[start:end] if t.dim() else t, batch), num_samples)


def _check_cut(batch: Any, rows: int, pieces: int) -> None:
    for leaf in tree_leaves(batch):
        if leaf is not None and not (isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows):
            what = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise UserError(
                f"a batch of {rows} samples cannot be cut into {pieces} pieces: it holds {what}",
                field="parallel.num_microbatches",
                got=pieces,
                allowed="1, or batches of tensors whose first dimension is that of the samples",
                remedy="Set parallel.num_microbatches=1 and raise gradient_accumulation_steps",
            )


def batch_tensors(batch: Any) -> list[Tensor]:
    """The tensors in a batch, in order."""
    batch = dict(batch) if isinstance(batch, Mapping) else batch
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]

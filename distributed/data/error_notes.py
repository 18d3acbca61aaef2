"""Notes on errors of a data set, a collate function or a worker: what usually helps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from distributed.errors import UserError, remedy_of

__all__ = ["read"]

_REMEDIES = {
    r"stack expects each tensor|cannot be resized|not resizable|equal size": (
        "samples have different shapes, which the default collate function cannot join. Give the DataLoader a"
        " collate_fn that pads them, e.g. with torch.nn.utils.rnn.pad_sequence"
    ),
    r"NoneType": (
        "a sample, or a part of one, is None. Return a sample for every index, and leave the others out of"
        " the dataset's length, or give the DataLoader a collate_fn that replaces them"
    ),
    r"default_collate: batch must contain": (
        "samples hold objects that the default collate function cannot join. Return tensors, numbers or"
        " strings, or give the DataLoader a collate_fn"
    ),
    r"[Cc]an't pickle|cannot pickle|Can't get (local object|attribute)": (
        "workers that are started by spawn receive the dataset by pickle. Define its functions at the top of"
        " a module instead of lambdas, or set num_workers=0"
    ),
    r"exited unexpectedly|killed by signal": (
        "a worker process ended, mostly for want of memory or of shared memory (/dev/shm). Lower num_workers,"
        " or set num_workers=0 to see an error of the dataset itself"
    ),
}
"""What messages contain -> what to do."""
_TOO_LONG = (
    "if the index is beyond the data, __len__ of the dataset is larger than the number of samples that"
    " __getitem__ has"
)


def read(loader: Iterable[Any], argument: str) -> Iterator[Any]:
    """The batches of `loader`; an error of its dataset gets the usual remedy as a note.

    Args:
        argument: what the loader was given as.
    """
    try:
        for batch in loader:
            if batch is None:
                raise UserError(
                    "a batch is None",
                    field=argument,
                    got="None",
                    remedy="Return the batch from collate_fn, e.g. (inputs, targets)",
                )
            yield batch
    except UserError:
        raise
    except Exception as error:
        note = remedy_of(error, _REMEDIES) or (_TOO_LONG if isinstance(error, IndexError) else None)
        if note is not None:
            error.add_note(f"{argument}: {note}.")
        raise

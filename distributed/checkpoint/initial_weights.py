"""Weights of a checkpoint as the start of a new run."""

from __future__ import annotations

import logging
import os
from typing import Any

from torch import nn

from distributed.checkpoint.checkpointer import PortableCheckpointer
from distributed.checkpoint.file_names import MANIFEST
from distributed.checkpoint.object_store import located
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import MODEL, few, fill_model, named_tensors, same_tensors
from distributed.errors import UserError

__all__ = ["take_weights"]

logger = logging.getLogger("distributed")


def take_weights(source: str, model: nn.Module, says: bool) -> None:
    """Give the parameters and buffers of `model` the values that a checkpoint has for the same names and
    shapes.

    Args:
        source: path or URL of a checkpoint, or of a directory of checkpoints, of which the newest is read.
        model: where it has no data, nothing is read.
        says: whether to report what does not fit.

    Raises:
        UserError: there is no checkpoint, it is damaged, or nothing of it fits.
    """
    files, path = located(source)
    is_one = files.exists(os.path.join(path, MANIFEST))
    found = path if is_one else PortableCheckpointer(path, keep_last=None).latest()
    if found is None:
        raise UserError(
            "no checkpoint there",
            field="init_from",
            got=path,
            allowed="a checkpoint (step_NNNNNNNN) or a directory of checkpoints",
            remedy="List what a directory holds with `checkpoint ls`",
        )
    reader = PortableReader(found)
    tensors, aliases = named_tensors(model)
    stored, shapes = same_tensors(reader, tensors, aliases), reader.tensors()
    fitting: dict[str, Any] = {
        name: tensors[name]
        for name, saved in stored.items()
        if shapes[MODEL, saved] == tuple(tensors[name].shape)
    }
    if not fitting:
        raise UserError(
            "no parameter of the model has the name and shape of one in the checkpoint",
            field="init_from",
            got=found,
            remedy=f"Give the checkpoint of a model that has, e.g., {few(sorted(tensors))}",
        )
    here = {name: tensor for name, tensor in fitting.items() if not tensor.is_meta}
    fill_model(reader, model, here, stored)
    reader.close()
    left = sorted(tensors.keys() - fitting.keys())
    unused = sorted({n for key, n in shapes if key == MODEL} - {stored[name] for name in fitting})
    if says:
        logger.log(
            logging.WARNING if left or unused else logging.INFO,
            "%d tensors of the model start with the values of %s. As they were built: %s. Not used: %s",
            *(len(fitting), found, few(left), few(unused)),
        )

"""Notes on errors that a model, a loss or a data set raised: what the batch held, and the usual remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from distributed.errors import UserError, remedy_of

__all__ = ["notes_batch"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_MOST = 6
_REMEDIES = {
    r"Target -?\d+ is out of bounds|index out of range in self|class_dim|t < n_classes": (
        "Class indices must be 0 to C - 1 for an output of C classes, and token numbers below the size of the"
        " embedding. Renumber them, or give the last layer or the embedding more entries; set"
        " loss_fn=nn.CrossEntropyLoss(ignore_index=...) for a value that marks padding"
    ),
    r"multi-target not supported|only batches of spatial targets": (
        "Class indices have the output's shape without its class axis: squeeze(1) the targets in the dataset"
    ),
    r"expected target dtype|expected scalar type Long|not implemented for '(Int|Bool|Short|Char)'": (
        "Class indices must be int64: convert the targets in the dataset with .long()"
    ),
    r"Target size \(|can't be cast to the desired output type|shape of the (target|input)": (
        "Targets of this loss must be floating-point numbers of the output's shape: convert them with"
        " .float() and, for an output (N, 1), .unsqueeze(1)"
    ),
    r"must have the same dtype|expected scalar type|should be the same|Input type": (
        "Inputs and parameters must have one dtype: convert the inputs in the dataset (.float()), or the"
        " model (model.double())"
    ),
    r"shapes cannot be multiplied|size mismatch|expected input|normalized_shape|channels": (
        "The model expects inputs of another size: compare the shape of the batch with its first layer"
    ),
    r"must be Tensor, not|object has no attribute '(dim|shape|size|to|float)'": (
        "The default collate function keeps strings and unknown objects as lists: return tensors from the"
        " dataset, or give the DataLoader a collate_fn"
    ),
    r"backward through the graph a second time": (
        "Return the loss without calling backward() on it; the trainer does so. Detach what is kept from one"
        " step to the next"
    ),
}
"""What the messages of torch's errors contain -> what to do."""


def notes_batch(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorate a method ``(self, model, batch, num_samples)``: an error that leaves it has notes on the
    shapes, dtypes and ranges of the batch, and on what usually helps. A `UserError` has its remedy."""

    @wraps(method)
    def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            if not hasattr(error, "__notes__"):
                _, model, batch, *_ = args
                _note(error, batch, model)
            raise

    return call


def _note(error: Exception, batch: Any, model: Any) -> None:
    first = next(model.named_parameters(), None) if isinstance(model, nn.Module) else None
    layer = f" The first parameter is {first[0]}: {_described(first[1])}." if first else ""
    error.add_note(f"The batch was {_described(batch)}.{layer}")
    remedy = remedy_of(error, _REMEDIES)
    if remedy is not None:
        error.add_note(f"{remedy}.")


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{_range(value)}"
    if isinstance(value, Mapping):
        parts = [f"{name}: {_described(part)}" for name, part in list(value.items())[:_MOST]]
        return f"{type(value).__name__} of {', '.join(parts) or 'nothing'}"
    if isinstance(value, (tuple, list)):
        parts = [_described(part) for part in value[:_MOST]]
        return f"{type(value).__name__} of {', '.join(parts) or 'nothing'}"
    return type(value).__name__


def _range(tensor: Tensor) -> str:
    # A device whose kernel has just failed cannot be read, and a subclass may have no values.
    integers = not (tensor.is_floating_point() or tensor.is_complex())
    if not integers or not tensor.numel() or tensor.device.type != "cpu" or type(tensor) is not Tensor:
        return ""
    return f" from {int(tensor.min())} to {int(tensor.max())}"

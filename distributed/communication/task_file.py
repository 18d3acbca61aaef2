"""The task file: a private file for the ranks, whose tensors are mapped rather than copied."""

from __future__ import annotations

import io
import os
import pickle
import sys
from typing import Any

import cloudpickle
import torch

from distributed.communication.objects_by_name import reduce_by_name
from distributed.communication.torch_settings import apply_settings, caller_settings

_LARGE = 1 << 16

_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    "_optimizer_step_pre_hooks": "register_step_pre_hook",
    "_optimizer_step_post_hooks": "register_step_post_hook",
}
"""Hooks of parameters and optimizers that pickling drops, and how each is registered (torch 2.13)."""


def save_task(task: Any, path: str | os.PathLike[str]) -> None:
    """Pickle `task` in one graph: code from ``__main__`` by value, tensors and large NumPy
    arrays as raw bytes that `load_task` maps. torch's settings go with it.

    Raises:
        TypeError, pickle.PicklingError: the task holds an object that cannot be pickled.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        _write(task, file)


def measure_task(task: Any) -> int:
    """Bytes of the file that `save_task` would write.

    Raises:
        TypeError, pickle.PicklingError: as `save_task`.
    """
    counter = _Counter()
    _write(task, counter)
    return counter.count


class _Counter(io.RawIOBase):
    """A file that counts the bytes written to it and keeps none."""

    count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.count += size
        return size


def _write(task: Any, file: Any) -> None:
    torch.save((caller_settings(), task), file, pickle_module=_Cloudpickle, pickle_protocol=5)


def load_task(path: str | os.PathLike[str]) -> Any:
    """Load a task, and set torch as its process had. Tensors are private, copy-on-write views of the file:
    all ranks of a host share one copy in memory until they write. The file may be deleted afterwards.

    This runs the code of the task, which is the caller's own; never use it on a checkpoint.

    Raises:
        UserError: torch does not take a setting of that process here.
    """
    settings, task = torch.load(os.fspath(path), mmap=True, weights_only=False, map_location="cpu")
    apply_settings(settings)
    _register_outputs()
    _name_classes()
    return task


def _name_classes() -> None:
    """Make the script's classes, which came by value, attributes of this process's ``__main__``: a batch or
    an error of such a class passes from a DataLoader's worker to its rank by name."""
    main = sys.modules["__main__"]
    for kind in list(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS):
        if kind.__module__ == "__main__" and kind.__qualname__.isidentifier():
            vars(main).setdefault(kind.__name__, kind)


def _register_outputs() -> None:
    """Let models of transformers return hidden states, attentions and router logits: a class notes which of
    them it can when a model is constructed, and one that was unpickled was not (transformers 5)."""
    library: Any = sys.modules.get("transformers.modeling_utils")
    registry: Any = getattr(library, "_CAN_RECORD_REGISTRY", None)
    classes = [] if registry is None else [library.PreTrainedModel]
    for known in classes:
        registry.setdefault(str(known), known._can_record_outputs)
        classes.extend(known.__subclasses__())


def _is_large(array: Any) -> bool:
    # A tensor cannot be read-only: such an array is pickled.
    return bool(array.nbytes >= _LARGE and array.flags.writeable)


class TaskPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        # A pickled NumPy array would be copied into the file, and from it into every rank.
        if type(obj).__module__ == "numpy" and type(obj).__name__ == "ndarray" and _is_large(obj):
            try:
                return _as_array, (torch.from_numpy(obj),)
            except TypeError:
                pass  # an array of a dtype that torch lacks is pickled
        if isinstance(obj, (torch.nn.Parameter, torch.optim.Optimizer)):
            hooks = {name: table for name in _HOOKS if (table := getattr(obj, name, None))}
            own = _own_attributes(obj)
            if hooks or own:
                reduced: Any = obj.__reduce_ex__(self.proto)
                build, arguments, state = (*reduced, None)[:3]
                return _with_hooks((build, arguments, {**state, **own} if own else state), hooks)
        named = reduce_by_name(obj)
        return super().reducer_override(obj) if named is None else named


def _own_attributes(obj: Any) -> dict[str, Any]:
    """Attributes of an optimizer that torch's ``__getstate__`` drops, such as those that it joins."""
    if getattr(type(obj), "__getstate__", None) is not torch.optim.Optimizer.__getstate__:
        return {}
    of_torch = vars(torch.optim.SGD([torch.zeros(1)], 0.1)).keys() | {"step"}  # which a scheduler wraps
    return {name: value for name, value in vars(obj).items() if name not in of_torch}


def _with_hooks(reduced: tuple[Any, ...], hooks: dict[str, Any]) -> tuple[Any, ...]:
    """`reduced`, the result of ``__reduce_ex__``, with hooks as a part of the state.

    State is pickled after the object itself, so that a hook may refer to the model that holds it.
    """
    build, arguments, state = (*reduced, None)[:3]
    return build, arguments, (state, hooks), None, None, _restore


def _restore(obj: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """The inverse of `_with_hooks`: the object's own state, then its hooks."""
    own, hooks = state
    if own is not None:
        obj.__setstate__(own)
    for name, table in hooks.items():
        for hook in table.values():
            getattr(obj, _HOOKS[name])(hook)


class _Cloudpickle:
    """The pickle module for `torch.save`."""

    Pickler = TaskPickler
    dump = staticmethod(cloudpickle.dump)
    loads = staticmethod(pickle.loads)


def _as_array(tensor: torch.Tensor) -> Any:
    return tensor.numpy()

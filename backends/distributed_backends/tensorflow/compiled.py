"""Call compiled functions without tf.function's search for a trace, which can cost more than a short step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_TENSOR = object()
"""Place of a tensor in a structure."""
_MOST_TRACES = 256


class _UnknownContainer(Exception):
    pass


class Compiled:
    """A function compiled by tf.function, whose traces are looked up by shapes, dtypes and structure.

    tf.function binds the arguments to a signature, and hashes and compares types at every call. Here a trace
    is found in a dictionary and gets its tensors as a flat list.

    Args:
        function: takes nested tuples, lists and dictionaries of tensors; with other containers, the call is
            left to tf.function. What else they hold, such as numbers and None, is constant in a trace and
            must be hashable.
        plain: leave the calls to tf.function, for arguments with a value per replica.
    """

    def __init__(self, function: Callable[..., Any], plain: bool = False) -> None:
        self._function, self._plain = function, plain
        self._by_structure: dict[Any, Any] = {}
        self._traces: dict[Any, Any] = {}
        self._whole = tf.function(function, reduce_retracing=True, autograph=False)

    def __call__(self, *args: Any) -> Any:
        """Results of the function; on the first call of a kind, trace it."""
        if self._plain:
            return self._whole(*args)
        leaves: list[Any] = []
        try:
            structure = _take_apart(args, leaves)
        except _UnknownContainer:
            return self._whole(*args)
        key = (structure, *[(leaf.dtype, *leaf.shape) for leaf in leaves])
        trace = self._traces.get(key)
        if trace is None or tf.config.functions_run_eagerly():
            return self._trace(key, structure, leaves)
        return trace._call_flat(leaves, trace.captured_inputs)

    def forget(self) -> None:
        """Trace again at the next call."""
        self._by_structure.clear()
        self._traces.clear()

    def _trace(self, key: Any, structure: Any, leaves: list[Any]) -> Any:
        if structure not in self._by_structure:
            self._by_structure[structure] = tf.function(
                lambda *parts: self._function(*_put_together(structure, iter(parts))),
                reduce_retracing=True,
                autograph=False,
            )
        function = self._by_structure[structure]
        if tf.config.functions_run_eagerly():
            return function(*leaves)
        if len(self._traces) == _MOST_TRACES:
            self._traces.clear()  # Their own tf.function still has them.
        self._traces[key] = trace = function.get_concrete_function(*leaves)
        return trace._call_flat(leaves, trace.captured_inputs)


def _take_apart(value: Any, leaves: list[Any]) -> Any:
    """The structure of `value`, hashable; its tensors are appended to `leaves`."""
    if isinstance(value, tf.Tensor):
        leaves.append(value)
        return _TENSOR
    if isinstance(value, (tuple, list)):
        return (tuple, *[_take_apart(part, leaves) for part in value])
    if isinstance(value, dict):
        return (dict, tuple(value), *[_take_apart(part, leaves) for part in value.values()])
    if tf.nest.is_nested(value):
        raise _UnknownContainer
    return (None, value)


def _put_together(structure: Any, leaves: Iterator[Any]) -> Any:
    if structure is _TENSOR:
        return next(leaves)
    kind, *rest = structure
    if kind is tuple:
        return tuple(_put_together(part, leaves) for part in rest)
    if kind is dict:
        keys, *parts = rest
        return {key: _put_together(part, leaves) for key, part in zip(keys, parts, strict=True)}
    return rest[0]

"""Python values to JSON and back, exactly, without ever running code on the way back.

JSON's own types stand for themselves. Everything else is an object with the key ``$``, which
names the type, and its content under ``v``. A type that is not listed here is refused with
the path of the offending entry: a checkpoint never drops anything silently.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from distributed.checkpoint.chunk_index import ITEM_SIZES, is_shape
from distributed.errors import UserError
from distributed.system.strict_json import parse_json, shown

__all__ = ["decode", "decode_json", "encode"]

TAG = "$"
_MAX_DEPTH = 64
"""Containers inside each other. Each is up to three levels of JSON, of which `strict_json.MAX_DEPTH` may be
nested."""
_MAX_HEX_DIGITS = 16_384
"""Of an integer beyond 64 bits."""
_ARRAY_DTYPE = re.compile(r"[<|][biufcSU]\d{1,9}")
# Python refuses to print integers of more than 4300 decimal digits; hexadecimal has no limit.
_LARGEST_PLAIN_INT = 2**63
_DICTS = (dict, defaultdict, OrderedDict)


def encode(value: Any, name: str = "state") -> Any:
    """`value` as JSON-able data (``json.dumps(..., allow_nan=False)`` accepts it).

    Takes None, bool, int, float (nan and inf too), str, bytes, list, tuple, set, frozenset, dict with
    keys of any of these, Counter, deque, defaultdict and OrderedDict (they come back as dict), torch
    tensors (they come back on the CPU), NumPy arrays and scalars.

    Args:
        name: what to call it in an error, e.g. ``scheduler``.

    Raises:
        UserError: an entry of another type; names its path, e.g. ``scheduler.anneal_func``.
    """
    return _encode(value, name, ())


def decode(data: Any) -> Any:
    """The inverse of `encode`: same values, same types, same bits.

    Raises:
        ValueError: `data` does not come from `encode`.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if TAG not in data:
        return {key: decode(item) for key, item in data.items()}
    decoder = _DECODERS.get(data[TAG]) if isinstance(data[TAG], str) else None
    if decoder is None:
        raise ValueError(f"unknown type {shown(data[TAG])} in encoded state")
    keys = _KEYS.get(data[TAG], {TAG, "v"})
    if data.keys() != keys:  # What is not read would be lost silently.
        found = f"its keys are {shown(sorted(data))}, not {sorted(keys)}"
        raise ValueError(f"damaged {data[TAG]!r} in encoded state: {found}")
    try:
        return decoder(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged {data[TAG]!r} in encoded state: {shown(error)}") from None


def decode_json(raw: bytes) -> Any:
    """`decode` of a JSON text.

    Raises:
        ValueError: it does not come from `encode`.
    """
    return decode(parse_json(raw))


def _encode(value: Any, path: str, parents: tuple[int, ...]) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < _LARGEST_PLAIN_INT else _encode_large(value, path)
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if kind is bytes:
        return {TAG: "bytes", "v": _text(value)}
    if kind in _CONTAINERS:
        if id(value) in parents:
            raise _refuse(path, "a value that contains itself")
        if len(parents) >= _MAX_DEPTH:
            raise _refuse(path, f"nested deeper than {_MAX_DEPTH} levels")
        return _CONTAINERS[kind](value, path, (*parents, id(value)))
    return _encode_array(value, path)


def _encode_large(value: int, path: str) -> Any:
    text = hex(value)
    if len(text) > _MAX_HEX_DIGITS:
        raise _refuse(path, f"an integer of {value.bit_length():,} bits")
    return {TAG: "int", "v": text}


def _items(value: Iterable[Any], path: str, parents: tuple[int, ...]) -> list[Any]:
    return [_encode(item, f"{path}[{index}]", parents) for index, item in enumerate(value)]


def _encode_tuple(value: tuple[Any, ...], path: str, parents: tuple[int, ...]) -> Any:
    return {TAG: "tuple", "v": _items(value, path, parents)}


def _encode_deque(value: deque[Any], path: str, parents: tuple[int, ...]) -> Any:
    return {TAG: "deque", "v": [value.maxlen, _items(value, path, parents)]}


def _encode_set(value: Iterable[Any], path: str, parents: tuple[int, ...]) -> Any:
    # Sorted, so that the same set always writes the same bytes.
    items = [_encode(item, f"{path}{{{item!r}}}", parents) for item in value]
    return {TAG: type(value).__name__, "v": sorted(items, key=repr)}


def _encode_dict(value: dict[Any, Any], path: str, parents: tuple[int, ...]) -> Any:
    if all(type(key) is str and key != TAG for key in value):
        return {key: _encode(item, _step(path, key), parents) for key, item in value.items()}
    return {TAG: "dict", "v": _pairs(value, path, parents)}


def _encode_counter(value: Counter[Any], path: str, parents: tuple[int, ...]) -> Any:
    return {TAG: "Counter", "v": _pairs(value, path, parents)}


_CONTAINERS: dict[type, Callable[..., Any]] = {
    list: _items,
    tuple: _encode_tuple,
    set: _encode_set,
    frozenset: _encode_set,
    Counter: _encode_counter,
    deque: _encode_deque,
    **dict.fromkeys(_DICTS, _encode_dict),
}


def _pairs(value: dict[Any, Any], path: str, parents: tuple[int, ...]) -> list[Any]:
    return [
        [_encode(key, f"{path}: key {key!r}", parents), _encode(item, _step(path, key), parents)]
        for key, item in value.items()
    ]


def _step(path: str, key: Any) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _encode_array(value: Any, path: str) -> Any:
    """Tensors and arrays. Only a library that is already imported can have made one."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise _refuse(path, f"a {value.layout} tensor on {value.device}")
        if hasattr(value, "device_mesh"):
            raise _refuse(path, "this rank's part of a divided tensor")
        flat = value.detach().reshape(-1).to("cpu", copy=True).contiguous()
        raw = flat.view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in ITEM_SIZES:
            raise _refuse(path, f"a tensor of dtype {dtype}")
        return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "v": _text(raw)}
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
        if value.dtype.kind not in "biufcSU":
            raise _refuse(path, f"a NumPy value of dtype {value.dtype}")
        kind = "ndarray" if isinstance(value, numpy.ndarray) else "scalar"
        little = numpy.asarray(value).astype(value.dtype.newbyteorder("<"))
        shape = list(value.shape)
        return {TAG: kind, "dtype": little.dtype.str, "shape": shape, "v": _text(little.tobytes())}
    raise _refuse(path, f"a {type(value).__module__}.{type(value).__qualname__}")


def _decode_tensor(data: dict[str, Any]) -> Any:
    import torch

    size = ITEM_SIZES.get(data["dtype"]) if isinstance(data["dtype"], str) else None
    if size is None:
        raise ValueError(f"unknown tensor dtype {shown(data['dtype'])} in encoded state")
    raw = bytearray(_bytes(data["v"]))
    _check_size(data, len(raw), size)
    dtype = getattr(torch, data["dtype"])
    flat = torch.frombuffer(raw, dtype=dtype).clone() if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(data["shape"])


def _decode_array(data: dict[str, Any]) -> Any:
    import numpy

    if not isinstance(data["dtype"], str) or not _ARRAY_DTYPE.fullmatch(data["dtype"]):
        raise ValueError(f"unknown array dtype {shown(data['dtype'])} in encoded state")
    dtype = numpy.dtype(data["dtype"])
    raw = _bytes(data["v"])
    _check_size(data, len(raw), dtype.itemsize)
    if not dtype.itemsize and data["shape"] == []:
        return dtype.type()
    if dtype.kind == "U" and (numpy.frombuffer(raw, "<u4") > sys.maxunicode).any():
        raise ValueError("an array of text holds no text in encoded state")
    array = numpy.frombuffer(raw, dtype=dtype).reshape(data["shape"]).astype(dtype.newbyteorder("="))
    if data[TAG] == "ndarray":
        return array
    if data["shape"]:
        raise ValueError("a scalar has a shape in encoded state")
    return array[()]


def _check_size(data: dict[str, Any], nbytes: int, item: int) -> None:
    shape = data["shape"]
    if not is_shape(shape) or math.prod(shape) * item != nbytes:
        raise ValueError(f"{data[TAG]} of shape {shown(shape)} has {nbytes} bytes in encoded state")


def _decode_int(data: dict[str, Any]) -> int:
    text = data["v"]
    if len(text) > _MAX_HEX_DIGITS or not re.fullmatch("-?0x[0-9a-f]+", text):
        raise ValueError(f"no integer: {shown(text)} in encoded state")
    return int(text, 16)


def _decode_float(data: dict[str, Any]) -> float:
    if data["v"] not in ("nan", "inf", "-inf"):
        raise ValueError(f"no number: {shown(data['v'])} in encoded state")
    return float(data["v"])


def _decode_pairs(data: dict[str, Any]) -> dict[Any, Any]:
    pairs = _list(data["v"])
    found = {decode(key): decode(item) for key, item in map(_list, pairs)}
    if len(found) != len(pairs):
        raise ValueError("a key is set twice in encoded state")
    return found


def _decode_counter(data: dict[str, Any]) -> Any:
    return Counter(_decode_pairs(data))


def _decode_items(data: dict[str, Any]) -> list[Any]:
    return [decode(item) for item in _list(data["v"])]


def _decode_deque(data: dict[str, Any]) -> deque[Any]:
    maxlen, items = _list(data["v"])
    found = deque(map(decode, _list(items)), maxlen)
    if len(found) != len(items):
        raise ValueError("a deque is longer than its limit in encoded state")
    return found


def _decode_set(data: dict[str, Any]) -> set[Any]:
    items = _decode_items(data)
    found = set(items)
    if len(found) != len(items):
        raise ValueError("a set holds a value twice in encoded state")
    return found


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{shown(value)} is not a list in encoded state")
    return value


_KEYS = {kind: {TAG, "dtype", "shape", "v"} for kind in ("tensor", "ndarray", "scalar")}
"""Of objects that have others than `TAG` and ``v``."""
_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "bytes": lambda data: _bytes(data["v"]),
    "tuple": lambda data: tuple(_decode_items(data)),
    "set": _decode_set,
    "frozenset": lambda data: frozenset(_decode_set(data)),
    "dict": _decode_pairs,
    "Counter": _decode_counter,
    "deque": _decode_deque,
    "tensor": _decode_tensor,
    "ndarray": _decode_array,
    "scalar": _decode_array,
}


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _refuse(path: str, what: str) -> UserError:
    return UserError(
        f"'{path}' is {what}, which a checkpoint cannot hold: it stores data, never code or pickled objects",
        allowed="numbers, text, bytes, lists, tuples, sets, dicts, tensors and NumPy arrays",
        remedy="Leave it out of the object's state_dict() and set it again where the object is built",
    )

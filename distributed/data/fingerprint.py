"""Digests of samples, by which ranks and restarts compare what they read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

import torch

__all__ = ["fingerprint"]


def fingerprint(samples: Iterable[Any], without: Any = None) -> str:
    """Digest of the tensors, arrays, numbers, texts and bytes in `samples`, and in attributes of objects;
    other things do not count.

    Args:
        without: an object whose attributes do not count.
    """
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        with suppress(RecursionError):  # a list that holds itself
            _add_to_digest(sample, digest, {id(without): without})
    return digest.hexdigest()


def _add_to_digest(value: Any, digest: Any, seen: dict[int, Any]) -> None:
    """`seen`: objects whose attributes are in `digest`, by their identity."""
    if isinstance(value, (tuple, list)):
        for part in value:
            _add_to_digest(part, digest, seen)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _add_to_digest(value[key], digest, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            _add_to_digest(getattr(value, part.name, None), digest, seen)
    elif isinstance(value, torch.Tensor):
        digest.update(_bytes_of(value))
    elif getattr(getattr(value, "dtype", None), "hasobject", False):
        _add_to_digest(value.tolist(), digest, seen)  # an array of objects holds addresses
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    elif isinstance(value, bytes):
        digest.update(value)
    elif isinstance(value, (bool, int, float, str)):
        digest.update(f"{value!r},".encode())
    elif not isinstance(value, (type, ModuleType)) and id(value) not in seen:
        seen[id(value)] = value
        _add_to_digest(getattr(value, "__dict__", None), digest, seen)


def _bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a dense tensor; of another only its layout, which is compared all the same."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return repr((tensor.layout, tensor.dtype)).encode()
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten()
    found: bytes = plain.view(torch.uint8).numpy().tobytes()
    return found

"""Whether two readings of data found the same: a digest of samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["fingerprint"]


def fingerprint(samples: Iterable[Any]) -> str:
    """Digest of the tensors, arrays, numbers and texts in `samples`; other things do not count."""
    digest = hashlib.blake2b(digest_size=16)
    for sample in samples:
        _add(sample, digest)
    return digest.hexdigest()


def _add(value: Any, digest: Any) -> None:
    if isinstance(value, (tuple, list)):
        for part in value:
            _add(part, digest)
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            _add(value[key], digest)
    elif isinstance(value, torch.Tensor):
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif hasattr(value, "tobytes"):
        digest.update(value.tobytes())
    elif isinstance(value, (bool, int, float, str)):
        digest.update(repr(value).encode())

"""Arguments of torch's FSDP1 (``FullyShardedDataParallel``), as fields of the configuration."""

from __future__ import annotations

from typing import Any

from distributed.errors import UserError

__all__ = ["fields_of_fsdp1"]

_PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""torch's dtype -> our precision."""

_DEVICE_NOTE = "device_id is left out: each rank computes on the device of its own"
_BUFFER_NOTE = "buffer_dtype is left out: buffers keep their dtype, and autocast casts inside operations"


def _is_mixed_precision(value: Any) -> bool:
    """Return whether `value` has the attributes of FSDP1's ``MixedPrecision``."""
    return all(hasattr(value, name) for name in ("param_dtype", "reduce_dtype", "buffer_dtype"))


def fields_of_fsdp1(
    mixed_precision: Any, device_id: Any, use_orig_params: bool | None
) -> tuple[dict[str, Any], list[str]]:
    """Fields of the configuration, and notes on what was left out.

    Args:
        mixed_precision: torch's ``MixedPrecision``, or a value of `mixed_precision`; None leaves it out.
        device_id: a number, a string or a `torch.device`; a CPU is ``device=cpu``.
        use_orig_params: True or None.

    Raises:
        UserError: a dtype that has no precision here, or ``use_orig_params=False``.
    """
    fields: dict[str, Any] = {}
    notes: list[str] = []
    if _is_mixed_precision(mixed_precision):
        fields |= _precisions(mixed_precision)
        notes += [_BUFFER_NOTE] if mixed_precision.buffer_dtype is not None else []
    elif mixed_precision is not None:
        fields["mixed_precision"] = mixed_precision
    if device_id is not None:
        cpu = str(getattr(device_id, "type", device_id)) == "cpu"
        fields |= {"device": "cpu"} if cpu else {}
        notes += [] if cpu else [_DEVICE_NOTE]
    if use_orig_params is False:
        raise UserError(
            "parameters keep their names and shapes under FSDP2, which has no flat ones",
            field="use_orig_params",
            got=False,
            allowed="True",
            remedy="Leave it out",
        )
    return fields, notes


def _precisions(policy: Any) -> dict[str, Any]:
    found = {
        "mixed_precision": _precision("param_dtype", policy.param_dtype),
        "fsdp.reduce_dtype": _precision("reduce_dtype", policy.reduce_dtype),
    }
    return {field: value for field, value in found.items() if value is not None}


def _precision(name: str, dtype: Any) -> str | None:
    plain = str(dtype).removeprefix("torch.")
    if dtype is not None and plain not in _PRECISIONS:
        raise UserError(
            "no precision of a training",
            field=f"mixed_precision.{name}",
            got=dtype,
            allowed=", ".join(f"torch.{known}" for known in _PRECISIONS),
            remedy="Choose one of these, or leave it out",
        )
    return _PRECISIONS.get(plain)

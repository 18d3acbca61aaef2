"""Process-wide settings of torch that change values, which go with the task to the ranks.

A script that allows TF32, chooses kernels of attention or asks for deterministic algorithms sets this in its
own process. Precision would depend on the number of ranks if they trained with other settings.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch

from distributed.errors import UserError
from distributed.system.omp_threads import omp_threads

__all__ = ["apply_settings", "caller_settings", "check_modes", "read_settings", "without_tf32"]

THREADS = "torch.set_num_threads"
_OLDER = {"torch.set_float32_matmul_precision", "torch.backends.cudnn.allow_tf32"}
"""Older names of settings that have newer ones since torch 2.9."""
_PLACES = [  # in the order of torch's own inheritance: a later one is set apart from those before it
    ("generic", "all"),
    ("cuda", "all"),
    ("mkldnn", "all"),
    *((backend, operation) for backend in ("cuda", "mkldnn") for operation in ("matmul", "conv", "rnn")),
]


@dataclass(frozen=True)
class _Setting:
    """A pair of functions that read and write a setting.

    Attributes:
        read: returns the value; raises RuntimeError where torch's older and newer names of it were mixed.
        write: sets such a value.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _attribute(place: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(place, name), lambda value: setattr(place, name, value))


def _core(name: str) -> _Setting:
    """A pair of functions of ``torch._C``, where nothing public reads or writes the whole value."""
    return _Setting(getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))


def _products(name: str) -> _Setting:
    """Reduced precision of sums in matrix products: one value, or two from torch 2.10 on."""
    read, write = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    return _Setting(read, lambda value: write(*value) if isinstance(value, tuple) else write(value))


def _deterministic(value: tuple[bool, bool]) -> None:
    strict, warn_only = value
    torch.use_deterministic_algorithms(strict, warn_only=warn_only)


def _anomalies(value: tuple[bool, bool]) -> None:
    torch.autograd.set_detect_anomaly(*value)


def _set_device_of() -> str | None:
    """The kind of default device that was set; each rank has a device of that kind of its own."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else str(context.device.type)


def _settings() -> dict[str, _Setting]:
    backends: Any = torch.backends
    cuda, cudnn, einsum = backends.cuda, backends.cudnn, backends.opt_einsum
    found = {
        "torch.set_default_dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
        "torch.set_default_device": _Setting(_set_device_of, torch.set_default_device),
        "torch.set_float32_matmul_precision": _Setting(
            torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
        ),
        "torch.use_deterministic_algorithms": _Setting(
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            _deterministic,
        ),
        "torch.utils.deterministic.fill_uninitialized_memory": _attribute(
            torch.utils.deterministic, "fill_uninitialized_memory"
        ),
        "torch.set_flush_denormal": _Setting(lambda: sys.float_info.min / 2 == 0.0, torch.set_flush_denormal),
        "torch.autograd.set_detect_anomaly": _Setting(
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _anomalies
        ),
        "torch.backends.cudnn.enabled": _attribute(cudnn, "enabled"),
        "torch.backends.cudnn.benchmark": _attribute(cudnn, "benchmark"),
        "torch.backends.cudnn.deterministic": _attribute(cudnn, "deterministic"),
        "torch.backends.cudnn.allow_tf32": _attribute(cudnn, "allow_tf32"),
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": _products(
            "cublas_allow_fp16_reduced_precision_reduction"
        ),
        "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": _products(
            "cublas_allow_bf16_reduced_precision_reduction"
        ),
        "torch.backends.cuda.enable_flash_sdp": _Setting(cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
        "torch.backends.cuda.enable_mem_efficient_sdp": _Setting(
            cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
        ),
        "torch.backends.cuda.enable_math_sdp": _Setting(cuda.math_sdp_enabled, cuda.enable_math_sdp),
        "torch.backends.cuda.enable_cudnn_sdp": _Setting(cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
        "torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp": _Setting(
            cuda.fp16_bf16_reduction_math_sdp_allowed, cuda.allow_fp16_bf16_reduction_math_sdp
        ),
        "torch.backends.cuda.preferred_linalg_library": _core("linalg_preferred_backend"),
        "torch.backends.cuda.preferred_blas_library": _core("blas_preferred_backend"),
        "torch.backends.mha.set_fastpath_enabled": _Setting(
            backends.mha.get_fastpath_enabled, backends.mha.set_fastpath_enabled
        ),
        "torch.backends.mkldnn.enabled": _attribute(backends.mkldnn, "enabled"),
        "torch.backends.opt_einsum.enabled": _attribute(einsum, "enabled"),
        "torch.backends.opt_einsum.strategy": _attribute(einsum, "strategy"),
        "torch.backends.quantized.engine": _attribute(backends.quantized, "engine"),
    }
    for name, place in {  # which older torches, and builds without CUDA, lack
        "torch.backends.cudnn.benchmark_limit": cudnn,
        "torch.backends.cudnn.depthwise_kernel": cudnn,
        "torch.backends.mkldnn.deterministic": backends.mkldnn,
    }.items():
        if getattr(place, name.rpartition(".")[2], None) is not None:
            found[name] = _attribute(place, name.rpartition(".")[2])
    for name, core in {
        "torch.backends.cuda.matmul.allow_fp16_accumulation": "cublas_allow_fp16_accumulation",
        "torch.nn.attention.sdpa_kernel(set_priority=True)": "sdp_priority_order",
        "torch.backends.nnpack": "nnpack_enabled",
    }.items():
        if hasattr(torch._C, f"_get_{core}") and hasattr(torch._C, f"_set_{core}"):
            found[name] = _core(core)
    for pair in _PLACES:
        found[f"torch.backends{_path(*pair)}.fp32_precision"] = _Setting(
            partial(torch._C._get_fp32_precision_getter, *pair),
            partial(torch._C._set_fp32_precision_setter, *pair),
        )
    return found


def _path(backend: str, operation: str) -> str:
    """Return the place of the setting below ``torch.backends``: that of CUDA's convolutions is cuDNN's."""
    if backend == "generic":
        return ""
    place = "cudnn" if backend == "cuda" and operation != "matmul" else backend
    return f".{place}" if operation == "all" else f".{place}.{operation}"


_SETTINGS = _settings()


def _read(setting: _Setting) -> Any:
    try:
        return setting.read()
    except RuntimeError:  # older and newer names were mixed: the newer ones, which are settings too, decide
        return None


def read_settings() -> dict[str, Any]:
    """The settings of this process: name, as a script would set it -> value; None where torch cannot say,
    because names of different releases were mixed."""
    return {name: _read(setting) for name, setting in _SETTINGS.items()}


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute products and convolutions of float32 exactly: GPUs round their factors to 10 bits, convolutions
    by default and matrix products on request."""
    before = read_settings()
    for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn"):
        _write(f"torch.backends.{name}.fp32_precision", "ieee")
    try:
        yield
    finally:
        apply_settings(before)


def caller_settings() -> dict[str, Any]:
    """`read_settings`, and the number of threads where the script has set it: ranks share the processors
    otherwise."""
    found = read_settings()
    untouched = {omp_threads(os.environ, 0)} if os.environ.get("OMP_NUM_THREADS") else _processors()
    if torch.get_num_threads() not in untouched:
        found[THREADS] = torch.get_num_threads()
    return found


def _processors() -> set[int | None]:
    """Number of threads of a process that sets none: MKL counts cores, OpenMP what may be used of them."""
    usable = len(os.sched_getaffinity(0))
    return {usable, min(usable, psutil.cpu_count(logical=False) or usable)}


def apply_settings(settings: Mapping[str, Any]) -> None:
    """Give this process `settings`, those of another process or of an earlier moment.

    Raises:
        UserError: torch does not take one of them here.
    """
    known = {name: value for name, value in settings.items() if value is not None or name not in _OLDER}
    for name, value in known.items():
        if name == THREADS:
            torch.set_num_threads(value)
        else:
            _write(name, value)
    for name, setting in _SETTINGS.items():  # a later one may have changed an earlier one
        if name in known and _read(setting) != known[name]:
            raise _refused(name, known[name], f"it is {_read(setting)!r}")


def _write(name: str, value: Any) -> None:
    setting = _SETTINGS.get(name)
    if setting is None:
        raise _refused(name, value, f"torch {torch.__version__} has no such setting")
    if _read(setting) == value:
        return  # torch warns of some that are set, and notes which names were used
    try:
        setting.write(value)
    except (RuntimeError, AttributeError, ValueError) as error:
        raise _refused(name, value, str(error)) from error


def _refused(name: str, value: Any, reason: str) -> UserError:
    return UserError(
        f"the script's setting cannot be made in a rank: {reason}",
        field=name,
        got=value,
        remedy="Leave the setting out of the script, or install the same torch on all hosts",
    )


def check_modes() -> None:
    """Raise a UserError inside of a block that changes how every operation of this thread works.

    Ranks would not know of the block. In this process, `torch.autocast` keeps 16-bit copies of the weights
    until its block ends, so that the steps would compute with the first weights.
    """
    devices = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if devices:
        dtype = str(torch.get_autocast_dtype(devices[0])).removeprefix("torch.")
        precision = "fp16" if dtype == "float16" else "bf16"
        raise UserError(
            "fit cannot train inside of a block of torch.autocast",
            field="mixed_precision",
            got=f"autocast to {dtype}",
            remedy=f"Call fit outside of the block, with mixed_precision={precision}",
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise UserError(
            "fit cannot train where gradients are switched off",
            field="fit",
            got="torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad",
            remedy="Call fit outside of the block, or torch.set_grad_enabled(True) before it",
        )

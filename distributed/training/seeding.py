"""Random streams of a rank, and deterministic kernels."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distributed.checkpoint.random_state import same_streams
from distributed.data.order import mix


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Leave the caller's random streams and determinism as they were."""
    strict, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with same_streams():
            yield
    finally:
        _set_kernels(strict, warn_only, benchmark)


@contextmanager
def numbers_of_rank(index: int) -> Iterator[None]:
    """Within the block, torch's random numbers of each rank's own, such as masks of dropout, from those that
    the ranks share.

    Args:
        index: differs between the ranks.
    """
    seed = int(torch.randint(2**31, ()))
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(mix(seed, index))
        yield


def seed_streams(seed: int, deterministic: bool) -> None:
    """Seed `random`, NumPy's global generator (when imported) and torch; under
    `deterministic`, allow deterministic kernels only."""
    torch.manual_seed(seed)  # devices that are not in use yet, too
    seed_numbers(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _set_kernels(deterministic=True, warn_only=False, benchmark=False)


def seed_numbers(seed: int) -> None:
    """Seed the generators of `capture_rng`."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _set_kernels(deterministic: bool, warn_only: bool, benchmark: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    torch.backends.cudnn.benchmark = benchmark

"""Data that limits the memory of the ranks that read it, and a model whose samples need much."""

from __future__ import annotations

import ctypes
import os
import re
import resource
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["LimitedData", "WideModel"]

WIDTH = 16
_COPIES = 4096
_M_MMAP_THRESHOLD = -3  # of malloc.h


class LimitedData(Dataset[tuple[Tensor, Tensor]]):
    """Samples of a regression. A rank that receives them can allocate `limits[rank]` bytes more than it has
    by then, and no more: a real limit of the kernel, with real failures.

    Such a rank gives blocks of a MiB and more back when it frees them. By default glibc keeps freed blocks of
    up to 32 MiB in its heap, where small blocks of whichever thread came first lie between them: how many
    tensors the limit leaves room for would depend on the load of the machine.

    Args:
        number: of samples.
        limits: rank -> bytes; a rank without one has no limit.
    """

    def __init__(self, number: int, limits: dict[int, int]) -> None:
        drawn = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(number, WIDTH, generator=drawn, dtype=torch.float64)
        self.limits = limits

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.inputs[index]
        return row, row[:1] * row[1:2]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        limit = self.limits.get(int(os.environ.get("RANK", "0")))
        if limit is not None:
            status = Path("/proc/self/status").read_text(encoding="utf-8")
            used = re.search(r"VmData:\s+(\d+) kB", status)
            assert used is not None
            assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20) == 1
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, ((int(used[1]) << 10) + limit, hard))


class WideModel(nn.Module):
    """A regression whose activations take 6 MiB a sample at their peak, with few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 64, dtype=torch.float64)
        self.last = nn.Linear(64, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x).unsqueeze(-1).expand(-1, -1, _COPIES).contiguous()
        found: Tensor = self.last(torch.tanh(wide).mean(-1))
        return found

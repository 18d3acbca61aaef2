"""The devices of this host."""

from __future__ import annotations

import os


def visible_gpus() -> int:
    """CUDA devices this process may use, without creating a context."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    import torch

    return torch.cuda.device_count()

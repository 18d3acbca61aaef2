"""What the files and directories of checkpoints are called."""

from __future__ import annotations

import re

FORMAT = "distributed-trainer portable checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BEST = "best.json"

STEP = re.compile(r"step_(\d{8,})")
LEFTOVER = re.compile(r"\.(tmp|gc)-(step_\d{8,}|best|probe)-[0-9a-f]{16}")
"""What an interrupted save leaves beside the checkpoints."""


def step_name(step: int) -> str:
    """Name of the checkpoint of `step`."""
    return f"step_{step:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's index."""
    return f"rank_{rank:05d}.json"


def shard_file(rank: int, size: int) -> str:
    """Name of a rank's tensor bytes."""
    return f"shard_{rank:05d}_of_{size:05d}.bin"

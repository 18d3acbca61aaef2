"""What the files and directories of checkpoints are called."""

from __future__ import annotations

import re

FORMAT = "distributed-trainer portable checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
BEST = "best.json"
MERGED = "indexes.json"
"""The indexes of many ranks in one file."""

_STEP = "step_([0-9]{8}|[1-9][0-9]{8,})"
STEP = re.compile(_STEP)
"""Exactly what `step_name` returns: another spelling of a number would be another directory."""
FOREIGN = re.compile(rf"(?!{_STEP}$)step_\d+")
"""What resembles a step and is none of ours."""
LEASE = re.compile(r"\.lease-([0-9]{8})")
"""A claim to write into the directory."""
LEFTOVER = re.compile(rf"\.(tmp|gc)-({_STEP}|best|probe|lease)-[0-9a-f]{{16}}")
"""What an interrupted save leaves beside the checkpoints."""


def step_name(step: int) -> str:
    """Name of the checkpoint of `step`."""
    return f"step_{step:08d}"


def lease_name(number: int) -> str:
    """Name of the claim with that number."""
    return f".lease-{number:08d}"


def rank_file(rank: int) -> str:
    """Name of a rank's index."""
    return f"rank_{rank:05d}.json"


def shard_file(rank: int, size: int) -> str:
    """Name of a rank's tensor bytes."""
    return f"shard_{rank:05d}_of_{size:05d}.bin"

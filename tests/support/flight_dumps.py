"""Dumps in the format of torch's Flight Recorder, as NCCL's ranks write them."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["dump", "entry"]


def entry(
    number: int,
    operation: str = "all_reduce",
    sizes: list[list[int]] | None = None,
    state: str = "completed",
    *,
    outputs: list[list[int]] | None = None,
    dtype: str = "Float",
    group: tuple[str, str] = ("0", "default_pg"),
    point_to_point: bool = False,
    transport: str = "nccl",
    retired: bool = False,
) -> dict[str, Any]:
    """One recorded operation, with every field of version 2.10 (``FlightRecorder.hpp``)."""
    sizes = [[1000]] if sizes is None else sizes
    outputs = sizes if outputs is None else outputs
    return {
        "record_id": number - 1,
        "pg_id": int(group[0]),
        "process_group": group,
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": 0 if point_to_point else number,
        "p2p_seq_id": number if point_to_point else 0,
        "op_id": number,
        "profiling_name": f"{transport}:{operation}",
        "time_created_ns": number,
        "input_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": retired,
        "timeout_ms": 600_000,
        "is_p2p": point_to_point,
    }


def dump(*entries: dict[str, Any], ranks: str = "", version: str = "2.10", **groups: str) -> bytes:
    """The dump of one rank.

    Args:
        ranks: members of the default group, as ``[0, 1]``.
        groups: members of further groups, by unique name after an underscore.
    """
    listed = {"0": ranks} if ranks else {}
    listed |= {name.removeprefix("_"): members for name, members in groups.items()}
    config = {name: {"name": name, "desc": "", "ranks": members} for name, members in listed.items()}
    content = {"version": version, "pg_config": config, "pg_status": {}, "entries": list(entries)}
    return pickle.dumps(content, protocol=2)

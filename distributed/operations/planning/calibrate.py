"""Measure a hardware profile of this machine: operations and collectives of the ranks of one node.

For each number of ranks, that many processes start and measure the same things at the same time, with the
threads that ranks of a run would have. What a single node does not show, such as its network, is taken over
from a profile that the user names, or from assumptions that say so.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path
from time import sleep
from typing import Any

import yaml

from distributed.config import Layer, load_layers
from distributed.errors import UserError
from distributed.interfaces.launcher import RankCommand
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.launch.local_launcher import LocalLauncher
from distributed.operations.planning.calibrate_rank import RESULT
from distributed.operations.planning.other_load import BUSY, ProcessorTime
from distributed.planner.estimates.hardware import HardwareProfile, parse_profile
from distributed.planner.resolve import resolve
from distributed.registry.catalog import get_catalog
from distributed.system.devices import visible_gpus
from distributed.system.host_memory import total_memory
from distributed.system.private_files import write_whole

__all__ = ["DURATION", "calibrate", "default_ranks", "write_profile"]

DURATION = 0.02
"""Seconds of each point of a curve."""
_LOOK = 0.5
"""Seconds for which others are watched before anything is measured."""

_SPREAD = 0.23
"""Relative half-width of the interval around predictions, which holds 18 of the 20 rows of
docs/predicted-time.md, "This machine"."""
_NETWORK = {"link_between_nodes": 1.25e9, "latency_between_nodes": 1e-4}
_NETWORK_SOURCE = "an assumption, 10 Gb/s Ethernet: a single node does not show its network"


def default_ranks(gpus: int) -> list[int]:
    """Numbers of ranks that are measured: powers of two up to the GPUs, at most 16; without GPUs up to the
    cores, at least 4 and at most 8."""
    most = gpus or max(4, min(8, len(os.sched_getaffinity(0))))
    return [number for number in (1, 2, 4, 8, 16) if number <= most]


def calibrate(
    ranks: Sequence[int],
    *,
    duration: float = DURATION,
    device: str = "auto",
    name: str = "this-machine",
    report: Callable[[str], object] = str,
) -> HardwareProfile:
    """Measure the profile of this machine.

    Args:
        ranks: numbers of ranks at work on the node, each of which is measured.
        duration: seconds for each point of a curve.
        device: ``auto``, ``cpu`` or ``cuda``.
        name: of the profile.
        report: called with a line of text before each measurement.

    Raises:
        UserError: there are fewer GPUs than ranks.
        WorkerError: a rank failed.
    """
    gpus = 0 if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise UserError(
            "no GPU is visible",
            field="--device",
            got=device,
            allowed="cpu",
            remedy="Leave --device out, or make a GPU visible",
        )
    if gpus and max(ranks) > gpus:
        raise UserError(
            "each rank needs a GPU of its own",
            field="--ranks",
            got=",".join(map(str, ranks)),
            allowed=f"at most {gpus}",
            remedy="Measure fewer ranks, or pass --device cpu",
        )
    start = ProcessorTime.now()
    sleep(_LOOK)
    _warn_of_others(start.others_until(ProcessorTime.now()), "at the start", report)
    found: dict[int, dict[str, Any]] = {}
    for number in sorted(set(ranks)):
        report(f"measuring {number} rank{'s' if number > 1 else ''} on this node")
        start = ProcessorTime.now()
        found[number] = _measure(number, duration, "cuda" if gpus else "cpu")
        _warn_of_others(start.others_until(ProcessorTime.now()), "meanwhile", report)
    return parse_profile(_profile(found, name, gpus), "of this machine")


def write_profile(profile: HardwareProfile, path: Path) -> None:
    """Write `profile` as YAML that `load_profile` reads, whole or not at all."""
    values = profile.model_dump(mode="json")
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)
    write_whole(path, text.encode(), 0o644)


def _warn_of_others(share: float, when: str, report: Callable[[str], object]) -> None:
    """Warn if other processes use this machine, which makes everything that is measured slower."""
    if share > BUSY:
        report(
            f"warning: other processes used {share:.0%} of the processors {when}; the profile is that of a"
            " busy machine, and predictions from it are too slow. Measure again when nothing else runs"
        )


def _measure(number: int, duration: float, device: str) -> dict[str, Any]:
    from distributed.system.private_folders import PrivateFolder

    plan = _plan(number, device)
    fields = {"device": device, "communication_backend": plan.config.communication_backend}
    task = json.dumps({"duration": duration, "fields": fields})
    command = [sys.executable, "-m", "distributed.operations.planning.calibrate_rank", task]
    with PrivateFolder() as folder:
        with redirect_stdout(sys.stderr):
            LocalLauncher().run(plan, RankCommand(command, Path(folder)))
        found: dict[str, Any] = json.loads((Path(folder) / RESULT).read_text(encoding="utf-8"))
    return found


def _plan(number: int, device: str) -> RunPlan:
    count = {"num_gpus": number} if device == "cuda" else {"num_processes": number, "device": "cpu"}
    # Variables of the environment configure runs; a measurement of ranks has nothing of a run.
    config = load_layers([Layer("calibrate", {**count, "launch": "spawn", "launch_start": "fresh"})])
    return resolve(config, get_catalog(), Facts(), Resources(visible_gpus() if device == "cuda" else 0), None)


def _profile(found: dict[int, dict[str, Any]], name: str, gpus: int) -> dict[str, Any]:
    most = max(found)
    alone, together = found[min(found)], found[most]
    source = f"measured by calibrate on {date.today().isoformat()}"
    within, latency = _link(together["ranks"].get("collectives", {}), most)
    memory = _gpu_memory() if gpus else total_memory() / most
    cores = len(os.sched_getaffinity(0))
    device = alone["device"] if gpus else f"CPU, {cores} cores"
    values: dict[str, Any] = {
        "name": name,
        "summary": f"{device}; ranks at work: {', '.join(map(str, sorted(found)))}",
        "device": "cuda" if gpus else "cpu",
        "peak_flops": together["peak_flops"],
        "memory": memory,
        "memory_bandwidth": together["memory_bandwidth"],
        "devices_per_node": gpus or most,
        "link_within_node": within or _NETWORK["link_between_nodes"],
        "latency_within_node": latency,
        **_NETWORK,
        "host_memory": total_memory() / (gpus or most),
        "host_link": together["host_link"],
        "achievable": {
            "matmul": 1.0,
            "memory": 1.0,
            "link_within_node": 1.0,
            "link_between_nodes": 0.5,
            "activation_passes": 2.0,
            "block_seconds": 30 * alone["ranks"]["forward_seconds"],
            "spread": _SPREAD,
        },
        "measured": {
            "cores": cores,
            "asynchronous": bool(gpus),
            "ranks": {number: each["ranks"] for number, each in found.items()},
        },
    }
    sources = dict.fromkeys((key for key in values if key not in ("name", "summary", "device")), source)
    sources |= dict.fromkeys(_NETWORK, _NETWORK_SOURCE)
    sources["achievable"] = (
        f"{source}: rates are what operations reach; activation_passes and link_between_nodes are those"
        " of the profile CPU, and spread is that of 20 runs on one machine"
    )
    if not within:
        sources["link_within_node"] = sources["latency_within_node"] = _NETWORK_SOURCE
    if not gpus:
        sources["memory"] = f"{source}: memory of the node, or the limit of the control group, over {most}"
    return {**values, "sources": sources}


def _link(collectives: dict[str, Any], most: int) -> tuple[float, float]:
    """Bytes per second that a rank sends in a large all-reduce, and seconds of a round of a small one."""
    curve = collectives.get("all-reduce", {}).get(str(most))
    if not curve:
        return 0.0, _NETWORK["latency_between_nodes"]
    (_, least), (nbytes, seconds) = curve[0], curve[-1]
    rounds = 2 * (most - 1)
    return 2 * (most - 1) / most * nbytes / seconds, least / rounds


def _gpu_memory() -> float:
    import torch

    return float(torch.cuda.get_device_properties(0).total_memory)

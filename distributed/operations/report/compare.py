"""Differences between runs, and their scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distributed.operations.report.formats import setting
from distributed.operations.report.runs import Run

_RANKS = frozenset({"num_gpus", "num_processes", "num_nodes", "gpus_per_node", "elastic.max_ranks"})
_PLACES = frozenset(
    {
        "checkpoint_dir",
        "init_from",
        "resume_from_checkpoint",
        "tensorboard_dir",
        "profile.output_dir",
        "rdzv_endpoint",
        "node_rank",
        "launch",
    }
)
_BATCH = frozenset({"batch_size", "global_batch_size", "gradient_accumulation_steps"})


@dataclass(frozen=True)
class Scaling:
    """Runs that differ in their number of ranks.

    Attributes:
        backend: backend of all runs.
        kind: ``strong``, the global batch stays; ``weak``, each rank's share stays.
        ranks: ascending.
        throughput: samples per second.
        efficiency: efficiency of each, relative to the fewest ranks: 1 is perfect.
    """

    backend: str
    kind: str
    ranks: list[int]
    throughput: list[float]
    efficiency: list[float]


def names_of(runs: Sequence[Run]) -> list[str]:
    """A short, unique name for each run."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{name} {run.folder.resolve().parent.name}/" for name, run in zip(names, runs, strict=True)]
    counts: dict[str, int] = {}
    found = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        found.append(name if counts[name] == 1 else f"{name} ({counts[name]})")
    return found


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(setting, its value in each run) of what is not the same in all; resolved values of batch and ranks
    first, then fields of the configuration, paths of files left out."""
    rows = [("backend", [str(run.place.get("backend", "")) for run in runs])]
    rows.append(("ranks", [str(run.place.get("world_size", "")) for run in runs]))
    rows += [
        (name.replace("_", " "), [str(_batch(run, name)) for run in runs])
        for name in ("global_batch_size", "batch_size", "gradient_accumulation_steps")
    ]
    known = [{name: setting(value) for name, value, _ in run.config} for run in runs]
    names = dict.fromkeys(name for values in known for name in values)
    hidden = _RANKS | _BATCH | {"backend"}
    rows += [
        (name, [values.get(name, "") for values in known])
        for name in names
        if name not in hidden and not _is_place(name)
    ]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def scalings(runs: Sequence[Run]) -> list[Scaling]:
    """Groups of finished runs of one backend that differ in nothing but the number of ranks."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.place.get("world_size") and run.throughput() and run.status == "finished":
            groups.setdefault((str(run.place.get("backend")), _rest(run)), []).append(run)
    found = []
    for (backend, _), members in groups.items():
        for kind, name in (("strong", "global_batch_size"), ("weak", "batch_size")):
            parts: dict[Any, dict[int, list[Run]]] = {}
            for run in members:
                share = _batch(run, name) if kind == "strong" else _share(run)
                parts.setdefault(share, {}).setdefault(int(run.place["world_size"]), []).append(run)
            found += [_scaling(backend, kind, part) for part in parts.values() if len(part) > 1]
    return found


def _scaling(backend: str, kind: str, runs: Mapping[int, Sequence[Run]]) -> Scaling:
    ranks = sorted(runs)
    throughput = [median(run.throughput() or 0.0 for run in runs[rank]) for rank in ranks]
    per_rank = [value / rank for rank, value in zip(ranks, throughput, strict=True)]
    return Scaling(backend, kind, ranks, throughput, [value / per_rank[0] for value in per_rank])


def _batch(run: Run, name: str) -> Any:
    batch = run.place.get("batch")
    return batch.get(name) if isinstance(batch, dict) else None


def _share(run: Run) -> Any:
    """A rank's samples of a step."""
    batch = _batch(run, "global_batch_size")
    return None if batch is None else batch / int(run.place["world_size"])


def _rest(run: Run) -> str:
    """Everything but ranks, batch and paths, to compare whether two runs are otherwise equal."""
    hidden = _RANKS | _BATCH
    values = [(n, setting(v)) for n, v, _ in run.config if n not in hidden and not _is_place(n)]
    return repr((values, run.place.get("device", "")[:4], run.place.get("precision")))


def _is_place(name: str) -> bool:
    return name in _PLACES or name.startswith("tracking.")

"""Probe: counts in a real rank, from before the rendezvous to the end, what it exchanges and opens.

A probe is a callback. Unpickling it, which a rank does before it joins the others, installs the counters.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
from collections import Counter
from pathlib import Path
from time import process_time
from typing import Any

import torch.distributed as dist

from distributed import Callback
from distributed.communication import process_group
from distributed.interfaces.callback import Context
from distributed.resilience.phase_journal import current

__all__ = ["Probe"]

_STORE = (
    "set",
    "add",
    "wait",
    "check",
    "get",
    "compare_set",
    "multi_get",
    "multi_set",
    "append",
    "queue_push",
)


class _CountedStore(dist.Store):
    """Counts each operation, torch's own included."""

    def __init__(self, store: dist.Store, counts: Counter[str]) -> None:
        super().__init__()
        self.inner, self.counts = store, counts


def _operation(name: str) -> Any:
    def call(self: _CountedStore, *args: Any) -> Any:
        self.counts[f"store {name}"] += 1
        return getattr(self.inner, name)(*args)

    return call


for _name in _STORE:
    setattr(_CountedStore, _name, _operation(_name))


class _Counters:
    """The counters of one rank."""

    def __init__(self) -> None:
        self.joining: Counter[str] = Counter()
        self.group: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.started = process_time()

    def install(self) -> None:
        """Wrap the store and the collectives of a process group."""
        open_store, kind = process_group.open_store, process_group.GroupMixin
        await_ranks = process_group.await_ranks

        def opened(*args: Any) -> dist.Store:
            self.store = _CountedStore(open_store(*args), self.joining)
            return self.store

        def awaited(*args: Any) -> None:
            await_ranks(*args)
            self.store.counts = self.group

        process_group.open_store, process_group.await_ranks = opened, awaited
        for name in ("all_reduce", "broadcast_object", "gather_objects"):
            setattr(kind, name, self._counted(name, getattr(kind, name)))

    def _counted(self, name: str, inner: Any) -> Any:
        def call(backend: Any, value: Any, *args: Any) -> Any:
            journal = current()
            phase = journal.phase if journal else "setup"
            self.calls[phase] += 1
            size = 8 * len(value) if name == "all_reduce" else len(pickle.dumps(value))
            self.bytes[phase] += size * (backend.world.size if name == "gather_objects" else 1)
            return inner(backend, value, *args)

        return call


_counters: list[_Counters] = []


class Probe(Callback):
    """Writes what each rank has counted to ``rank_<n>.json`` in `folder` when the run ends.

    Args:
        folder: an existing folder.
    """

    all_ranks = True

    def __init__(self, folder: str) -> None:
        self.folder, self.launcher = folder, os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not _counters:
            _counters.append(_Counters())
            _counters[0].install()

    def on_run_end(self, context: Context, status: str) -> None:
        counters, journal = _counters[0] if _counters else _Counters(), current()
        found = {
            "joining": sum(counters.joining.values()),
            "group": counters.group,
            "calls": counters.calls,
            "bytes": counters.bytes,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "seconds": process_time() - counters.started,
            "launcher descriptors": len(os.listdir(f"/proc/{self.launcher}/fd")),
            "launcher threads": len(os.listdir(f"/proc/{self.launcher}/task")),
            "journals": len(list(journal.folder.glob("journal_*"))) if journal else 0,
            "steps": context.progress.step,
        }
        name = Path(self.folder, f"rank_{context.world.rank}.json")
        name.write_text(json.dumps(found), encoding="utf-8")

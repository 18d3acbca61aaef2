"""What depends on the number of ranks N, where it is paid, and how fast it may grow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["INVENTORY", "Item"]


@dataclass(frozen=True)
class Item:
    """One cost.

    Attributes:
        name: key in the results of the simulation and the measurement.
        what: the cost, for the table.
        code: module that pays it.
        when: how often: ``step``, ``log step``, ``second``, ``minute``, ``start``, ``epoch``, ``save``,
            ``resume``, ``end``, ``failure``.
        who: ``rank``, ``rank 0``, ``node 0``, ``host``, ``store`` or ``launcher``.
        growth: declared growth with N, one of `growth.CLASSES`.
        unit: of the number.
        reason: why it may grow faster than log N; empty when it does not.
    """

    name: str
    what: str
    code: str
    when: str
    who: str
    growth: str
    unit: str
    reason: str = ""


_ONCE = "once in a run"
INVENTORY = (
    # -- steps
    Item("step calls", "collectives", "training/loop.py", "step", "rank", "1", "calls"),
    Item("step bytes", "collectives", "training/loop.py", "step", "rank", "1", "bytes"),
    Item("log calls", "sum of the interval", "training/step_records.py", "log step", "rank", "1", "calls"),
    Item("log bytes", "sum of the interval", "training/step_records.py", "log step", "rank", "1", "bytes"),
    Item(
        "times bytes",
        "times of every rank, for stragglers (in one log step a minute)",
        "training/step_records.py",
        "minute",
        "rank",
        "N",
        "bytes",
        "a straggler is found among the times of all ranks; from 64 ranks on they are sent once a minute",
    ),
    Item("epoch bytes", "metrics, stop requests", "training/loop.py", "epoch", "rank", "1", "bytes"),
    Item(
        "validation bytes",
        "sums and names of metrics",
        "training/validation.py",
        "epoch",
        "rank",
        "1",
        "bytes",
    ),
    Item("slice spans", "slices of global batches", "data/order.py", "step", "rank", "1", "numbers"),
    # -- starting
    Item(
        "prepare bytes",
        "comparison of models and data",
        "training/agreement.py",
        "start",
        "rank",
        "1",
        "bytes",
    ),
    Item(
        "resume bytes",
        "host names for the run's record",
        "training/trackers.py",
        "start",
        "rank",
        "N",
        "bytes",
        f"the record of a run names its hosts; {_ONCE}",
    ),
    Item(
        "watch bytes",
        "folders and process ids for the monitors (ranks of other launchers)",
        "resilience/monitor_process.py",
        "start",
        "rank",
        "N",
        "bytes",
        f"the ranks of one host find each other by it; {_ONCE}",
    ),
    Item(
        "join calls",
        "store operations of a rank",
        "communication/rendezvous.py",
        "start",
        "rank",
        "1",
        "calls",
    ),
    Item(
        "store keys",
        "keys of the rendezvous",
        "communication/rendezvous.py",
        "start",
        "store",
        "N",
        "keys",
        f"each rank announces itself, so that a missing one can be named; {_ONCE}",
    ),
    Item("plan values", "the plan", "planner/resolve.py", "start", "launcher", "1", "bytes"),
    Item(
        "elastic bytes",
        "torch's state of an elastic rendezvous",
        "resilience/elastic_hosts.py",
        "start",
        "store",
        "N",
        "bytes",
        "torch keeps all hosts in one value, which each host that joins rewrites",
    ),
    # -- monitoring
    Item(
        "journal files",
        "journals that a monitor reads",
        "resilience/rank_monitor.py",
        "second",
        "host",
        "1",
        "files",
    ),
    Item(
        "heartbeats",
        "messages to and from the other hosts",
        "resilience/host_heartbeat.py",
        "second",
        "node 0",
        "N",
        "messages",
        "one process has to detect each lost host; two messages of 60 bytes a second and host, no rank waits",
    ),
    Item(
        "heartbeat connections",
        "connections and threads of the monitor",
        "resilience/host_heartbeat.py",
        "start",
        "node 0",
        "N",
        "connections",
        "one for each host, so that the end of a monitor is seen at once",
    ),
    # -- checkpoints
    Item(
        "save gathers", "outcome of a save", "checkpoint/collective_errors.py", "save", "rank", "1", "bytes"
    ),
    Item(
        "index files",
        "index files that rank 0 reads",
        "checkpoint/async_save.py",
        "save",
        "rank 0",
        "N",
        "files",
        "rank 0 checks that the pieces of all ranks make whole tensors before it commits; in a thread",
    ),
    Item(
        "manifest bytes",
        "manifest",
        "checkpoint/writer.py",
        "save",
        "rank 0",
        "N",
        "bytes",
        "it holds size and checksum of every file",
    ),
    Item(
        "index reads", "index files that a rank reads", "checkpoint/reader.py", "resume", "rank", "1", "files"
    ),
    Item(
        "index bytes",
        "size of the index that a rank reads (four tensors)",
        "checkpoint/writer.py",
        "resume",
        "rank",
        "N",
        "bytes",
        "any number of ranks can resume: which files hold its part of a tensor, a rank finds in the index",
    ),
    Item(
        "record values",
        "losses since the last log step, of every rank that saved",
        "training/state.py",
        "resume",
        "rank 0",
        "N",
        "bytes",
        "the mean of a resumed epoch is exact on another number of ranks",
    ),
    # -- stopping and failing
    Item(
        "stop bytes",
        "the first reason to stop",
        "training/stop_consensus.py",
        "end",
        "rank",
        "N",
        "bytes",
        f"the lowest rank's reason counts; {_ONCE}, when a rank has asked",
    ),
    Item(
        "failure keys",
        "reports on the failure board",
        "resilience/failure_reports.py",
        "failure",
        "store",
        "1",
        "keys",
    ),
    Item(
        "failure bytes",
        "message of a failure",
        "resilience/failure_reports.py",
        "failure",
        "rank",
        "1",
        "bytes",
    ),
)

"""Every way to fail that we know how to stage, and what is said of it.

    python -m tests.campaigns.failure_reports [--markdown] [NAME ...]

Trains a small model on real ranks under each case's backend, lets one rank fail, and prints the error.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distributed import Callback, Trainer, WorkerError
from distributed.interfaces.callback import Context

__all__ = ["CASES", "Case", "fail", "shorten"]

BATCH, STEP, RANK = 4, 3, 1
"""Samples of a rank's batch; and in which step which rank fails."""
_SPARE = 64 << 20


@dataclass(frozen=True)
class Case:
    """One way to fail.

    Attributes:
        name: of the case.
        does: the fault of rank 1, for the caption.
        phase: in which it is named.
        exc_type: of the error.
        step: in which it is named.
        ranks: how many there are.
        backend: which one trains.
        given: further configuration.
        num_workers: of the loader.
    """

    name: str
    does: str
    phase: str
    exc_type: str
    step: int = STEP
    ranks: int = 2
    backend: str = "pytorch-ddp"
    given: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 0

    @property
    def fault(self) -> str:
        """What is staged: the part of the name before a backend's."""
        return self.name.partition(" under ")[0]


CASES = {
    case.name: case
    for case in (
        Case("loading", "is blocked while it loads a sample", "data", "Hang"),
        Case("loader worker", "has a blocked DataLoader worker", "data", "Hang", num_workers=1),
        Case("forward", "is blocked in its model", "forward", "Hang"),
        Case("callback", "is blocked in a callback", "callback", "Hang"),
        Case("stopped", "is stopped by SIGSTOP", "callback", "Hang"),
        Case("skipped barrier", "skips a barrier in which the others wait", "backward", "Hang", 4, 3),
        Case("skipped sum", "skips an all_reduce that the others call", "backward", "OutOfStep", 4, 3),
        Case("early end", "has fewer batches than the others", "epoch end", "OutOfStep", 2, 3),
        Case("raised", "raises an exception", "forward", "ZeroDivisionError"),
        Case("killed", "is killed", "callback", "SIGKILL"),
        Case("native crash", "crashes in native code", "callback", "SIGSEGV"),
        Case("memory", "needs more memory than its limit", "forward", "MemoryError"),
        Case(
            "diverged",
            "changes a parameter that the other ranks do not change",
            "record",
            "Divergence",
            4,
            3,
            given={"log_every_n_steps": 2, "divergence_check_steps": 2},
        ),
        Case("forward under fsdp", "is blocked in its model", "forward", "Hang", backend="fsdp"),
        Case("killed under fsdp", "is killed", "callback", "SIGKILL", backend="fsdp"),
        Case("callback under horovod", "is blocked in a callback", "callback", "Hang", backend="horovod"),
        Case("killed under horovod", "is killed", "callback", "SIGKILL", backend="horovod"),
    )
}


class _Staged:
    """Records when the fault begins, so that a test can measure the time to the report."""

    def __init__(self, fault: str, mark: str) -> None:
        self.fault, self.mark = fault, mark

    def begin(self) -> None:
        Path(self.mark).write_text(str(time.time()), encoding="utf-8")

    def wait(self) -> None:
        self.begin()
        threading.Event().wait()


class _Model(nn.Module):
    def __init__(self, staged: _Staged) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.staged, self.calls = staged, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == STEP and os.environ["RANK"] == str(RANK):
            self.fail()
        result: Tensor = self.second(self.first(x).relu())
        return result

    def fail(self) -> None:
        if self.staged.fault == "forward":
            self.staged.wait()
        elif self.staged.fault == "raised":
            self.staged.begin()
            raise ZeroDivisionError("division in forward")
        elif self.staged.fault == "memory":
            self.staged.begin()
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limit = pages * resource.getpagesize() + _SPARE
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            bytearray(16 * _SPARE)


class _Samples(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, staged: _Staged, ranks: int) -> None:
        self.staged = staged
        self.bad = (STEP - 1) * BATCH * ranks + RANK * BATCH

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad and self.staged.fault in ("loading", "loader worker"):
            self.staged.wait()
        return torch.full((4,), index / 240), torch.tensor(index % 2)


class _Short(IterableDataset[tuple[Tensor, Tensor]]):
    def __init__(self, staged: _Staged, ranks: int) -> None:
        self.staged, self.ranks = staged, ranks

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        short = os.environ["RANK"] == str(RANK)
        for index in range(BATCH * self.ranks * (2 if short else 9)):
            yield torch.full((4,), index / 240), torch.tensor(index % 2)
        self.staged.begin()


class _Act(Callback):
    all_ranks = True

    def __init__(self, staged: _Staged) -> None:
        self.staged = staged

    def on_step_end(self, context: Context) -> None:
        """Fail, or call on another rank what rank 1 skips."""
        if context.progress.step != STEP:
            return
        if context.world.rank == RANK:
            self.fail(context)
        elif self.staged.fault == "skipped barrier":
            dist.barrier()
        elif self.staged.fault == "skipped sum":
            dist.all_reduce(torch.zeros(3))

    def fail(self, context: Context) -> None:
        fault = self.staged.fault
        self.staged.begin()
        if fault == "callback":
            self.staged.wait()
        elif fault in ("killed", "stopped"):
            os.kill(os.getpid(), signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
        elif fault == "native crash":
            import ctypes

            ctypes.string_at(0)
        elif fault == "diverged":
            with torch.no_grad():
                context.model.second.bias[0] += 0.5


def fail(case: Case, mark: str, **given: Any) -> None:
    """Train as `case` says, which fails.

    Args:
        case: of `CASES`.
        mark: file into which the failing rank writes when it began to, in seconds since 1970.
        given: configuration that is stronger than the case's.

    Raises:
        WorkerError: what is said of it.
    """
    staged = _Staged(case.fault, mark)
    fields = {"num_processes": case.ranks, "stall_report": 2.0, "hang_timeout": 4.0, **case.given, **given}
    trainer = Trainer(
        _Model(staged), backend=case.backend, device="cpu", callbacks=[_Act(staged)], epochs=2, **fields
    )
    kind = _Short if case.fault == "early end" else _Samples
    trainer.fit(DataLoader(kind(staged, case.ranks), batch_size=BATCH, num_workers=case.num_workers))


def shorten(text: str) -> str:
    """`text` without the layout of this machine: the ends of paths, and ``host`` for its name."""
    text = re.sub(r'File "[^"]*?((?:[^/"]+/){0,2}[^/"]+)"', r'File "\1"', text)
    return text.replace(f"({socket.gethostname()},", "(host,")


def _print(case: Case, markdown: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder, "mark")
        try:
            fail(case, str(mark))
        except WorkerError as error:
            took = time.time() - float(mark.read_text(encoding="utf-8"))
            head, _, rest = shorten(str(error)).partition("\n")
            lines = rest.strip().splitlines()
            shown = [head, *(lines if len(lines) < 20 else ["...", *lines[-6:]])]
        else:
            raise SystemExit(f"case '{case.name}' did not fail")
    title = f"Rank 1 {case.does}" + (f" ({case.backend})" if case.backend != "pytorch-ddp" else "")
    if markdown:
        print(
            f"\n**{title}** (reported after {took:.0f} s)\n\n```text\n" + "\n".join(shown) + "\n```",
            flush=True,
        )
    else:
        print(f"\n== {title} (reported after {took:.0f} s)\n" + "\n".join(shown), flush=True)


def main(arguments: list[str]) -> int:
    """Print the reports of all cases, or of those named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(CASES)}")
    parser.add_argument("--markdown", action="store_true", help="As in the documentation.")
    args = parser.parse_args(arguments)
    for name in args.names or CASES:
        _print(CASES[name], args.markdown)
    return 0


if __name__ == "__main__":
    from tests.campaigns import failure_reports  # what a run pickles by name is then the same module

    sys.exit(failure_reports.main(sys.argv[1:]))

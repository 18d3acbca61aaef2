"""Metrics from the ranks of a trial to the trial itself, while it runs.

A trial's ranks may be processes of their own. Rank 0 sends each epoch's metrics over a socket of this
host and waits until the trial has answered, so that a scheduler decides before the next epoch begins.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from distributed.interfaces.callback import Band, Callback, Context
from distributed.system.processes import environment

TRIAL = "DISTRIBUTED_TRIAL"
"""Environment variable with the ranks' address for reports: ``socket key waits``."""


class EpochReport(NamedTuple):
    """A rank's report of an epoch.

    Attributes:
        checkpoint: path of the checkpoint at its end, None without.
        last: whether the run has no further epoch.
        again: whether the run resumed from a checkpoint that was saved with these metrics.
    """

    metrics: dict[str, Any]
    checkpoint: str | None
    last: bool
    again: bool


class TrialReport(Callback):
    """On rank 0: send every epoch's metrics to the trial, and its checkpoint once that is committed.

    Args:
        address: address of the trial's `TrialListener`.
        key: shared secret.
        waits: whether the metrics of an epoch wait for its checkpoint.
    """

    band = Band.TRACK

    def __init__(self, address: str, key: bytes, waits: bool) -> None:
        self.address, self.key, self.waits = address, key, waits
        self._held: dict[str, Any] | None = None
        self._connection: Connection[Any, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The metrics of the epoch that is being saved: a kill may come before they are sent."""
        return {"held": self._held} if self._held else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold metrics that a killed run may not have sent."""
        self._held = {**state["held"], "again": True}

    def on_run_start(self, context: Context) -> None:
        """Connect to the trial."""
        self._connection = Client(self.address, family="AF_UNIX", authkey=self.key)
        self._flush(context)

    def on_epoch_end(self, context: Context, metrics: Mapping[str, float]) -> None:
        """Send the metrics, or hold them until the checkpoint is committed."""
        self._flush(context)
        last = context.total_steps is not None and context.progress.step >= context.total_steps
        self._held = {"metrics": dict(metrics), "last": last, "again": False}
        if not self.waits:
            self._flush(context)

    on_incomplete_epoch = on_epoch_end

    def on_checkpoint(self, context: Context, path: str) -> None:
        """Send held metrics."""
        self._flush(context, path)

    def on_run_end(self, context: Context, status: str) -> None:
        """Send remaining metrics, and disconnect."""
        self._flush(context)
        if self._connection is not None:
            self._connection.close()

    def _flush(self, context: Context, checkpoint: str | None = None) -> None:
        held, self._held = self._held, None
        if held is None or self._connection is None:
            return
        try:
            self._connection.send_bytes(json.dumps({**held, "checkpoint": checkpoint}).encode())
            self._connection.recv_bytes()
        except (EOFError, OSError):
            context.request_stop("the search has stopped this trial", final=False)


def trial_report() -> TrialReport | None:
    """The callback for this process; None outside of a trial."""
    told = os.environ.get(TRIAL)
    if told is None:
        return None
    address, key, waits = told.split(" ")
    return TrialReport(f"\0{address}", bytes.fromhex(key), waits == "waits")


class TrialListener:
    """In the trial: a thread that receives its ranks' reports.

    Args:
        on_report: called with each `EpochReport`; SystemExit from it stops the trial.
        waits: see `TrialReport`.
    """

    def __init__(self, on_report: Callable[[EpochReport], None], waits: bool) -> None:
        self.stopped = False
        self.error: Exception | None = None
        self._on_report, self._waits = on_report, waits
        self._key = secrets.token_bytes(16)
        # An abstract name leaves no file behind when the trial is killed; the key keeps others out.
        self._name = f"distributed-{secrets.token_hex(8)}"
        self._listener = Listener(f"\0{self._name}", family="AF_UNIX")
        self._closing = threading.Event()
        self._one_at_a_time = threading.Lock()

    @contextmanager
    def open(self) -> Iterator[None]:
        """Listen, and export the address to processes started meanwhile."""
        thread = threading.Thread(target=self._serve, daemon=True, name="trial-ear")
        thread.start()
        told = f"{self._name} {self._key.hex()} {'waits' if self._waits else 'now'}"
        try:
            with environment({TRIAL: told}):
                yield
        finally:
            self._closing.set()
            # Nothing else wakes a thread that waits in accept.
            with suppress(OSError), socket.socket(socket.AF_UNIX) as nudge:
                nudge.connect(f"\0{self._name}")
            thread.join()
            self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                continue  # the rank died while connecting
            if self._closing.is_set():
                connection.close()
                return
            threading.Thread(
                target=self._listen, args=(connection,), daemon=True, name="trial-caller"
            ).start()

    def _listen(self, connection: Connection[Any, Any]) -> None:
        """Receive all reports of one rank. Closing the connection stops the rank's run."""
        with connection:
            try:
                # Here and not in `accept`, where a silent client would block the next one.
                deliver_challenge(connection, self._key)
                answer_challenge(connection, self._key)
            except (AuthenticationError, EOFError, OSError):
                return
            while True:
                try:
                    report = EpochReport(**json.loads(connection.recv_bytes()))
                    with self._one_at_a_time:
                        if not self._deliver(report):
                            return
                    connection.send_bytes(b"heard")
                except (EOFError, OSError):
                    return

    def _deliver(self, report: EpochReport) -> bool:
        if self.stopped or self.error is not None:
            return False
        try:
            self._on_report(report)
        except SystemExit:
            self.stopped = True
        except Exception as error:  # noqa: BLE001 - raised again in the trial's own thread
            self.error = error
        return not self.stopped and self.error is None

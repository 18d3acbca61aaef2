"""The record for trackers: a file of the run, and the thread of each tracker that delivers from it.

The loop appends to the file, and waits for nothing else. A line that is in the file is not lost, whatever
becomes of the process: the thread, a resumed run, or ``track sync`` delivers it. How far a tracker has got
is in a file of its own, which also is the lock of the process that delivers.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import gettempdir
from threading import Event, Lock, Thread
from typing import Any

from distributed.interfaces.tracker import Place, Tracker, TrackerSpec
from distributed.redaction import redact, redact_text
from distributed.system.json_lines import append_line, read_lines
from distributed.system.private_folders import PrivateFolder
from distributed.system.random_numbers import draw_apart

__all__ = ["Delivery", "Outbox"]

logger = logging.getLogger("distributed")

_POLL = 0.5
"""Seconds after which records are delivered."""
_SILENCE = 60.0
"""Seconds without progress after which a tracker is said not to answer."""
_KEPT_DAYS = 30
"""Age up to which files of runs without a folder are kept."""
_METRICS = ("log_metrics", "log_epoch")


class Outbox:
    """The file of one training, over restarts, resumed runs and further fits.

    Args:
        folder: of the run; None for one in the folder of temporary files.
        training: identifies the training.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | None, training: str) -> None:
        found = _folder_without_run() if folder is None else Path(folder)
        self.path = (found / f"tracking-{training[:16]}.jsonl").absolute()
        # Steps that an earlier attempt recorded, and is not to record again: the last, and its names.
        self._done: dict[str, tuple[int, set[str]]] = {}
        for _, line in read_lines(self.path) if self.path.exists() else ():
            if line.get("call") in _METRICS:
                pairs, step = line["args"]
                last, names = self._done.get(line["call"], (-1, set()))
                if step >= last:
                    kept = names if step == last else set()
                    self._done[line["call"]] = (step, kept | {name for name, _ in pairs})

    def append(self, call: str, *args: Any, **more: Any) -> None:
        """Add a call of a method of the trackers; of metrics, those that no earlier attempt has recorded at
        this step or behind it.

        Raises:
            OSError: the file cannot be written.
        """
        if call in _METRICS:
            metrics, step = args
            last, names = self._done.get(call, (-1, ()))
            fresh = [[name, value] for name, value in metrics.items() if step > last or name not in names]
            if step < last or not fresh:
                return
            args = (fresh, step)
        append_line(self.path, {"call": call, "time": round(time.time(), 3), "args": args, **more})


class Delivery:
    """Delivers the lines of a file to one tracker.

    Args:
        path: of the `Outbox`.
        make: makes the tracker.
        training: identifies the training.
        context: of the tracker, beside what it keeps by itself.

    Attributes:
        first: the tracker that is started first.
        target, title: where it writes, without secrets, and this with its name.
        delivered: lines that the tracker got by this delivery.
    """

    def __init__(
        self,
        path: Path,
        spec: TrackerSpec,
        make: Callable[[], Tracker],
        training: str,
        context: Mapping[str, Any],
    ) -> None:
        self.path, self.spec, self.make, self.training = path, spec, make, training
        self.context = dict(context)
        self.params = self.context.pop("params", {})
        self._unused: Tracker | None = make()
        self.first = self._unused
        self.first.context = dict(self.context)
        # Read here, not in the thread: a callback may change the working folder and the variables.
        self.context = {**self.first.kept(), **self.context}
        self.first.context = dict(self.context)
        self.target = redact_text(self.first.target())
        self.title = f"'{spec.name}'" + (f" ({self.target})" if self.target else "")
        self.delivered = 0
        self._tracker: Tracker | None = None
        self._start: dict[str, Any] = {"args": [{}], "place": {}}
        self._state: dict[str, Any] = {"offset": 0, "sending": 0, "kept": {}}
        self._lock, self._file, self._left = Lock(), -1, False
        self._closing, self._wake, self._warned = Event(), Event(), False
        self._method, self._progress = "start", time.monotonic()
        self._thread = Thread(target=self._run, daemon=True, name=f"tracker-{spec.name}")

    # -- beside a loop ---------------------------------------------------------------

    def begin(self) -> None:
        """Deliver in a thread, until `end`."""
        self._thread.start()

    def watch(self) -> None:
        """Warn, once, of a tracker that does not answer."""
        if time.monotonic() - self._progress > _SILENCE:
            self._warn(f"has not answered in {self._method} for {_SILENCE:.0f} s")

    def close(self) -> None:
        """Let the thread end when all is delivered."""
        self._closing.set()
        self._wake.set()

    def end(self) -> None:
        """Wait for the thread after `close`, `Tracker.limit` seconds at most."""
        self._thread.join(self.first.limit)
        if self._thread.is_alive():
            with self._lock:  # what it has delivered since is delivered again, or found there
                self._left = True
                self._release()
            self._warn(f"has not answered in {self._method} for {self.first.limit:.0f} s")

    def _warn(self, what: str) -> None:
        if not self._warned:
            logger.warning(
                "tracker %s %s; training continues. What it did not get is kept, and"
                " `python -m distributed.cli track sync %s` delivers it",
                self.title,
                what,
                shlex.quote(str(self.path)),
            )
        self._warned = True

    # -- the delivery ----------------------------------------------------------------

    def run(self) -> None:
        """Deliver all lines in this thread.

        Raises:
            BlockingIOError: another process delivers.
            Exception: of the tracker.
        """
        self._closing.set()
        self._deliver(wait=False)

    def _run(self) -> None:
        try:
            self._deliver(wait=True)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            if not self._left:
                self._warn(f"failed in {self._method} and is dropped: {type(error).__name__}: {error}")

    def _deliver(self, wait: bool) -> None:
        self._acquire(wait)
        try:
            if self._state.get("target", self.target) != self.target:
                self._state = {"offset": 0, "sending": 0, "kept": {}}  # elsewhere, from the start
            self._state["target"] = self.target
            position = 0
            while not self._left:
                closing, self._progress = self._closing.is_set(), time.monotonic()
                lines = list(read_lines(self.path, position))
                if lines:
                    position = lines[-1][0]
                    self._take(lines)
                elif closing:
                    break
                elif self._wake.wait(_POLL):
                    self._wake.clear()
            if self._tracker is not None and not wait:  # its rank was killed
                self._call("finish", "failed")
        finally:
            self._release()

    def _take(self, lines: list[tuple[int, dict[str, Any]]]) -> None:
        done = self._state["offset"]
        for line in (line for end, line in lines if end <= done and line["call"] == "start"):
            self._start = line
        fresh = [line for end, line in lines if end > done]
        if not fresh:
            return
        uncertain = self._state["sending"] > done
        self._save(sending=lines[-1][0])
        for line in fresh:
            if line["call"] == "start":
                self._start = line
            if self._tracker is None:
                self._open(uncertain)
            if line["call"] != "start":
                self._call(line["call"], *line["args"], moment=line["time"])
        if self._tracker is not None:
            self._method = "flush"
            self._tracker.flush()
            self._state["kept"] = self._tracker.kept()
        self.delivered += len(fresh)
        self._save(offset=lines[-1][0])

    def _open(self, uncertain: bool) -> None:
        self._method = "start"
        tracker, self._unused = self._unused or self.make(), None
        tracker.context = {**self.context, **self._state["kept"]}
        tracker.training, tracker.uncertain = self.training, uncertain
        tracker.place = Place(**self._start["place"])
        draw_apart(self._modules())
        tracker.start({**self._start["args"][0], **redact(self.params)})
        draw_apart(self._modules())  # those that it has imported
        self._tracker = tracker
        # A tracker that has begun a run is not to begin another if the process ends now.
        self._save(kept=tracker.kept())

    def _modules(self) -> list[str]:
        own = self.spec.target.partition(":")[0]
        return [name for name in sys.modules if name == own or name.partition(".")[0] in self.spec.requires]

    def _call(self, method: str, *args: Any, moment: float | None = None) -> None:
        assert self._tracker is not None
        self._method, self._tracker.moment = method, moment
        if method in _METRICS:
            args = ({name: float(value) for name, value in args[0]}, args[1])
        if method == "log_text":
            with PrivateFolder() as folder:
                path = Path(folder, args[0])
                path.write_text(args[1], encoding="utf-8")
                self._tracker.log_artifact(str(path))
            return
        if method == "log_artifact" and self.context.get("later") and not os.path.exists(args[0]):
            logger.warning("tracker '%s' gets no %s, which is no longer there", self.spec.name, args[0])
            return
        getattr(self._tracker, method)(*args)
        if method == "finish":
            self._state["kept"], self._tracker = self._tracker.kept(), None

    # -- how far it is ---------------------------------------------------------------

    def _acquire(self, wait: bool) -> None:
        path = self.path.with_suffix(f".{self.spec.name}")
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        self._file = file
        text = os.pread(file, 1 << 20, 0).partition(b"\n")[0]
        if text:
            self._state = json.loads(text)

    def _save(self, **values: Any) -> None:
        """Write the state in one call, so that a killed process leaves the old or the new one."""
        with self._lock:
            if self._left:
                raise TimeoutError("the run has ended")
            self._state |= values
            # Without secrets, which the next process has by itself.
            kept = {n: v for n, v in self._state["kept"].items() if redact(v, n) == v}
            os.pwrite(self._file, json.dumps({**self._state, "kept": kept}).encode() + b"\n", 0)

    def _release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _folder_without_run() -> Path:
    """This user's folder for runs without one."""
    folder = Path(gettempdir(), f"distributed-tracking-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > _KEPT_DAYS * 86400:
            path.unlink(missing_ok=True)
    return folder

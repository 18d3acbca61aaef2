"""The lease on a directory of checkpoints: only the run that holds it writes there.

A claim is a file ``.lease-NNNNNNNN`` that names a process. To acquire the lease, a process

1. lists the claims; a claim whose process has ended is void, and any other one makes it wait;
2. makes the claim after the highest number, only where there is none;
3. lists again, and withdraws its claim if there is one that was not in the first list;
4. removes the void claims.

Of two processes that have made a claim, the later one's second list contains the earlier one's claim, so
that never both hold the lease. Nothing but exclusive creation is needed: a hard link on disks, and a
conditional put in object stores.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed.checkpoint.file_names import FORMAT, LEASE, STEP, VERSION, lease_name
from distributed.checkpoint.filesystem import FileLayer, seal, unseal
from distributed.errors import UserError
from distributed.system.process_identity import ProcessIdentity

__all__ = ["Lease"]

logger = logging.getLogger("distributed")

_ENDING = 5.0
"""Seconds to wait for a process of this host to end. A rank whose launcher was killed takes a moment."""
_BEATS = 6
"""Heartbeats within the time after which a missing one counts."""
_LOOK = 0.1
_TRIES = 3
"""Attempts to make a claim in a store that does not respond, or that refuses two puts at a time."""


@dataclass(frozen=True)
class Claim:
    """A claim as it was read.

    Attributes:
        path: its file.
        run: the run that made it; empty when the file cannot be read.
        owner: the process that made it; None when the file cannot be read.
        acquired: when, in seconds since the epoch.
        timeout: seconds without a heartbeat after which it is void, where its process cannot be checked.
        beat: what its heartbeat changes.
    """

    path: str
    run: str
    owner: ProcessIdentity | None
    acquired: float
    timeout: float
    beat: tuple[float, int]

    @property
    def key(self) -> tuple[str, str]:
        """Distinguishes it from a later claim of the same name."""
        return self.path, self.run

    def __str__(self) -> str:
        if self.owner is None:
            return f"the unreadable file {self.path}"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.acquired))
        return f"{self.owner}, since {since}"


@dataclass
class _Wait:
    """How long a claim has been waited for.

    Attributes:
        beat: its heartbeat when it was first seen.
        seconds: time in which this process has looked; a suspended one does not look.
    """

    beat: tuple[float, int]
    seconds: float = 0.0


class Lease:
    """The right to write into `directory`, once `attempt` has returned True.

    Args:
        files: what reads and writes there.
        timeout: seconds without a heartbeat after which another host may take the lease over.
        run: joins the claim of the run of that name, if there is one: another process holds the lease for
            this one.
        field: what set the directory, for messages.

    Attributes:
        run: names the run, for processes that join.
    """

    def __init__(
        self,
        files: FileLayer,
        directory: str,
        timeout: float = 60.0,
        run: str = "",
        field: str = "checkpoint_dir",
    ) -> None:
        self.files, self.directory, self.timeout, self.field = files, directory, timeout, field
        self.run = run or secrets.token_hex(8)
        self._path = ""
        self._owner, self._acquired = ProcessIdentity.own(), time.time()
        self._pid = os.getpid()
        self._waits: dict[tuple[str, str], _Wait] = {}
        self._failures = 0
        self._beat: threading.Thread | None = None
        self._released = threading.Event()

    def acquire(self) -> None:
        """Wait until the lease is held; as `attempt`."""
        while not self.attempt():
            pass

    def attempt(self) -> bool:
        """Try once to acquire the lease; waits a moment when it is not free.

        Returns:
            Whether it is held now.

        Raises:
            UserError: another run holds it.
            OSError: the directory cannot be read or written.
        """
        self.files.make_directories(self.directory)
        found = self._claims()
        joined = next((claim for claim in found.values() if claim.run == self.run), None)
        if joined is not None:
            self._hold_claim(joined.path, joined.owner == self._owner)
            return True
        for claim in found.values():
            if not self._is_void(claim):
                self._wait_for(claim)
                return False
        path = os.path.join(self.directory, lease_name(_next_number(found)))
        if not self._make_claim(path) or self._withdraws(path, found):
            return False
        for claim in found.values():
            self._remove_file(claim.path)
        self._hold_claim(path, own=True)
        return True

    def check(self) -> None:
        """Check that this run still holds the lease; makes the claim again in a directory that was emptied.

        Raises:
            UserError: another run has taken it over.
            OSError: the directory cannot be read.
        """
        if self._is_ours(self._path):
            return
        names = self.files.names(self.directory)
        if any(LEASE.fullmatch(name) or STEP.fullmatch(name) for name in names):
            raise UserError(
                "this run has lost its lease on the directory: another run took it over after"
                f" {self.timeout:g} s without a heartbeat, or its file was removed",
                field=self.field,
                got=self.directory,
                remedy="Let one run write there; resume this one with --resume when no other is running",
            )
        self.acquire()

    def release(self) -> None:
        """Give the lease back. Logs instead of raising."""
        self._released.set()
        if self._beat is None or self._pid != os.getpid():
            return  # another process holds it, or this one is a fork of the holder
        self._beat.join(_ENDING)
        self._beat = None
        try:
            if self._is_ours(self._path):
                self._remove_file(self._path)
        except OSError as error:
            logger.warning("the lease on %s cannot be released: %s", self.directory, error)

    # -- claims --------------------------------------------------------------------------

    def _claims(self) -> dict[tuple[str, str], Claim]:
        found = {}
        for name in sorted(filter(LEASE.fullmatch, self.files.names(self.directory))):
            try:
                claim = self._read(os.path.join(self.directory, name))
            except FileNotFoundError:
                continue  # released since it was listed
            found[claim.key] = claim
        return found

    def _read(self, path: str) -> Claim:
        # First the content: a network file system then has the time afresh, too.
        raw = self.files.read(path)
        modified = self.files.modified(path)
        try:
            return _claim(path, unseal(raw), modified)
        except (KeyError, TypeError, ValueError):
            return Claim(path, "", None, modified, self.timeout, (modified, 0))

    def _is_ours(self, path: str) -> bool:
        try:
            return bool(path) and self._read(path).run == self.run
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _make_claim(self, path: str) -> bool:
        """Make the claim at `path`; False when there is one, or this has to be tried again."""
        staging = os.path.join(self.directory, f".tmp-lease-{secrets.token_hex(8)}")
        try:
            self.files.create(path, self._content(0), staging)
        except FileExistsError:
            return False
        except ConnectionError:
            self._failures += 1
            if self._failures == _TRIES:
                raise
            return False
        return True

    def _content(self, beat: int) -> bytes:
        owner = self._owner.as_dict()
        times = {"acquired": self._acquired, "timeout": self.timeout, "beat": beat}
        return seal({"format": FORMAT, "version": VERSION, "run": self.run, "owner": owner, **times})

    def _withdraws(self, path: str, known: Mapping[tuple[str, str], Claim]) -> bool:
        """Whether another process has made a claim meanwhile; this one's is then removed."""
        found = self._claims()
        own = (path, self.run)
        if own in found and all(key == own or key in known for key in found):
            return False
        if own in found:
            self._remove_file(path)
        return True

    def _remove_file(self, path: str) -> None:
        try:
            self.files.remove(path)
        except FileNotFoundError:
            return

    def _hold_claim(self, path: str, own: bool) -> None:
        self._path = path
        if own and self._beat is None:
            self._beat = threading.Thread(target=self._keep_alive, name="lease", daemon=True)
            self._beat.start()

    # -- others --------------------------------------------------------------------------

    def _is_void(self, claim: Claim) -> bool:
        ended = claim.owner.has_ended() if claim.owner is not None else None
        if ended is not None:
            return ended
        wait = self._waits.setdefault(claim.key, _Wait(claim.beat))
        if wait.seconds < claim.timeout or wait.beat != claim.beat:
            return False
        logger.warning(
            "taking over %s from %s: no heartbeat for %s s", self.directory, claim, f"{claim.timeout:g}"
        )
        return True

    def _wait_for(self, claim: Claim) -> None:
        """Wait a moment for a claim that is not void.

        Raises:
            UserError: it has been waited for long enough.
        """
        here = claim.owner is not None and claim.owner.has_ended() is not None
        limit = _ENDING if here else claim.timeout
        look = _LOOK if here else min(1.0, limit / 10)
        wait = self._waits.setdefault(claim.key, _Wait(claim.beat))
        if wait.seconds >= limit:
            raise self._refusal(claim)
        if wait.seconds == 0.0:
            logger.warning(
                "waiting up to %s s: %s belongs to the run of %s", f"{limit:g}", self.directory, claim
            )
        before = time.monotonic()
        time.sleep(look)
        wait.seconds += min(time.monotonic() - before, 2 * look)

    def _refusal(self, claim: Claim) -> UserError:
        return UserError(
            f"another run is writing there: {claim}",
            field=self.field,
            got=self.directory,
            allowed="a directory to which no other run writes",
            remedy="End that run, or choose another directory",
        )

    def _keep_alive(self) -> None:
        """Renew the claim until it is released or lost."""
        beat = 0
        while not self._released.wait(self.timeout / _BEATS):
            beat += 1
            try:
                if self._is_ours(self._path):
                    self.files.touch(self._path, self._content(beat))
            except OSError:
                continue  # a network that fails for a moment; `check` finds what is lost


def _claim(path: str, content: Mapping[str, Any], modified: float) -> Claim:
    owner = ProcessIdentity.from_dict(content["owner"])
    acquired, timeout = float(content["acquired"]), float(content["timeout"])
    if not 0 < timeout < 1e6:
        raise ValueError("no number of seconds")
    return Claim(path, str(content["run"]), owner, acquired, timeout, (modified, int(content["beat"])))


def _next_number(found: Mapping[tuple[str, str], Claim]) -> int:
    names = (LEASE.fullmatch(os.path.basename(path)) for path, _ in found)
    return 1 + max((int(name[1]) for name in names if name), default=0)

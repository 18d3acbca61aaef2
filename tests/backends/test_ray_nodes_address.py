"""How the nodes of a Ray cluster in an allocation reach each other."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from distributed_backends.ray import allocation
from distributed_backends.ray.allocation import _reachable

from distributed.system.addresses import own_addresses


def test_a_host_that_calls_itself_loopback_is_known_by_what_others_reach() -> None:
    """Debian's /etc/hosts has 127.0.1.1 for the host's own name."""
    assert _reachable("10.0.0.7", "127.0.1.1") == "10.0.0.7"
    for own in own_addresses():
        assert _reachable("127.0.1.1", own) == own
    assert _reachable("127.0.1.1", "127.0.1.1") in (own_addresses() or ["127.0.1.1"])


class Became(Exception):
    """What `exec` was given."""


@pytest.fixture
def no_exec(monkeypatch: pytest.MonkeyPatch) -> None:
    def become(program: str, words: list[str]) -> None:
        raise Became(words)

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "execvp", become)
    monkeypatch.setattr(signal, "signal", lambda *given: None)


def started(monkeypatch: pytest.MonkeyPatch, host: str) -> list[str]:
    monkeypatch.setenv("SLURMD_NODENAME", host)
    size = ["--num-gpus", "0", "--num-cpus", "2"]
    with pytest.raises(Became) as caught:
        allocation.main(["start", "--meet", "localhost", "--port", "20001", *size])
    words: list[str] = caught.value.args[0]
    return words


def test_two_jobs_on_a_host_share_neither_folder_nor_port(
    no_exec: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nor two users: what the first one leaves in Ray's usual folder, the next may not write."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "long/" * 12)
    found = []
    for _ in range(2):
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        port = next(w for w in started(monkeypatch, "localhost") if "client-server" in w).partition("=")[2]
        folder = Path(os.environ["RAY_TMPDIR"])
        found.append(folder)
        assert 1024 <= int(port) != 10001
        assert folder.stat().st_mode & 0o777 == 0o700
        # Sockets lie in it, and their paths have to be short.
        assert len(str(folder)) <= 24
        folder.rmdir()
    assert found[0] != found[1]
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    started(monkeypatch, "localhost")
    assert os.environ["RAY_TMPDIR"] == str(tmp_path)


def test_a_job_of_rays_waits_for_the_hosts_of_its_own_cluster(
    no_exec: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, int, float]] = []

    def wait(address: str, number: int, patience: float) -> int:
        asked.append((address, number, patience))
        return 0

    monkeypatch.setattr(allocation, "_await_nodes", wait)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    words = [
        "run",
        "--num-nodes",
        "2",
        "--patience",
        "1800",
        "--",
        "python",
        "-m",
        "x",
        "--",
        "--of-the-script",
    ]
    assert allocation.main(words) == 2
    assert "RAY_ADDRESS is not set" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    with pytest.raises(Became) as caught:
        allocation.main(words)
    assert asked == [("10.0.0.7:6379", 2, 1800)]
    assert caught.value.args[0] == ["python", "-m", "x", "--", "--of-the-script"]

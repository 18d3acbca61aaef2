"""A real Slurm on hosts in network namespaces: own munge, own controller, one slurmd a host."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Host, Network

__all__ = ["Cluster", "missing", "running"]

_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_HANGS = 900.0
"""Seconds: longer than the limit of any job here, and than Slurm waits before it queues a job again."""
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")
_CONF = """
ClusterName=test
SlurmctldHost=head
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=30
MpiDefault=none
{nodes}
PartitionName=batch Nodes=ALL Default=YES State=UP MaxTime=60
"""


def missing() -> str | None:
    """Which of Slurm's programs is not here; None when all are."""
    paths = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = [name for name in _NEEDED if shutil.which(name, path=paths) is None]
    return f"no {', '.join(absent)}; as root: make cluster-tools" if absent else None


class Cluster:
    """What a user does on the login node, which is the controller's host.

    Args:
        head: the controller's host.
        nodes: the hosts with a slurmd.
        folder: of configuration, logs and state.
    """

    def __init__(self, head: Host, nodes: Sequence[Host], folder: Path) -> None:
        self.head, self.nodes, self.folder = head, nodes, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def call(self, *argv: str, cwd: Path | None = None) -> str:
        """The output of a command on the login node."""
        process = self.head.start(
            argv, env=self.env, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        output, _ = process.communicate(timeout=60)
        self.head.processes.remove(process)
        if process.returncode:
            raise RuntimeError(f"{' '.join(argv)} exited with {process.returncode}: {output}")
        return str(output)

    def state(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says: JobState, Restarts, ExitCode, NodeList and so on."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def has_ended(self, job: str) -> bool:
        """Return True for a job that is over and not queued again."""
        return self.state(job)["JobState"] in _ENDED

    def wait(self, condition: Callable[[], Any], why: str, job: str | None = None) -> Any:
        """Poll `condition` until its result is true, and return it. Slurm sends no event when a job changes.

        Raises:
            TimeoutError: the job ended before, or Slurm hangs.
        """
        deadline = time.monotonic() + _HANGS
        while not (found := condition()):
            ended = job is not None and self.has_ended(job)
            if ended and (found := condition()):
                return found
            if ended or time.monotonic() > deadline:
                reason = "the job ended" if ended else f"{_HANGS:g} s have passed"
                raise TimeoutError(f"{reason}, and not: {why}; logs are in {self.folder}")
            time.sleep(0.2)
        return found

    def log(self) -> str:
        """The ends of the daemons' logs."""
        texts = [f"{p.name}:\n{p.read_text(errors='replace')[-2000:]}" for p in self.folder.glob("*.log")]
        return "\n".join(texts)


@contextmanager
def running(network: Network, folder: Path, cpus: int = 2) -> Iterator[Cluster]:
    """A Slurm whose controller is host ``head`` and whose nodes are the others."""
    nodes = [host for name, host in network.hosts.items() if name != "head"]
    cluster = Cluster(network["head"], nodes, folder)
    lines = [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={cpus} RealMemory=8000 State=UNKNOWN"
        for host in nodes
    ]
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes="\n".join(lines)))
    (folder / "state").mkdir()
    for host in nodes:
        (folder / "spool" / host.name).mkdir(parents=True)
    munge = _munge(folder)
    try:
        log = (folder / "daemons.log").open("w")
        options: dict[str, Any] = {"env": cluster.env, "stdout": log, "stderr": subprocess.STDOUT}
        cluster.head.start(["slurmctld", "-D", "-c"], **options)
        for host in nodes:
            host.start(["slurmd", "-D", "-N", host.name], **options)
        cluster.wait(lambda: _idle(cluster) == len(nodes), "the nodes are idle")
        yield cluster
    finally:
        for host in network.hosts.values():
            host.end()
        munge.terminate()
        munge.wait(timeout=10)


def _idle(cluster: Cluster) -> int:
    try:
        return cluster.call("sinfo", "--noheader", "--Node", "--format=%T").split().count("idle")
    except RuntimeError:
        return 0  # the controller is not there yet


def _munge(folder: Path) -> subprocess.Popen[bytes]:
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    names = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid"}
    names |= {"log-file": "munge.log", "seed-file": "munge.seed"}
    words = [f"--{option}={folder / name}" for option, name in names.items()]
    return subprocess.Popen(
        ["munged", "--foreground", "--force", *words],
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

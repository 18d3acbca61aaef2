"""The rendered batch script on a real Slurm of two nodes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm
from tests.cluster.hosts import Network, can_have_hosts

pytestmark = pytest.mark.needs(can_have_hosts() or slurm.missing())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm.Cluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with Network(["head", "n1", "n2"], folder) as network, slurm.running(network, folder) as cluster:
        yield cluster


def submit(cluster: slurm.Cluster, folder: Path, *flags: str) -> str:
    """Render in `folder` as a user does, and submit; the job's number."""
    words = ["--num-nodes", "2", "--gpus-per-node", "1", "--device", "cpu", "--deterministic"]
    words += ["--checkpoint-dir", "checkpoints", "--time", "10:00", "--python", sys.executable, *flags]
    command = [sys.executable, "-m", "distributed.cli", "deploy", "slurm", "--output", str(folder), *words]
    subprocess.run(command, check=True, cwd=folder, timeout=60)
    assert "to start at" in cluster.call("sbatch", "--test-only", str(folder / "train.sbatch"), cwd=folder)
    return cluster.call("sbatch", str(folder / "train.sbatch"), cwd=folder).split()[-1]


def output(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("train-*.out"))


def saved(folder: Path) -> int:
    """The newest step on the disk, 0 before the first."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*")), default=0)


def continued(folder: Path) -> list[tuple[int, int, int]]:
    """(epoch, sample, step) at which starts after the first went on."""
    found = re.findall(r"continues at epoch (\d+), sample (\d+), step (\d+)", output(folder))
    return [(int(epoch), int(sample), int(step)) for epoch, sample, step in found]


def told(folder: Path) -> list[int]:
    """The steps that were saved because a signal asked."""
    return [int(step) for step in re.findall(r"SIGUSR1: step (\d+) is saved", output(folder))]


def test_a_job_that_is_told_to_go_is_requeued_and_ends_with_the_same_weights(
    cluster: slurm.Cluster, tmp_path: Path
) -> None:
    """Once by the batch shell, as Slurm warns before the time limit, and once by every rank itself."""
    alone, warned = tmp_path / "alone", tmp_path / "warned"
    for folder in (alone, warned):
        folder.mkdir()
    first = submit(cluster, alone, "--epochs", "40")
    job = submit(cluster, warned, "--epochs", "40")
    try:
        for number, way in enumerate((["--batch"], [])):
            before = saved(warned)
            cluster.wait(lambda before=before: saved(warned) > before, "a checkpoint is written", job)
            cluster.call("scancel", *way, "--signal=USR1", job)
            cluster.wait(lambda number=number: len(continued(warned)) > number, "the job goes on", job)
        for each in (job, first):
            cluster.wait(lambda each=each: cluster.has_ended(each), "the job ends")
    except TimeoutError as error:
        pytest.fail(f"{error}\n{output(warned)}\n{cluster.log()}")
    done = cluster.state(job)
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("COMPLETED", "0:0", "2"), output(warned)
    assert cluster.state(first)["Restarts"] == "0"
    assert [step for _, _, step in continued(warned)] == told(warned)
    # 1,437 samples in 23 steps of 64; the signal may come at the last of them.
    for epoch, sample, step in continued(warned):
        assert sample == min(1437, (step - 23 * epoch) * 64)
    assert "2 ranks on 2 nodes" in output(alone)
    command = [sys.executable, "-m", "distributed.cli", "checkpoint", "diff", str(alone / "checkpoints")]
    same = subprocess.run(
        [*command, str(warned / "checkpoints")], capture_output=True, text=True, check=False
    )
    assert "equal, bit for bit" in same.stdout, same.stdout


def test_a_job_that_fails_is_not_requeued(cluster: slurm.Cluster, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    job = submit(cluster, tmp_path, "--script", str(tmp_path / "fails.py"), "--name", "train")
    cluster.wait(lambda: cluster.has_ended(job), "the job ends")
    done = cluster.state(job)
    assert (done["JobState"], done["ExitCode"], done["Restarts"]) == ("FAILED", "1:0", "0"), output(tmp_path)


def test_srun_alone_starts_every_hosts_ranks(cluster: slurm.Cluster, tmp_path: Path) -> None:
    """One task a host; where they meet is Slurm's to say. `preflight` runs the same way."""
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", sys.executable]
    ours = [*srun, "-m", "distributed.cli"]
    place = ["--num-nodes", "2", "--gpus-per-node", "2", "--device", "cpu"]
    trained = cluster.call(*ours, "train", *place, "--epochs", "1", cwd=tmp_path)
    assert "4 ranks on 2 nodes" in trained
    assert "note: hosts meet at n1:" in trained
    assert "epoch 0" in trained
    tested = cluster.call(*ours, "preflight", *place, "--checkpoint-dir", str(tmp_path), cwd=tmp_path)
    assert "shared by all hosts" in tested
    assert "gloo:" in tested

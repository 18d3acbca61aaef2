"""Runs that are told to go: saved at one step on every rank, exit code 75, and gone on with exactly."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distributed import EarlyStopping, Preempted, Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.interfaces.callback import Context
from tests.support import commands
from tests.support.ports import free_port
from tests.support.processes import children, started_since
from tests.support.training import Die, OnStep, make_trainer

# Trains 24 steps of 10 samples, on as many ranks as argv says, and at step SIGNAL_AT of rank SIGNAL_RANK
# sends a signal to SIGNAL_TO and waits until it has come back; leaves the epochs' figures in the working
# folder.
SCRIPT = """
import json, os, signal, sys
import torch
from torch import nn
from distributed import Callback, EarlyStopping, Trainer
from distributed.resilience.preemption import received_signal

class Call(Callback):
    all_ranks = True
    def on_step_end(self, context):
        at = int(os.environ.get("SIGNAL_AT", "-1")), int(os.environ.get("SIGNAL_RANK", "0"))
        if (context.progress.step, context.world.rank) == at:
            number = getattr(signal, os.environ["SIGNAL"])
            heard, hear = os.pipe()
            os.set_blocking(hear, False)
            signal.set_wakeup_fd(hear)
            if os.environ["SIGNAL_TO"] == "parent":
                os.kill(int(os.environ.get("STARTED_BY") or os.getppid()), number)
            elif os.environ["SIGNAL_TO"] == "group":
                os.killpg(0, number)
            else:
                os.kill(os.getpid(), number)
            # The launcher needs a while to pass it on, and the other ranks wait for this one.
            while received_signal() is None:
                os.read(heard, 1)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without
    if "RANK" not in os.environ:
        os.environ["STARTED_BY"] = str(os.getpid())
    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(60, 4).double(), torch.randint(0, 2, (60,)))
    loader = torch.utils.data.DataLoader(data, shuffle=True, num_workers=int(os.environ.get("WORKERS", "0")))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    trainer = Trainer(
        model, num_processes=int(sys.argv[1]), global_batch_size=12, batch_size=None, epochs=5,
        callbacks=[Call(), EarlyStopping("val_loss", patience=50)], device="cpu", deterministic=True,
        learning_rate=0.05, checkpoint_dir="checkpoints", resume_from_checkpoint=True,
        checkpoint=json.loads(os.environ.get("CHECKPOINT", "{}")),
        return_weights="none",
    )
    history = trainer.fit(loader, data)
    if history.world_size and int(os.environ.get("RANK", "0")) == 0:
        with open("figures.json", "w") as file:
            json.dump(history.epochs, file)
"""


def train(
    folder: Path, ranks: int, *launcher: str, fresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """One start of `SCRIPT` in `folder`."""
    return start(SCRIPT, folder, *(launcher or (sys.executable,)), words=[str(ranks)], fresh=fresh, **env)


def start(
    program: str,
    folder: Path,
    *launcher: str,
    words: Sequence[str] = (),
    fresh: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """`launcher` with `program` as its script and `words` as the script's own, in `folder`."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(program)
    return commands.run(
        [*launcher, str(script), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        timeout=120,
        fresh=fresh,
    )


def newest(folder: Path) -> PortableReader:
    return PortableReader(str(max((folder / "checkpoints").glob("step_*"))))


def weights(folder: Path) -> dict[str, Any]:
    reader = newest(folder)
    return {f"{key} {name}": reader.read(key, name) for key, name in reader.tensors()}


def figures(folder: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((folder / "figures.json").read_text())
    return found


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """ranks -> folder of a run that nobody interrupted."""
    folders = {ranks: tmp_path_factory.mktemp("alone") for ranks in (1, 2)}
    for ranks, folder in folders.items():
        done = train(folder, ranks)
        assert done.returncode == 0, done.stderr
    return folders


@pytest.mark.parametrize(
    ("ranks", "to", "name", "workers"),
    [
        (1, "self", "SIGTERM", "0"),
        (2, "parent", "SIGUSR1", "0"),
        (2, "group", "SIGTERM", "1"),
        (1, "group", "SIGINT", "1"),
        (2, "parent", "SIGINT", "0"),
    ],
)
def test_every_rank_saves_at_one_step_and_the_resumed_run_ends_with_the_same_bits(
    ranks: int, to: str, name: str, workers: str, left_alone: dict[int, Path], tmp_path: Path
) -> None:
    """In the middle of an epoch. The first epoch's figures, too, are those of a whole epoch."""
    signal_at = {"SIGNAL_TO": to, "SIGNAL_AT": "2", "SIGNAL_RANK": str(ranks - 1)}
    # The first of each signal is sent to processes that were started as a user starts them.
    fresh = to != "group" and name != "SIGINT"
    gone = train(tmp_path, ranks, fresh=fresh, SIGNAL=name, WORKERS=workers, **signal_at)
    assert gone.returncode == (-signal.SIGINT if name == "SIGINT" else 75), gone.stderr
    saved = newest(tmp_path)
    assert 2 <= saved.step <= 4
    assert (
        f"stopped by {name}: step {saved.step} is saved in {saved.path}; run the same command with --resume"
        in gone.stdout
    )
    assert not (tmp_path / "figures.json").exists()
    if workers != "0":  # What a worker hands over lies elsewhere in memory, and kernels round by that.
        left_alone = {ranks: tmp_path / "alone"}
        assert train(left_alone[ranks], ranks, WORKERS=workers).returncode == 0
    done = train(tmp_path, ranks, WORKERS=workers)
    assert done.returncode == 0, done.stderr
    assert f"continues at epoch 0, sample {saved.step * 12}, step {saved.step}" in done.stdout
    whole = weights(left_alone[ranks])
    assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(tmp_path).items())
    assert figures(tmp_path) == figures(left_alone[ranks])


@pytest.mark.starts_processes
def test_another_number_of_ranks_goes_on_with_the_epochs_figures(
    left_alone: dict[int, Path], tmp_path: Path
) -> None:
    gone = train(tmp_path, 2, SIGNAL="SIGTERM", SIGNAL_TO="parent", SIGNAL_AT="2")
    assert gone.returncode == 75, gone.stderr
    done = train(tmp_path, 1)
    assert done.returncode == 0, done.stderr
    for ours, alone in zip(figures(tmp_path), figures(left_alone[1]), strict=True):
        assert ours == pytest.approx(alone, rel=1e-12)


def test_one_rank_of_torchrun_is_enough(
    left_alone: dict[int, Path], tmp_path: Path, forking_python: Path
) -> None:
    """What it prints and its exit code are torchrun's own; all ranks saved the same step."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    signal_at = {"SIGNAL": "SIGUSR1", "SIGNAL_TO": "self", "SIGNAL_AT": "2", "SIGNAL_RANK": "1"}
    gone = train(tmp_path, 2, *torchrun, fresh=True, **signal_at)
    assert gone.returncode == 1
    assert gone.stdout.count("SIGUSR1: step") == 1
    assert "exitcode  : 75" in gone.stderr
    again = (*torchrun[:-1], "--master-port", str(free_port()))
    done = train(tmp_path, 2, *again, PYTHON_EXEC=str(forking_python))
    assert done.returncode == 0, done.stderr
    whole = weights(left_alone[2])
    assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(tmp_path).items())


def test_our_torchrun_passes_signals_on_and_exits_with_75(
    left_alone: dict[int, Path], tmp_path: Path, forking_python: Path
) -> None:
    """Sent to torchrun itself, which would die of it; and nobody is started again."""
    ours = (sys.executable, "-m", "distributed.torchrun", "--nproc-per-node=2", "--standalone")
    signal_at = {"SIGNAL": "SIGUSR1", "SIGNAL_TO": "parent", "SIGNAL_AT": "2"}
    gone = train(tmp_path, 2, *ours, "--max-restarts=2", fresh=True, **signal_at)
    assert gone.returncode == 75, gone.stderr
    assert gone.stdout.count("SIGUSR1: step") == 1
    again = (*ours[:-1], "--master-port", str(free_port()))
    done = train(tmp_path, 2, *again, PYTHON_EXEC=str(forking_python))
    assert done.returncode == 0, done.stderr
    whole = weights(left_alone[2])
    assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(tmp_path).items())


def test_a_signal_that_reached_nobody_was_not_passed_on() -> None:
    """Between a failure and a restart torch still knows the pids of the ranks that ended."""
    from distributed.torchrun import Agent

    class Ended:
        def pids(self) -> dict[int, int]:
            process = subprocess.Popen(["true"])
            process.wait()
            return {0: process.pid}

    agent = Agent.__new__(Agent)
    agent._pcontext = Ended()
    assert not agent.pass_on(signal.SIGUSR1)
    agent._pcontext = None
    assert not agent.pass_on(signal.SIGUSR1)


# Tells who started it to go, before it can hear anything itself; started again it just ends.
EARLY = """
import os, signal
os.mkdir(os.environ["TORCHELASTIC_RESTART_COUNT"] + "-" + os.environ["RANK"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGTERM)
    signal.pause()
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_our_torchrun_was_told_to_end_before_they_listen_are_not_started_again(
    ranks: int, tmp_path: Path
) -> None:
    """As when the machine is taken away while the dataset loads. There is nothing to save yet."""
    ours = (sys.executable, "-m", "distributed.torchrun", f"--nproc-per-node={ranks}", "--standalone")
    gone = start(EARLY, tmp_path, *ours, "--max-restarts=2")
    assert gone.returncode == 75, gone.stderr
    assert not list(tmp_path.glob("[1-9]-*"))


def test_a_signal_while_ranks_are_being_started_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does not know their pids yet; and once they were told, nobody is started any more."""
    from distributed.torchrun import Agent, _Preempted

    with subprocess.Popen(["sleep", "600"]) as rank:

        class Started:
            def pids(self) -> dict[int, int]:
                return {0: rank.pid}

        def begin(self: Agent, group: Any) -> None:
            assert self.pass_on(signal.SIGTERM)
            self._pcontext = Started()

        monkeypatch.setattr(Agent.__mro__[1], "_start_workers", begin)
        agent = Agent.__new__(Agent)
        agent._pcontext = None
        agent._start_workers(None)
        assert rank.wait(60) == -signal.SIGTERM
    assert (agent.preempted, agent._remaining_restarts) == (True, 0)
    with pytest.raises(_Preempted):
        agent._start_workers(None)


@pytest.mark.starts_processes
@pytest.mark.parametrize(("code", "seen"), [(3, 1), (2, 2)])
def test_our_torchrun_leaves_failures_as_they_are_and_tries_no_mistake_again(
    code: int, seen: int, tmp_path: Path
) -> None:
    program = f"import os\nos.mkdir(os.environ['TORCHELASTIC_RESTART_COUNT'])\nraise SystemExit({code})"
    ours = (sys.executable, "-m", "distributed.torchrun", "--nproc-per-node=1", "--standalone")
    done = start(program, tmp_path, *ours, "--max-restarts=1")
    assert done.returncode == seen
    assert (tmp_path / "1").exists() == (code == 3)


@pytest.mark.starts_processes
def test_signals_can_keep_their_usual_meaning(tmp_path: Path) -> None:
    gone = train(
        tmp_path, 1, SIGNAL="SIGTERM", SIGNAL_TO="self", SIGNAL_AT="2", CHECKPOINT='{"on_signal": false}'
    )
    assert gone.returncode == -signal.SIGTERM
    assert not list((tmp_path / "checkpoints").glob("step_*"))


INTERRUPTED = """
import signal, sys, time
import torch
from torch import nn
from distributed import Callback, Trainer
from distributed.checkpoint.reader import PortableReader
from distributed.checkpoint.torch_state import load_full_model
from distributed.resilience.preemption import received_signal

class Wait(Callback):
    all_ranks = True
    def __init__(self, until):
        self.until = until
    def on_step_end(self, context):
        if context.progress.step == 3 and context.world.rank == 1:
            print("blocked", flush=True)
            while self.until == "without end" or received_signal() is None:
                time.sleep(0.01)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data = torch.randn(60, 4), torch.randint(0, 2, (60,))
    model, saved = nn.Linear(4, 2), nn.Linear(4, 2)
    wait = Wait(sys.argv[1])
    trainer = Trainer(model, num_processes=2, global_batch_size=4, device="cpu", callbacks=[wait],
                      checkpoint_dir="checkpoints", tracking={"progress": "off"})
    try:
        trainer.fit(data)
    except KeyboardInterrupt as stopped:
        if sys.argv[1] == "without end":
            raise
        reader = PortableReader(trainer.history.checkpoint)
        assert f"step {reader.step} is saved in {reader.path}" in str(stopped)
        load_full_model(reader, saved)
        assert torch.equal(model.weight, saved.weight)
        trainer.callbacks = []
        assert trainer.fit(data, max_steps=2).steps["step"] == [reader.step + 1, reader.step + 2]
        print("caught", flush=True)
"""


@pytest.mark.starts_processes
@pytest.mark.parametrize("waits", ["for the signal", "without end"])
def test_ctrl_c_keeps_the_weights_and_a_second_one_ends_at_once(waits: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(INTERRUPTED)
    command = [sys.executable, "script.py", waits]
    before = children()
    with commands.start(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        while "blocked" not in run.stdout.readline():
            pass
        run.send_signal(signal.SIGINT)
        assert run.stderr.readline().startswith("interrupted: the ranks save at their next step")
        if waits == "without end":
            select.select([], [], [], 0.3)  # a second one any earlier is taken for the first
            run.send_signal(signal.SIGINT)
        out, errors = run.communicate(timeout=60)
    if waits == "without end":
        assert run.returncode == -signal.SIGINT, errors
        assert errors.rstrip().endswith("KeyboardInterrupt")
        assert not list((tmp_path / "checkpoints").glob("step_*"))
    else:
        assert run.returncode == 0, (out, errors)
        assert out.endswith("caught\n")
    assert started_since(before) == set()


def spoil_and_call(context: Context) -> None:
    """Send SIGTERM to this process once nothing can be saved any more."""
    folder = Path(str(context.config.checkpoint_dir))
    shutil.rmtree(folder)
    folder.write_text("a file")
    os.kill(os.getpid(), signal.SIGTERM)


def test_what_cannot_be_saved_is_no_preemption(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    act = OnStep(spoil_and_call, step=2)
    trainer = make_trainer(nn.Linear(2, 2), folder=tmp_path / "here", batch_size=2, callbacks=[act])
    with pytest.raises(OSError, match=r"preempted by SIGTERM, and step 2 could not be saved in .*here"):
        trainer.fit((torch.randn(20, 2), torch.zeros(20, dtype=torch.long)))
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_caller_hears_how_to_go_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Preempted is a SystemExit, so that a script needs no line for it; who catches it finds the facts."""
    call = Die(1, rank=0, number=signal.SIGUSR1)
    trainer = make_trainer(nn.Linear(2, 2), folder=tmp_path, batch_size=2, callbacks=[call])
    with pytest.raises(Preempted) as caught:
        trainer.fit((torch.randn(20, 2), torch.zeros(20, dtype=torch.long)))
    gone = caught.value
    assert (gone.code, gone.signal) == (75, "SIGUSR1")
    assert gone.checkpoint == str(tmp_path / f"step_{gone.step:08d}")
    assert trainer.history is not None
    assert trainer.history.stop_reason == "SIGUSR1"


@pytest.mark.starts_processes
def test_the_same_signal_later_means_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, which ends by it."""
    program = (
        "import os, signal, time\nfrom distributed.resilience import preemption\npreemption.INSIST = 0.0\n"
        "preemption.install_handlers()\nos.kill(os.getpid(), signal.SIGTERM)\n"
        "assert preemption.received_signal() == 'SIGTERM'\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()"
    )
    done = commands.run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == -signal.SIGTERM


def test_patience_survives_an_interruption(tmp_path: Path) -> None:
    """EarlyStopping waits on from where the checkpoint was made, in a new process or not."""

    def trainer(resume: bool, epochs: int) -> Trainer:
        return make_trainer(
            nn.Linear(2, 2), folder=tmp_path, resume_from_checkpoint=resume, epochs=epochs, batch_size=10,
            learning_rate=1e-30, callbacks=[EarlyStopping("val_loss", patience=3)],
        )  # fmt: skip

    data = (torch.randn(20, 2), torch.zeros(20, dtype=torch.long))
    trainer(False, epochs=3).fit(data, data)
    history = trainer(True, epochs=20).fit(data, data)
    assert history.stop_reason is not None
    assert "has not improved for 3 epochs" in history.stop_reason
    assert history.epochs[-1]["epoch"] == 3

"""``plan`` refuses flags without effect, and trials of what this machine cannot train, before it plans."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from distributed import Trainer, UserError
from distributed.cli import main
from distributed.operations.planning import machine_match, numbers_trial, plan_numbers, trial_limits
from distributed.operations.planning.machine_match import announce_difference, shared_cores
from distributed.operations.planning.other_load import ProcessorTime
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.measured_node import MeasuredNode
from distributed.planning import plan, verify
from distributed.system.host_memory import Room
from tests.planner.estimates.measured_profiles import linear_profile, linear_ranks

NUMBERS = ["--layers", "2", "--hidden", "64", "--heads", "2", "--vocabulary", "256", "--sequence", "32"]
SCRIPT = """
import torch
from torch import nn
from distributed import Trainer

Trainer(nn.Linear(8, 4), global_batch_size=8).fit((torch.randn(64, 8), torch.randint(0, 4, (64,))))
"""


def _never(*args: Any, **fields: Any) -> Any:
    raise AssertionError("the machine was not checked before")


@pytest.fixture
def few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_limits, "visible_gpus", lambda: 1)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search fails."""
    monkeypatch.setattr(plan_numbers, "table_of", _never)
    monkeypatch.setattr("distributed.operations.planning.plan_task.table_of", _never)


@pytest.mark.usefixtures("few_gpus", "unplanned")
def test_missing_gpus_are_found_before_anything_is_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(numbers_trial, "decoder_of", _never)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    for subject in (["--parameters", "7e9"], ["--script", str(tmp_path / "train.py")]):
        assert main(["plan", *subject, "--hardware", "H100", "--devices", "2", "--verify"]) == 2
        error = capsys.readouterr().err
        assert "--verify: a plan for 2 x H100 cannot be tried with the GPUs that are visible here" in error
        assert "Got 1. Allowed: 2 or more" in error
        assert "--hardware CPU" in error


@pytest.mark.usefixtures("few_gpus")
def test_ranks_may_share_a_gpu_over_gloo() -> None:
    from distributed.config import load
    from distributed.operations.planning.options import PlanOptions

    options = PlanOptions(hardware="H100", num_devices=2)
    with pytest.raises(UserError, match="cannot be tried with the GPUs"):
        trial_limits.check_devices(options, load())
    trial_limits.check_devices(options, load(None, {"device": "cuda", "communication_backend": "gloo"}))
    trial_limits.check_devices(PlanOptions(hardware="H100", num_devices=1), load())
    trial_limits.check_devices(PlanOptions(hardware="CPU", num_devices=8), load())


def test_a_model_larger_than_the_host_is_not_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice 4 bytes for each of 1.2e5 parameters, of which a kilobyte is left."""
    monkeypatch.setattr(numbers_trial, "decoder_of", _never)
    monkeypatch.setattr(trial_limits, "host_memory", lambda _: Room(2**10, "the free memory of the host"))
    words = [*NUMBERS, "--hardware", "CPU", "--devices", "1", "--axes", "data", "--verify"]
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert "--verify: the host has too little memory to try the plan with" in error
    assert "the free memory of the host" in error
    assert "--verify-layers" in error


def test_ranks_larger_than_the_host_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.randn(64, 8), torch.randn(64, 1)
    fields: dict[str, Any] = {"backend": "pytorch-ddp", "global_batch_size": 4, "device": "cpu"}
    model, loss = nn.Sequential(nn.Linear(8, 2**17), nn.Linear(2**17, 1)), nn.MSELoss()
    plans = plan(model, data, loss_fn=loss, hardware="CPU", num_devices=1, **fields)
    trainer = Trainer(model, loss_fn=loss, num_processes=1, **fields)
    monkeypatch.setattr(Trainer, "fit", _never)
    monkeypatch.setattr(trial_limits, "host_memory", lambda number: Room(2**20 // number, "a limit"))
    with pytest.raises(UserError, match="the host has too little memory to try the plan with 1 rank"):
        verify(plans, trainer, data, steps=3)


# -- flags -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "20"], "--steps: it is an option of --verify, which was not given. Got '20'"),
        (["--verify-layers", "1"], "--verify-layers: it is an option of --verify, which was not given"),
        (["--verify", "--verify-layers", "0"], "--verify-layers: must be a positive integer. Got '0'"),
        (["--verify", "--steps", "2"], "--steps: the first two steps are not timed. Got 2"),
        (["--verify", "--verify-layers", "3"], "; 2 blocks were found. Got 3. Allowed: 1 to 2"),
        (
            ["--verify", "--family", "gpt"],
            "--verify: a plan from these numbers is verified on a model of your own",
        ),
        (["--verify", "--experts", "4"], "Got 'family llama, 4 experts'"),
        (["--number", "2"], "--number: it selects the plan that --output writes or --verify tries"),
        (["--number", "99", "--verify"], "--number: the table has no row with this number. Got 99"),
        (["--number", "4", "--plans", "3", "-o", "p.yaml"], "Got 4. Allowed: 1 to 3. Choose one of these"),
        (["-o", "missing/plan.yaml"], "--output: the folder of the file does not exist. Got 'missing/"),
        (["--html", "missing/page.html"], "--html: the folder of the file does not exist. Got 'missing/"),
        (["-o", "."], "--output: a folder has this name. Got '.'"),
        (["-o", "/proc/plan.yaml"], "--output: no file can be created in this folder"),
        (
            ["--history", ".", "-o", "plan.yaml"],
            "--output: nothing is planned with --history. Got 'plan.yaml'",
        ),
        (["--axes", "tensor,tensor"], "axes: a name is given twice. Got 'tensor'"),
        (["--axes", ""], "axes: no axis is named"),
        (["--codecs", "fp16,fp16"], "codecs: a name is given twice. Got 'fp16'"),
    ],
)
def test_flags_are_checked_before_anything_is_planned(
    words: list[str],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *NUMBERS, "--hardware", "CPU", *words]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("unplanned")
def test_a_model_without_blocks_cannot_be_shortened(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = ["--script", str(tmp_path / "train.py"), "--hardware", "CPU", "--devices", "1"]
    assert main(["plan", *words, "--verify", "--verify-layers", "2"]) == 2
    error = capsys.readouterr().err
    assert "--verify-layers: the model cannot be shortened: 0 blocks were found" in error
    assert "Leave it out, or name the class of the blocks (block_classes)" in error


def test_more_blocks_than_are_assumed_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Of 120,000 parameters with a width of 64."""
    sizes = ["--parameters", "1.2e5", *NUMBERS[2:]]
    words = [*sizes, "--hardware", "CPU", "--devices", "1", "--verify", "--verify-layers", "9"]
    assert main(["plan", *words]) == 2
    assert "2 blocks were found. Got 9. Allowed: 1 to 2" in capsys.readouterr().err


# -- why a trial may be slow -------------------------------------------------------------------------


def test_a_busy_machine_and_shared_cores_are_noted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ranks than cores are a clause of the profile; a share of 0.3 is that of other processes."""
    monkeypatch.setattr(ProcessorTime, "others_until", lambda self, later: 0.3)
    monkeypatch.setattr(machine_match, "shared_cores", lambda profile, ranks: f"{ranks} ranks share 0 cores")
    monkeypatch.setattr("distributed.planning._peak", lambda *_: (None, "not asked for"))
    words = [*NUMBERS, "--hardware", "CPU", "--devices", "1", "--axes", "data", "--backend", "pytorch-ddp"]
    assert main(["plan", *words, "--verify", "--steps", "3", "--global-batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "note: 1 ranks share 0 cores: steps may be slower than predicted" in out
    assert "note: other processes used 30% of the processors meanwhile: steps may be slower" in out


def of_four_ranks() -> HardwareProfile:
    """A profile of this machine on which four ranks at work were measured."""
    node = MeasuredNode(cores=len(os.sched_getaffinity(0)), ranks={4: linear_ranks()})
    return linear_profile().model_copy(update={"measured": node, "devices_per_node": 4})


def test_ranks_share_cores_where_the_profile_does_not_cover_them() -> None:
    assumed = load_profile("CPU")
    assert shared_cores(assumed, 2, cores=2) is None
    assert shared_cores(assumed, 8, cores=2) == (
        "8 ranks share 2 cores, and the profile CPU has a core for each rank"
    )
    assert shared_cores(of_four_ranks(), 4, cores=2) is None, "measured so"
    assert str(shared_cores(of_four_ranks(), 8, cores=2)).endswith("was measured with at most 4")
    assert shared_cores(load_profile("H100"), 8, cores=2) is None


def test_a_plan_for_more_ranks_than_were_measured_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks of a node of GPUs are its devices; processes on a CPU are as many as are started."""
    announce_difference(of_four_ranks(), 8)
    assert "was measured with at most 4 ranks on the node, and the run has 8" in capsys.readouterr().err

"""Between two log steps a rank computes, copies and reads no more than the loop that one writes by hand.

What an operation costs is small, and a read of a value from a GPU is not: the host waits for all that it has
launched, and the GPU then for the host. Neither shows in the time of a step on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from distributed import Callback
from distributed.interfaces.plan import RunPlan
from distributed.testing.rank_pool import RankPool
from distributed.training.torch_backend import TorchBackend
from tests.support.counted_steps import BATCH, COUNTED, ByHand, CountSteps, Excess, build, data
from tests.support.emulated_device import DEVICE, EmulatedDevice
from tests.support.training import make_trainer

WRAPPED = {"serial": "none", "pytorch-ddp": "ddp", "fsdp": "fsdp"}


@dataclass(frozen=True)
class Form:
    """One form of training: the loop by hand, and the fields of the same training."""

    by_hand: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "plain": Form(),
    "clipped": Form({"max_norm": 1.0}, {"gradient_clipping": 1.0}),
    "accumulated": Form({"accumulation": 2}, {"gradient_accumulation_steps": 2}),
    "masked": Form({"masked": True}),
    "masked, accumulated": Form({"masked": True, "accumulation": 2}, {"gradient_accumulation_steps": 2}),
    "bf16": Form({"precision": "bf16"}, {"mixed_precision": "bf16"}),
    "fp16": Form({"precision": "fp16"}, {"mixed_precision": "fp16"}),
    "schedule": Form({}, {"scheduler": "cosine"}),
}
"""Each on one rank, and on two under pytorch-ddp and fsdp."""


@dataclass(frozen=True)
class Allowed:
    """What a form may have beyond the loop by hand, and why.

    Attributes:
        operations: that compute, per step.
        reads: that the host waits for, per step.
    """

    reason: str
    operations: float = 0
    reads: dict[str, float] = field(default_factory=dict)


_COUNT = (
    "how many targets of all ranks are unmasked travels with the gradients, and is divided by on the device:"
    " by hand a collective before the forward pass waits for the slowest rank"
)
_USE = (
    "the ranks compare which parameters they have used, because FSDP2 would add gradients of different ones:"
    " two numbers in host memory over gloo, under way meanwhile"
)
_NORM = "; the norm is added up in float64, over what several ranks hold only once"
_HOST = {"tolist": 1.0}

ALLOWED: dict[tuple[str, str], Allowed] = {
    ("pytorch-ddp", "masked"): Allowed(_COUNT, 8),
    ("pytorch-ddp", "masked, accumulated"): Allowed(_COUNT, 11),
    **{("fsdp", form): Allowed(_USE, 1, _HOST) for form in FORMS},
    ("fsdp", "clipped"): Allowed(_USE + _NORM, 6, _HOST),
    ("fsdp", "masked"): Allowed(f"{_USE}; {_COUNT}", 8, _HOST),
    ("fsdp", "masked, accumulated"): Allowed(f"{_USE}; {_COUNT}", 8, _HOST),
}
"""(backend, form) -> its limit; 0 for all others."""


def counted(
    backend: str, form: str, folder: Path, pool: RankPool, each_step: Callable[[Any], Any] | None = None
) -> list[Excess]:
    """Of each rank."""
    by_hand, ranks = ByHand(WRAPPED[backend], **FORMS[form].by_hand), 1 if backend == "serial" else 2
    make_trainer(
        build(),
        ranks,
        pool if ranks > 1 else None,
        backend=backend,
        batch_size=BATCH // by_hand.accumulation,
        log_every_n_steps=1000,
        callbacks=[CountSteps(folder, by_hand, each_step)],
        **FORMS[form].fields,
    ).fit(data(by_hand.masked), max_steps=COUNTED[1] + 1)
    return [Excess.read(folder / f"{rank}.json") for rank in range(ranks)]


def check(excess: Excess, allowed: Allowed) -> None:
    assert excess.reads == allowed.reads, excess.kinds
    assert max(0, excess.operations) == allowed.operations, excess.kinds


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", WRAPPED)
def test_a_step_computes_no_more_than_by_hand(
    backend: str, form: str, tmp_path: Path, rank_pool: RankPool
) -> None:
    for excess in counted(backend, form, tmp_path, rank_pool):
        check(excess, ALLOWED.get((backend, form), Allowed("")))


OTHERS: dict[str, tuple[dict[str, Any], dict[str, float], str]] = {
    **{f"codec {name}": ({"compression": {"codec": name}}, {}, "") for name in ("fp16", "int8", "top-k")},
    "tensor": ({"parallel": {"tensor": 2}}, {}, ""),
    "pipeline": (
        {"parallel": {"pipeline": 2}},
        {"equal": 1.0},
        "the state of random numbers in host memory: a stage that begins to draw is refused",
    ),
}
"""Ranks that send or divide what one does not do by hand: fields, reads per step, and why there are any."""


@pytest.mark.parametrize("form", OTHERS)
def test_ranks_that_send_or_divide_read_nothing(form: str, tmp_path: Path, rank_pool: RankPool) -> None:
    fields, reads, _ = OTHERS[form]
    given = {"backend": "pytorch-ddp", "batch_size": BATCH, "log_every_n_steps": 1000, **fields}
    callbacks = [CountSteps(tmp_path, ByHand())]
    make_trainer(build(), 2, rank_pool, callbacks=callbacks, **given).fit(data(False), max_steps=COUNTED[1])
    for rank in range(2):
        excess = Excess.read(tmp_path / f"{rank}.json")
        assert excess.reads == reads, excess.kinds


# -- copies and reads, on a device that is emulated ---------------------------------------


class CountBetween(Callback):
    """Counts on `device` in the steps that `COUNTED` delimits."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device

    def on_step_end(self, context: Any) -> None:
        self.device.counts = COUNTED[0] <= context.progress.step < COUNTED[1]


def emulated(monkeypatch: pytest.MonkeyPatch, masked: bool = False, **fields: Any) -> EmulatedDevice:
    """The device after a run on it."""
    monkeypatch.setattr(RunPlan, "device_of", lambda plan, local_rank: DEVICE)
    device = EmulatedDevice()
    given = {"batch_size": BATCH, "log_every_n_steps": 1000, "callbacks": [CountBetween(device)], **fields}
    with device:
        make_trainer(build(), backend="serial", **given).fit(data(masked), max_steps=COUNTED[1] + 1)
    return device


def expected_copies(size: int, steps: int, masked: bool = False) -> dict[tuple[int, ...], int]:
    """Inputs and targets of micro-batches of `size`."""
    shape = (size, 4) if masked else (size,)
    return {(*shape, 8): steps, shape: steps}


STEPS = COUNTED[1] - COUNTED[0]
READS: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "plain": ({}, {}, ""),
    "clipped": ({"gradient_clipping": 1.0}, {}, ""),
    "masked": ({"masked": True}, {}, ""),
    "schedule": ({"scheduler": "cosine", "warmup_steps": 4}, {}, ""),
    "fp16": (
        {"mixed_precision": "fp16", "gradient_clipping": 1.0},
        {"_local_scalar_dense": STEPS},
        "the scaler of torch reads whether a gradient was not finite",
    ),
    "skips": (
        {"on_nan": "skip"},
        {"_local_scalar_dense": STEPS},
        "a step whose gradients are not finite has to be skipped before the next one",
    ),
}
"""Fields, reads in `STEPS` steps, and why there are any."""


@pytest.mark.parametrize("form", READS)
def test_only_batches_are_copied_to_a_device_and_nothing_is_read(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, reads, _ = READS[form]
    device = emulated(monkeypatch, **fields)
    assert device.reads == reads
    assert device.to_device == expected_copies(BATCH, STEPS, "masked" in fields)
    assert not device.to_host


@pytest.mark.parametrize("masked", [False, True])
def test_micro_batches_are_copied_one_by_one(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = emulated(monkeypatch, masked, batch_size=BATCH // 2, gradient_accumulation_steps=2)
    assert (device.reads, device.to_host) == ({}, {})
    assert device.to_device == expected_copies(BATCH // 2, 2 * STEPS, masked)


# -- mutants ------------------------------------------------------------------------------


class ReadsEachLoss:
    """Put after the first step: the rank reads the loss of every step, as a progress bar might."""

    def __call__(self, context: Any) -> None:
        if context.progress.step == 1:
            context.backend.run_window = reading(context.backend.run_window)


def reading(run_window: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        total, count = run_window(*args)
        float(total)
        return total, count

    return run


@pytest.mark.parametrize("backend", ["serial", "pytorch-ddp"])
def test_a_rank_that_reads_each_loss_is_found(backend: str, tmp_path: Path, rank_pool: RankPool) -> None:
    for excess in counted(backend, "plain", tmp_path, rank_pool, ReadsEachLoss()):
        with pytest.raises(AssertionError, match=r"_local_scalar_dense': 1\.0"):
            check(excess, Allowed(""))


def test_a_read_of_each_loss_on_a_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "run_window", reading(TorchBackend.run_window))
    assert emulated(monkeypatch).reads == {"_local_scalar_dense": STEPS}

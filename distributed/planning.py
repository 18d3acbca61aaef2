"""plan: which split of a model over the ranks is fastest and fits, before a rank starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.load import as_layers, config_layers
from distributed.config.script_overlay import ScriptRun, command_line
from distributed.errors import UserError, hide_own_frames
from distributed.interfaces.callback import Callback
from distributed.interfaces.history import History
from distributed.operations.planning.options import PlanOptions
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.system.private_folders import PrivateFolder
from distributed.trainer import Trainer

if TYPE_CHECKING:
    from distributed.operations.planning.plans import Plans
    from distributed.operations.planning.verification import Verification
    from distributed.planner.estimates.search import Ranked

__all__ = ["plan", "verify"]

_NO_COUNTERS = (
    "the allocator of this process does not count what it has mapped, as glibc's does (check LD_PRELOAD)"
)
_NO_RANKS = "this backend trains in the caller's process, whose small allocations are not counted"
_MEASURED_STEPS = 3
"""The peak is that of steady training, which the second step has reached."""


@hide_own_frames
def plan(
    model: Any,
    train_loader: Any = None,
    config: DistributedConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    hardware: str | Path | HardwareProfile | None = None,
    num_devices: int | None = None,
    num_plans: int = 10,
    codecs: str | Collection[str] = (),
    axes: str | Collection[str] | None = None,
    optimizer: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    training_step: Callable[..., Any] | None = None,
    **fields: Any,
) -> Plans:
    """The fastest ways to train `model` that fit, without starting a rank.

    Args:
        model: as the `Trainer` takes it; or the numbers of a transformer: a mapping with the arguments of
            `distributed.planner.estimates.numbers.model_numbers`, such as ``parameters`` or ``layers`` and
            ``hidden``.
        train_loader: as `Trainer.fit` takes it, for a model object. Its first samples are read.
        config: where to start from: precision, optimizer and the global batch are kept, and how the ranks
            divide model and batch is chosen.
        hardware: name of a shipped profile, path of a file such as `calibrate` writes, or a profile. None:
            ``hardware.yaml`` of the working directory, else the profile of this machine's GPU, else ``CPU``.
        num_devices: number of devices, each with one rank. None: the configuration's number of ranks, else
            those of one node of the hardware.
        num_plans: number of plans to list.
        codecs: gradient codecs to try. They change gradients, so that none is tried by default.
        axes: axes of the mesh along which a plan may have several ranks, such as ``("data", "tensor")``
            or ``"data"``. None: all; for a large model object ``data`` and ``shard`` alone, because facts of
            its parts take minutes to record.
        optimizer: as the `Trainer` takes it.
        loss_fn: as the `Trainer` takes it.
        training_step: as the `Trainer` takes it.
        fields: fields of the configuration that a plan has to have, e.g. ``backend="fsdp"``,
            ``global_batch_size=64`` or ``parallel={"tensor": 2}``.

    Raises:
        UserError: a wrong value; a global batch that no split divides; a model larger than the cluster, with
            the smallest cluster that fits; a model whose control flow depends on values.
    """
    base, asked = config_layers(config), [Layer("argument", fields)]
    options = PlanOptions(hardware, num_devices, num_plans, codecs, axes)
    if isinstance(model, Mapping | ModelNumbers):
        from distributed.operations.planning.plan_numbers import plan_numbers

        given = {
            "train_loader": train_loader,
            "optimizer": optimizer,
            "loss_fn": loss_fn,
            "training_step": training_step,
        }
        _check_numbers_alone(given)
        return plan_numbers(model, base, asked, options)
    from distributed.operations.planning.plan_task import plan_task

    trainer = Trainer(
        model, config, optimizer=optimizer, loss_fn=loss_fn, training_step=training_step, **fields
    )
    task = trainer.task_of(trainer.config, train_loader, None)
    facts = trainer.facts_of(task)
    return plan_task(task, trainer.framework, facts, trainer.config, asked, options, [*base, *asked])


def _check_numbers_alone(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise UserError(
                "numbers of a transformer were given together with an object of a training",
                field=name,
                got=type(value).__name__,
                allowed="None beside numbers; an optimizer is a field of the configuration",
                remedy="Leave it out, or give the model object",
            )


def verify(
    plans: Plans,
    trainer: Trainer,
    train_loader: Any,
    index: int = 0,
    steps: int = 10,
    layers: int | None = None,
) -> Verification:
    """Train a few steps with a plan here, and compare what it predicted with what was measured.

    On CPU the memory is measured in a second run of three steps, because the measurement takes time. The
    model of `trainer` and its optimizer are copied; they are not trained.

    Args:
        plans: made for the model of `trainer`.
        index: of the plan.
        steps: optimizer steps. Those of the first log record are not timed.
        layers: train with so many blocks only, for which the prediction is made again.

    Raises:
        UserError: there are not so many devices or so much host memory here, or the model cannot be
            shortened.
        WorkerError: a rank failed.
    """
    from distributed.operations.planning.shorter_model import shortened
    from distributed.operations.planning.trial_limits import check_host_memory
    from distributed.operations.planning.verification import Verification, check_steps, run_fields

    check_steps(steps)
    plans.check(index)
    row = plans[index]

    def probe(fields: dict[str, Any], callbacks: Sequence[Callback] = ()) -> Trainer:
        model, optimizer = deepcopy((trainer.model, trainer.optimizer))
        if layers is not None:
            model, optimizer = shortened(model, optimizer, layers, trainer.config.block_classes)
        return Trainer(
            model,
            load_layers([*as_layers(trainer.config), Layer("plan", plans.fields(index) | fields)]),
            optimizer=optimizer,
            loss_fn=trainer.loss_fn,
            training_step=trainer.training_step,
            callbacks=callbacks,
        )

    with command_line(ScriptRun([])):
        timed = probe(run_fields(steps))
        if layers is not None:
            row = _predicted_again(timed, train_loader, plans, row)
        on_cpu, ranks = plans.profile.device == "cpu", row.split.dims.world_size
        if on_cpu:
            least, _ = plans.intervals(row)["memory"]
            check_host_memory(least, f"{ranks} rank{'s' if ranks > 1 else ''}", ranks)
        history, notes = _timed(timed, train_loader, plans.profile, ranks)
        if not on_cpu:
            return Verification(row, history, notes=notes)
        silent = {name: None for name in plans.fields(index) if name.startswith("planned.")}

        def measuring(callback: Callback) -> Trainer:
            # It prints no comparison of its own, whose step time would be that of the measurement.
            return probe({**run_fields(_MEASURED_STEPS), **silent, "launch": "spawn"}, [callback])

        peak, unmeasured = _peak(measuring, train_loader, ranks)
    hidden = peak is None and not unmeasured
    return Verification(row, history, peak, hidden, unmeasured, notes)


def _timed(
    trainer: Trainer, data: Any, profile: HardwareProfile, ranks: int
) -> tuple[History, tuple[str, ...]]:
    """The history of a run, and why its steps may be slower than those that were predicted."""
    from distributed.operations.planning.machine_match import shared_cores
    from distributed.operations.planning.other_load import BUSY, ProcessorTime

    start = ProcessorTime.now()
    history = trainer.fit(data)
    others = start.others_until(ProcessorTime.now())
    busy = f"other processes used {others:.0%} of the processors meanwhile" if others > BUSY else None
    found = (shared_cores(profile, ranks), busy)
    return history, tuple(f"{note}: steps may be slower than predicted" for note in found if note is not None)


def _peak(measuring: Callable[[Callback], Trainer], data: Any, ranks: int) -> tuple[int | None, str]:
    """Bytes of the rank that needs most, None where they are hidden or unknown, and why they are unknown.

    Args:
        measuring: the trainer of a run with a callback.
    """
    from distributed.operations.planning.host_peak import MeasurePeak, can_measure, peak_of

    if not can_measure():
        return None, _NO_COUNTERS
    with PrivateFolder() as folder:
        measure = MeasurePeak(Path(folder))
        try:
            measuring(measure).fit(data)
        except UserError as error:  # what cannot be sent to another process was timed in this one
            return None, f"the ranks that measure it do not start ({error})"
        return (None, _NO_RANKS) if measure.is_counted is False else (peak_of(Path(folder), ranks), "")


def _predicted_again(trainer: Trainer, data: Any, plans: Plans, row: Ranked) -> Ranked:
    from distributed.operations.planning.plan_task import predict_row

    task = trainer.task_of(trainer.config, data, None)
    return predict_row(task, trainer.config, plans, row.split)

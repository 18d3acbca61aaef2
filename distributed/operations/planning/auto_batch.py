"""``batch_size=auto``: the largest micro-batch that fits, by prediction and by two steps of training.

The ranks of a probe are processes of their own. They train two steps and end, so that the run itself begins
as without a probe: weights, buffers, optimizer, random numbers and data are untouched, and a rank that the
kernel ends for lack of memory is no failure of the run. A size that runs out of memory is followed by the
next smaller one. Accumulation makes up the same global batch, so that the training is the same (C1, C2).

Where ranks cannot be started for a probe, the ranks of the run choose by prediction: those of another
launcher, of several hosts, and those that an elastic run restarts in another number. Predictions are made in
a process of their own (`apart`), so that the ranks begin in the same state.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.communication.task_file import measure_task
from distributed.errors import UserError, WorkerError
from distributed.interfaces.backend import Backend
from distributed.interfaces.launcher import Launcher
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.launch import run
from distributed.launch.rank_process import RankPayload
from distributed.operations.planning.apart import call_apart, first_of
from distributed.operations.planning.micro_batch_effects import compares_samples
from distributed.operations.planning.plan_memory import UNTRIED, PlanMemory, held_on_host, in_units
from distributed.operations.planning.saved_batch import as_saved, same_share, saved_size
from distributed.planner.auto_batch import most_divided, with_micro_batch
from distributed.resilience.failure_reports import note_chosen_batch
from distributed.resilience.memory_failures import lacks_memory
from distributed.system.host_memory import Room, host_memory
from distributed.system.output import print_line
from distributed.system.private_files import write_private
from distributed.system.private_folders import PrivateFolder
from distributed.training.feeds import train_feed
from distributed.training.model_traits import check_chosen_batch, check_micro_batches
from distributed.training.routing_traits import check_routing
from distributed.training.task_checks import refuse_chosen_batch

__all__ = ["ChoiceInRanks", "choose_before_run", "choose_in_ranks", "probe_step"]

_ATTEMPT = "attempt.json"
_STEPS = 2
"""The first step makes the optimizer's state, which is in memory during the second."""
_BEAT = 10.0
"""Seconds, at most, between two broadcasts to ranks that wait for a prediction."""

_Needs = dict[int, int] | str
"""Size of a micro-batch -> bytes that a rank needs; or why that is not predicted."""


class _Choice(NamedTuple):
    """What the ranks chose.

    Attributes:
        size: samples of a micro-batch.
        reason: why, for the first lines of a run.
        predicted: whether memory was predicted.
        compares_samples: as of the plan.
    """

    size: int
    reason: str
    predicted: bool
    compares_samples: bool | None = None


class _Predicted(NamedTuple):
    """What the process that predicts has found.

    Attributes:
        needs: of each size.
        compares_samples: as of the plan.
    """

    needs: _Needs
    compares_samples: bool | None = None


# -- in the caller -------------------------------------------------------------------


def choose_before_run(
    plan: RunPlan,
    task: Task,
    launcher: Launcher | None = None,
    earlier: Mapping[str, int] | None = None,
) -> RunPlan:
    """`plan` with the micro-batch that its ranks can train with, or as it is where its ranks choose.

    Args:
        launcher: starts ranks instead of the backend's own launcher.
        earlier: the batch of the `fit` that this one continues (`History.batch`); None for the first.

    Raises:
        UserError: no size fits, or the training depends on the size.
        WorkerError: a rank failed for another reason.
    """
    if not plan.micro_batches:
        return plan
    _check_module(plan, task)
    if plan.mode == "join" or plan.num_nodes > 1:
        return plan
    if earlier is not None and (size := same_share(plan, earlier)) is not None:
        return _kept(plan, size, f"batch_size=auto: {size}, as in the fit before")
    if (size := saved_size(plan)) is not None:
        return _kept(plan, size, as_saved(size))
    task = first_of(task, plan.batch.global_batch_size)
    if plan.mode == "in-process":
        _check_travels(plan, task)
    return _probed(plan, task, launcher)


def _kept(plan: RunPlan, size: int, note: str) -> RunPlan:
    """`plan` with the size with which the training began. It continues the same training with any loss, so
    that the labels of its first micro-batch refuse none."""
    return replace(with_micro_batch(plan, size, note), compares_samples=False)


def _check_module(plan: RunPlan, task: Task, model: Any = None) -> None:
    """Raise a UserError for a module whose training depends on the size of a micro-batch, whatever size the
    memory allows.

    Args:
        model: that of the task, built; None where a factory has still to build it.
    """
    model = model or task.model
    if isinstance(model, nn.Module):
        batch, parts = most_divided(plan.batch), (1, plan.dims.context)
        check_chosen_batch(model)
        check_micro_batches(model, plan.spec.name, plan.world_size, batch, parts, is_chosen=True)
        check_routing(model, batch, own_loss=task.loss_fn is None, parts=parts, is_chosen=True)


def _probed(plan: RunPlan, task: Task, launcher: Launcher | None) -> RunPlan:
    sizes, failed = plan.micro_batches, list[int]()
    predicted = _predicted(plan, task)
    plan = replace(plan, compares_samples=predicted.compares_samples)
    step: Any = partial(probe_step, needs=predicted.needs)
    while sizes:
        attempt = replace(with_micro_batch(plan, sizes[0]), micro_batches=sizes)
        with PrivateFolder() as folder:
            try:
                found = run.probe(attempt, task, step, Path(folder), launcher)
            except WorkerError as error:
                attempt_file = Path(folder) / _ATTEMPT
                if not lacks_memory(error) or not attempt_file.exists():
                    raise  # also where the ranks have failed before they tried a size
                last = error
                failed.append(int(json.loads(attempt_file.read_text(encoding="utf-8"))))
            else:
                return with_micro_batch(plan, found["size"], found["reason"] + _after(failed))
        sizes = _sizes_after(failed, plan.micro_batches)
    raise UserError(
        f"a step runs out of memory with micro-batches of {', '.join(map(str, failed))} samples, the last of"
        f" which is the smallest: {last.summary.splitlines()[0]}",
        field="batch_size",
        got="auto",
        allowed="a model and a sample that fit into the memory of a rank",
        remedy="Set activation_checkpointing=full, use fsdp or a higher zero_stage, or more memory for each"
        " rank",
    ) from last


def _sizes_after(failed: list[int], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes to choose from after those that failed. The prediction was wrong once: the next smaller size
    is tried, then half of it, and the smallest last."""
    most = failed[-1] - 1 if len(failed) == 1 else failed[-1] // 2
    smaller = tuple(size for size in sizes if size < failed[-1])
    return tuple(size for size in smaller if size <= most) or smaller[-1:]


def _check_travels(plan: RunPlan, task: Task) -> None:
    """Raise a UserError for a task that no other process can train."""
    try:
        measure_task(RankPayload(plan, task, probe=partial(probe_step, needs="")))
    except Exception as error:
        raise UserError(
            "no size can be tried, and memory is not predicted, because the task cannot be pickled for"
            f" another process ({type(error).__name__}: {error})",
            field="batch_size",
            got="auto",
            allowed="a number here",
            remedy="Set batch_size to a number, or give a function that builds the model in place of a model"
            " that cannot be pickled, and open files, locks and connections inside the dataset",
        ) from error


def _after(failed: list[int]) -> str:
    return f"; out of memory with {', '.join(map(str, failed))}" if failed else ""


# -- in the ranks --------------------------------------------------------------------


def probe_step(plan: RunPlan, task: Task, backend: Backend, folder: Path, needs: _Needs) -> dict[str, Any]:
    """Choose a size by prediction and train two steps with it. Collective; called in ranks of a probe.

    Args:
        folder: where rank 0 leaves the size before it is tried.
        needs: what is predicted.

    Returns:
        ``size`` and ``reason``.
    """
    choice = _choice_for(plan, needs, _least_room(plan, task, backend))
    plan = with_micro_batch(plan, choice.size)
    if backend.world.rank == 0:
        write_private(folder / _ATTEMPT, json.dumps(choice.size).encode())
    backend.take_batch(plan)
    backend.prepare(task)
    backend.set_training(True)
    feed = train_feed(plan, task, backend)
    assert feed is not None
    for window in islice(feed.windows(0), 1):  # none, of a stream without samples
        for _ in range(_STEPS):
            backend.run_window(window)
            backend.optimizer_step(plan.config.gradient_clipping)
    return {"size": choice.size, "reason": f"{choice.reason}, tried in {_STEPS} steps"}


def choose_in_ranks(plan: RunPlan, task: Task, backend: Backend, has_fitted: bool = False) -> RunPlan:
    """The plan of this rank: where a size is still to be chosen, the ranks choose one by prediction.
    Collective.

    Args:
        has_fitted: the size in `plan` has fitted on another number of ranks.

    Raises:
        UserError: memory is not predicted, and no size has fitted before.
    """
    if not plan.micro_batches:
        return plan
    room = _least_room(plan, task, backend)
    share = UNTRIED[plan.device]
    room = Room(int(room.nbytes * share), f"{share:.0%} of {room.limit}")
    choice = _from_rank_zero(plan, backend, partial(_saved_or_predicted, plan, task, room))
    if not choice.predicted and not has_fitted:
        raise UserError(
            f"the ranks of another launcher, or of several hosts, choose by prediction: {choice.reason}",
            field="batch_size",
            got="auto",
            allowed="a number here",
            remedy="Set batch_size to a number, or let `fit` start the ranks of one host (launch=spawn)",
        )
    size = choice.size if choice.predicted else plan.batch.batch_size
    plan = replace(plan, compares_samples=choice.compares_samples)
    if backend.world.rank == 0:
        print_line(f"{choice.reason}, not tried", sys.stdout)
    chosen = with_micro_batch(plan, size)
    backend.take_batch(chosen)
    note_chosen_batch(plan.world_size, size)
    return chosen


class ChoiceInRanks:
    """Calls `choose_in_ranks`, and keeps the plan where this process is a rank.

    Args:
        has_fitted: as of `choose_in_ranks`.

    Attributes:
        plan: what was chosen; None before, and in a process that is no rank.
    """

    def __init__(self, has_fitted: bool) -> None:
        self._has_fitted = has_fitted
        self.plan: RunPlan | None = None

    def __call__(self, plan: RunPlan, task: Task, backend: Backend) -> RunPlan:
        self.plan = choose_in_ranks(plan, task, backend, self._has_fitted)
        return self.plan


def _least_room(plan: RunPlan, task: Task, backend: Backend) -> Room:
    """The least memory that a rank can allocate for training. Collective."""
    own = _room(plan, task, backend.world.device)
    return min(Room(*each) for each in backend.gather_objects(tuple(own)))


def _saved_or_predicted(plan: RunPlan, task: Task, room: Room) -> _Choice:
    saved = None if plan.mode == "spawn" and plan.num_nodes == 1 else saved_size(plan)
    if saved is not None:
        return _Choice(saved, as_saved(saved), True, compares_samples=False)
    predicted = _predicted(plan, task, in_rank=True)
    choice = _choice_for(plan, predicted.needs, room)
    return choice._replace(compares_samples=predicted.compares_samples)


def _from_rank_zero(plan: RunPlan, backend: Backend, work: Callable[[], _Choice]) -> _Choice:
    """What `work` returns on rank 0, where it takes what time it needs: a broadcast before
    `collective_timeout` lets the other ranks wait on. Collective.

    Raises:
        Exception: what `work` has raised, on all ranks.
    """
    done: queue.Queue[_Choice | Exception] = queue.Queue()
    if backend.world.rank == 0:
        threading.Thread(target=_put_result, args=(done, work), daemon=True).start()
    beat = min(_BEAT, plan.config.collective_timeout / 4)
    found: _Choice | Exception | None = None
    while found is None:
        if backend.world.rank == 0:
            with suppress(queue.Empty):
                found = done.get(timeout=beat)
        found = backend.broadcast_object(found)
    if isinstance(found, Exception):
        raise found
    return found


def _put_result(done: queue.Queue[_Choice | Exception], work: Callable[[], _Choice]) -> None:
    try:
        done.put(work())
    except Exception as error:  # noqa: BLE001 - raised on all ranks
        done.put(error)


def _choice_for(plan: RunPlan, needs: _Needs, room: Room) -> _Choice:
    """The largest size that is predicted to fit; where memory is not predicted, the largest."""
    if isinstance(needs, str):
        size = plan.micro_batches[0]
        return _Choice(size, f"batch_size=auto: {size} (memory is not predicted, {needs})", False)
    smallest = plan.micro_batches[-1]
    size = next((size for size in plan.micro_batches if needs[size] <= room.nbytes), smallest)
    of = f"{in_units(needs[size])} predicted of {in_units(room.nbytes)}, {room.limit}"
    return _Choice(size, f"batch_size=auto: {size} ({of})", True)


# -- in the process that predicts --------------------------------------------------------


def _predicted(plan: RunPlan, task: Task, in_rank: bool = False) -> _Predicted:
    """Predicted in a process of its own.

    Args:
        in_rank: this process is a rank of the run.

    Raises:
        UserError: the training depends on the size.
    """
    try:
        found = call_apart(plan, task, partial(_predict_needs, plan), in_rank)
    except UserError as error:
        return _Predicted(_why(error))
    except WorkerError as error:
        return _Predicted(f"the process that predicts has failed: {error.summary.splitlines()[0]}")
    if found["refused"]:
        raise UserError(**found["refused"])
    needs = found["why"] or {int(size): need for size, need in found["needs"].items()}
    return _Predicted(needs, found["compares"])


def _predict_needs(plan: RunPlan, task: Task) -> dict[str, Any]:
    """``refused``: arguments of a UserError for the model that a factory builds or for the loss, or None.
    ``needs``: size -> bytes of a rank at the peak of a step. ``why``: why that is not predicted, or empty.
    ``compares``: whether the loss compares samples, or None."""
    memory, needs = PlanMemory(task), dict[str, int]()
    found: dict[str, Any] = {"refused": None, "needs": needs, "why": "", "compares": None}
    try:
        model = memory.model(plan)
    except Exception as error:  # noqa: BLE001 - a factory is code of the user
        return {**found, "why": f"model: {type(error).__name__}: {error}"}
    try:
        _check_module(plan, task, model)
        compares = found["compares"] = _compares_samples(task, memory, model)
        if compares:
            refuse_chosen_batch("the loss compares the samples of a micro-batch with each other")
    except UserError as error:
        return {**found, "refused": {"message": error.message, **error.details}}
    try:
        for size in plan.micro_batches:
            needs[str(size)] = memory.parts(with_micro_batch(plan, size)).total
    except UserError as error:
        return {**found, "needs": {}, "why": _why(error)}
    return found


def _compares_samples(task: Task, memory: PlanMemory, model: nn.Module) -> bool | None:
    try:
        return compares_samples(task, model, memory.samples())
    except Exception:  # noqa: BLE001 - the dataset is code of the user; what needs its samples reports it
        return None


def _why(error: UserError) -> str:
    return f"{error.field}: {error.message}"


def _room(plan: RunPlan, task: Task, device: str) -> Room:
    """What this rank can allocate for training, the parameters that are there already included."""
    if device != "cpu":
        return Room(torch.cuda.mem_get_info(device)[0], f"the free memory of {device}")
    room = host_memory(plan.local_size)
    return Room(room.nbytes + held_on_host(task), room.limit)

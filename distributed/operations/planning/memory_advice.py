"""What an out-of-memory error says: the parts of memory, and the smallest changes that fit."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.errors import UserError, WorkerError
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.apart import call_apart, for_prediction
from distributed.operations.planning.micro_batch_effects import effect_of_size
from distributed.operations.planning.once_per_host import once_per_host
from distributed.operations.planning.plan_memory import UNTRIED, PlanMemory, held_on_host, in_units
from distributed.planner.auto_batch import smaller_sizes, with_micro_batch
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.resolve import rescale
from distributed.registry.catalog import Catalog, load_target
from distributed.resilience.memory_failures import is_killed, lacks_memory
from distributed.system.host_memory import host_memory
from distributed.training.routing_traits import check_routing

__all__ = ["add_advice", "advice_on", "before_run", "plan_that_ran"]

_MOST = 3
_MARGIN = 0.9
"""Share of what the failed configuration is predicted to need that a change may need, where the limit that
was reached is not known: less would hardly help, because predictions are a few percent off."""
_SMALL = 0.5
"""Share of the memory there is below which a prediction does not explain a killed rank."""
_SIZE = r"([\d.]+) (GiB|MiB|KiB|bytes)"
_CAPACITY = re.compile(f"total capacity of {_SIZE}")
_FREE, _OWN = re.compile(f"of which {_SIZE} is free"), re.compile(f"this process has {_SIZE} memory in use")
"""In torch's error of a full GPU (c10/cuda/CUDACachingAllocator.cpp)."""
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_KILLED = (
    "The kernel ends processes in this way for lack of memory, which is the usual reason (check: `dmesg |"
    " grep -i 'killed process'`, or oom_kill in memory.events of the container)."
)
_SAME = "the same training"
_BF16 = "another training: 16-bit products"
_UNCHECKED = "not checked whether the training is the same"

Replan = Callable[[Mapping[str, Any]], RunPlan]


class _Change(NamedTuple):
    """A change of the configuration.

    Attributes:
        text: as it can be pasted, with what follows from it.
        plan: of the changed run.
        note: what it changes besides memory.
        is_both: whether it is a setting with a smaller micro-batch.
    """

    text: str
    plan: RunPlan
    note: str = _SAME
    is_both: bool = False


class _Failed(NamedTuple):
    """What is known of a run that has failed.

    Attributes:
        plan: of the run.
        capacity: bytes that a rank can have at most.
        killed: whether it is not certain that memory was lacking.
    """

    plan: RunPlan
    capacity: int
    killed: bool


def before_run(plan: RunPlan, task: Task, room: int) -> tuple[Task, int]:
    """What an advice needs of a run that trains in this process, where the backend wraps or divides the model
    in place: `task` without values, and the bytes that a rank can have, its model included. Never fails.

    Args:
        room: bytes that this process can allocate.
    """
    try:
        room += held_on_host(task) if plan.device == "cpu" else 0
        return for_prediction(task), room
    except Exception:  # noqa: BLE001 - code of the user's objects may raise anything where they are copied
        return task, room


def plan_that_ran(plan: RunPlan, error: BaseException, chosen: RunPlan | None) -> RunPlan:
    """The plan of the ranks that failed, which may have chosen their micro-batch, on fewer ranks than before.

    Args:
        plan: of the caller.
        error: of the run.
        chosen: plan of the rank that this process is; None where it is none.
    """
    if chosen is not None:
        return chosen
    found = error.chosen_batch if isinstance(error, WorkerError) else None
    if found is None or not plan.config.chooses_batch:
        return plan
    ranks, size = found
    try:
        # Elastic runs on several hosts have as many ranks on each.
        nodes = max(1, ranks * plan.num_nodes // plan.world_size)
        return with_micro_batch(rescale(plan, nodes, ranks // nodes), size)
    except UserError:
        return plan


def add_advice(
    error: BaseException, plan: RunPlan, task: Task, catalog: Catalog, replan: Replan, room: int
) -> None:
    """Add to an error by lack of memory what `advice_on` says; other errors stay as they are. If the advice
    itself fails, one sentence says so. Of the ranks of another launcher, one of each host predicts.

    Args:
        task: of the run, before the run.
        replan: ``fields ->`` the plan of the same task with changed fields; raises UserError where there is
            none.
        room: bytes that a process of the run could have on this host before the run.
    """
    if not lacks_memory(error):
        return
    killed = isinstance(error, WorkerError) and is_killed(error.exc_type)
    advice = partial(advice_on, plan, task, catalog, replan, str(error), killed, room)
    try:
        text = once_per_host(_run_key(plan), advice) if plan.joined is not None else advice()
    except Exception as failure:  # noqa: BLE001 - it must not hide the error of the run
        line = str(failure).partition("\n")[0]
        text = f"No change is proposed, because the advice has failed ({type(failure).__name__}: {line})."
    if killed:
        text = f"{_KILLED} {text}"
    if isinstance(error, WorkerError):
        error.extend(text)
    else:
        error.add_note(text)


def _run_key(plan: RunPlan) -> str:
    """What the ranks of this host have in common: their launcher's process, and where they have met."""
    assert plan.joined is not None
    return f"advice {os.getppid()} {plan.joined.master_addr} {plan.joined.master_port}"


def advice_on(
    plan: RunPlan,
    task: Task,
    catalog: Catalog,
    replan: Replan,
    message: str = "",
    killed: bool = False,
    room: int = 1 << 62,
) -> str:
    """The parts of the memory of a rank of `plan`, and up to three changes that fit, as text.

    Args:
        message: of the error, from which the capacity of a GPU is read.
        killed: whether it is not certain that memory was lacking.
        room: as of `add_advice`.
    """
    changes = list(_changes(plan, task, catalog, replan))
    failed = _Failed(plan, _capacity(plan, message, room), killed)
    try:
        found = call_apart(plan, task, partial(_answer, failed, changes), in_rank=plan.mode == "join")
    except (UserError, WorkerError) as error:
        line = error.message if isinstance(error, UserError) else error.summary.partition("\n")[0]
        changes = [change._replace(note=_UNCHECKED) for change in changes]
        return _chosen_note(plan) + _unpredicted(changes, line.rstrip("."))
    return _chosen_note(plan) + str(found["text"])


def _chosen_note(plan: RunPlan) -> str:
    """What is said where the size that ran is not known: the ranks chose it, and left no report of it."""
    if not plan.micro_batches:
        return ""
    return f"The ranks chose their micro-batch; the following is for {plan.batch.batch_size} samples. "


def _unpredicted(changes: Iterable[_Change], reason: str) -> str:
    found = [f"({number}) {c.text} ({c.note})" for number, c in _first(changes)]
    return f"The parts of its memory are not predicted, {reason}. " + _listed(
        "Smallest changes that need less, not predicted to fit", found
    )


# -- in the process that predicts ------------------------------------------------------


def _answer(failed: _Failed, changes: list[_Change], task: Task) -> dict[str, Any]:
    failed = failed._replace(capacity=min(failed.capacity, _room_of_rank(failed.plan)))
    memory, plan = PlanMemory(task), failed.plan
    allowed = _checked(failed, changes, task, memory)
    try:
        parts = memory.parts(plan)
    except UserError as error:
        return {"text": _unpredicted(allowed, f"{error.field}: {error.message}")}
    if failed.killed and parts.total < failed.capacity * _SMALL:
        text = (
            f"{_described(parts)} The host has {in_units(failed.capacity)} for it, so that another sender of"
            " the signal, or memory outside of the model such as that of the data, is more likely."
        )
        return {"text": text}
    most = min(int(failed.capacity * UNTRIED[plan.device]), int(parts.total * _MARGIN))
    title = f"Smallest changes predicted to need at most {in_units(most)}"
    return {"text": f"{_described(parts)} " + _listed(title, _fitting(plan, allowed, memory, most))}


def _fitting(plan: RunPlan, changes: Iterable[_Change], memory: PlanMemory, most: int) -> list[str]:
    """The first changes that need at most `most` bytes, as text."""
    found, seen, alone = list[str](), set[str](), 0
    for change in changes:
        size, kind = change.plan.batch.batch_size, re.sub(r"\d+", "", change.text)
        # A setting with a smaller micro-batch has to be better than that micro-batch alone.
        if len(found) == _MOST or kind in seen or (change.is_both and size <= alone):
            continue
        need = _need(memory, change.plan)
        if need is not None and need <= most:
            # Of the sizes of a micro-batch, the largest that fits is the smallest change.
            seen.add(kind)
            alone = alone or (size if size < plan.batch.batch_size else 0)
            found.append(f"({len(found) + 1}) {change.text} ({in_units(need)}, {change.note})")
    return found


def _checked(failed: _Failed, changes: list[_Change], task: Task, memory: PlanMemory) -> Iterator[_Change]:
    """The changes that ranks do not refuse for this model, each with what it changes besides memory."""

    @cache
    def effect() -> str:
        try:
            return effect_of_size(task, memory.model(failed.plan), memory.samples())
        except Exception as error:  # noqa: BLE001 - a factory and the data are code of the user
            return f"{_UNCHECKED}: {type(error).__name__}"

    for change in changes:
        try:
            _check_model(memory.model(change.plan), task, change.plan)
        except UserError:
            continue
        except Exception:  # noqa: BLE001 - a factory that fails without values
            yield change._replace(note=_UNCHECKED)
            continue
        others = () if change.plan.batch.batch_size == failed.plan.batch.batch_size else (effect(),)
        notes = [note for note in (change.note, *others) if note and note != _SAME]
        yield change._replace(note="; ".join(notes) or _SAME)


def _check_model(model: nn.Module, task: Task, plan: RunPlan) -> None:
    load_target(plan.spec.target).check_model(model, plan)
    check_routing(model, plan.batch, task.loss_fn is None, (1, plan.dims.context))


def _first(changes: Iterable[_Change]) -> list[tuple[int, _Change]]:
    """The first change of each kind, numbered."""
    kinds: dict[str, _Change] = {}
    for change in changes:
        kinds.setdefault(re.sub(r"\d+", "", change.text), change)
        if len(kinds) == _MOST:
            break
    return list(enumerate(kinds.values(), 1))


def _listed(title: str, found: list[str]) -> str:
    if not found:
        return f"{title}: none; use more ranks, devices with more memory, or a smaller model."
    return f"{title}: {'; '.join(found)}."


def _described(parts: MemoryParts) -> str:
    sizes = {part.name: getattr(parts, part.name) for part in fields(parts)}
    named = ", ".join(f"{name} {in_units(size)}" for name, size in sizes.items() if size)
    return f"Memory of a rank at the peak of a step, as predicted: {named}; {in_units(parts.total)} together."


def _need(memory: PlanMemory, plan: RunPlan) -> int | None:
    try:
        return memory.parts(plan).total
    except UserError:
        return None


def _capacity(plan: RunPlan, message: str, room: int) -> int:
    """Bytes that a rank can have at most, as far as this process knows."""
    if plan.device == "cpu":
        return room
    total, free, own = (_bytes_in(message, size) for size in (_CAPACITY, _FREE, _OWN))
    if total is not None:
        # Other processes may have a part of it.
        return total if free is None or own is None else min(total, free + own)
    # The process that predicts sees no GPU, and one that has none yet makes no context here.
    known = torch.cuda.is_initialized()
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if known else 1 << 62


def _room_of_rank(plan: RunPlan) -> int:
    """Bytes that a rank can have which `fit` starts on CPUs: as many as this process, which was started in
    the same way, has imported the same, and holds no values yet. The caller's process has less in it."""
    if plan.mode != "spawn" or plan.device != "cpu":
        return 1 << 62
    return host_memory(plan.local_size).nbytes


def _bytes_in(message: str, size: re.Pattern[str]) -> int | None:
    found = size.search(message)
    return None if found is None else int(float(found[1]) * _UNITS[found[2]])


# -- changes, from small to large -----------------------------------------------------


def _changes(plan: RunPlan, task: Task, catalog: Catalog, replan: Replan) -> Iterator[_Change]:
    """Smaller micro-batches, recomputation, sharding, offloading; these with smaller micro-batches; then
    precision, which changes the training."""
    yield from _smaller(_Change("", plan), task)
    whole: list[_Change] = []
    for assigned in _settings(plan, catalog):
        change = _changed(plan, replan, assigned)
        if change is not None:
            yield change
            whole.append(change)
    for change in whole:
        yield from _smaller(change, task)
    if plan.precision == "fp32":
        change = _changed(plan, replan, {"mixed_precision": "bf16"}, _BF16)
        if change is not None:
            yield change


def _settings(plan: RunPlan, catalog: Catalog) -> Iterator[dict[str, Any]]:
    config, able = plan.config, plan.spec.capabilities
    if config.activation_checkpointing == "none":
        yield {"activation_checkpointing": "full"}
    if plan.world_size > 1 and "shard" not in able.axes:
        stage = plan.spec.zero_stage(config) if plan.spec.zero_stage else 0
        for higher in sorted(number for number in able.zero_stages if number > stage):
            yield {"zero_stage": higher}
        for spec in sorted(catalog.backends.values(), key=lambda s: s.name):
            if "shard" in spec.capabilities.axes and spec.inner is None and not able.zero_stages:
                yield {"backend": spec.name}
        for spec in sorted(catalog.backends.values(), key=lambda s: s.name):
            if spec.capabilities.zero_stages and spec.inner is None and not able.zero_stages:
                yield from ({"backend": spec.name, "zero_stage": number} for number in (1, 2, 3))
    if plan.device != "cpu" and not config.optimizer_offload:
        yield {"optimizer_offload": True}


def _changed(plan: RunPlan, replan: Replan, assigned: Mapping[str, Any], note: str = _SAME) -> _Change | None:
    """The change that `assigned` makes; None where the planner refuses it."""
    try:
        other = replan(assigned)
    except UserError:
        return None
    if other.micro_batches:
        size = plan.batch.batch_size
        other = with_micro_batch(other, size if size in other.micro_batches else other.micro_batches[0])
    return _Change(_as_set(assigned), other, note)


def _smaller(change: _Change, task: Task) -> Iterator[_Change]:
    """`change` with smaller micro-batches of the same global batch, largest first."""
    plan, note = change.plan, change.note
    share = plan.batch.batch_size * plan.batch.gradient_accumulation_steps
    for size in smaller_sizes(plan):
        steps = _as_set({"gradient_accumulation_steps": share // size})
        own = task.train_data is not None and task.train_data.batch_size is not None
        first = f"DataLoader(batch_size={size}) and" if own else _as_set({"batch_size": size})
        text = f"{change.text} {first} {steps}".lstrip()
        yield _Change(text, with_micro_batch(plan, size), note, bool(change.text))


def _as_set(assigned: Mapping[str, Any]) -> str:
    values = {
        name: str(value).lower() if isinstance(value, bool) else value for name, value in assigned.items()
    }
    return " ".join(f"--set {name}={value}" for name, value in values.items())

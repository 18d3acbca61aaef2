"""What an out-of-memory error says: the parts of memory, and the smallest changes that fit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from torch import nn

from distributed.errors import UserError, WorkerError
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.operations.planning.plan_memory import PlanMemory, in_units
from distributed.planner.auto_batch import with_micro_batch
from distributed.planner.estimates.ledger import MemoryParts
from distributed.registry.catalog import Catalog
from distributed.resilience.memory_failures import is_killed, lacks_memory
from distributed.system.host_memory import host_memory
from distributed.training.model_traits import check_chosen_batch

__all__ = ["add_advice", "advice_on"]

_MOST = 3
_MARGIN = 0.9
"""Share of what the failed configuration is predicted to need that a change may need, where the limit that
was reached is not known: less would hardly help, because predictions are a few percent off."""
_SMALL = 0.5
"""Share of the memory there is below which a prediction does not explain a killed rank."""
_CAPACITY = re.compile(r"total capacity of ([\d.]+) (GiB|MiB)")
"""In torch's error of a full GPU (c10/cuda/CUDACachingAllocator.cpp)."""
_KILLED = (
    "The kernel ends processes in this way for lack of memory, which is the usual reason (check: `dmesg |"
    " grep -i 'killed process'`, or oom_kill in memory.events of the container)."
)
_BF16 = "another training: 16-bit products"

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
    note: str = "the same training"
    is_both: bool = False


def add_advice(error: BaseException, plan: RunPlan, task: Task, catalog: Catalog, replan: Replan) -> None:
    """Add to an error by lack of memory what `advice_on` says; other errors stay as they are.

    Args:
        replan: ``fields ->`` the plan of the same task with changed fields; raises UserError where there is
            none.
    """
    if not lacks_memory(error):
        return
    killed = isinstance(error, WorkerError) and is_killed(error.exc_type)
    text = advice_on(plan, task, catalog, replan, str(error), killed)
    if killed:
        text = f"{_KILLED} {text}"
    if isinstance(error, WorkerError):
        error.extend(text)
    else:
        error.add_note(text)


def advice_on(
    plan: RunPlan, task: Task, catalog: Catalog, replan: Replan, message: str = "", killed: bool = False
) -> str:
    """The parts of the memory of a rank of `plan`, and up to three changes that fit, as text.

    Args:
        message: of the error, from which the capacity of a GPU is read.
        killed: whether it is not certain that memory was lacking.
    """
    memory, changes = PlanMemory(task), _changes(plan, task, catalog, replan)
    try:
        parts = memory.parts(plan)
    except UserError as error:
        found = [f"({number}) {c.text} ({c.note})" for number, c in _first(changes)]
        return f"The parts of its memory are not predicted, {error.field}: {error.message}. " + _listed(
            "Smallest changes that need less, not predicted to fit", found
        )
    capacity = _capacity(plan, message)
    if killed and parts.total < capacity * _SMALL:
        return (
            f"{_described(parts)} The host has {in_units(capacity)} for it, so that another sender of the"
            " signal, or memory outside of the model such as that of the data, is more likely."
        )
    most = min(capacity, int(parts.total * _MARGIN))
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
    return f"{_described(parts)} " + _listed(
        f"Smallest changes predicted to need at most {in_units(most)}", found
    )


def _first(changes: Iterator[_Change]) -> list[tuple[int, _Change]]:
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


def _capacity(plan: RunPlan, message: str) -> int:
    """Bytes that a rank can have at most, as far as this process knows."""
    if plan.device == "cpu":
        return host_memory(plan.local_size).nbytes
    found = _CAPACITY.search(message)
    return int(float(found[1]) * (1 << (30 if found[2] == "GiB" else 20))) if found else 1 << 62


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


def _changed(
    plan: RunPlan, replan: Replan, assigned: Mapping[str, Any], note: str = "the same training"
) -> _Change | None:
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
    plan, note, batch = change.plan, change.note, change.plan.batch
    share = batch.batch_size * batch.gradient_accumulation_steps
    if not plan.spec.capabilities.accumulation:
        return
    if isinstance(task.model, nn.Module):
        try:
            check_chosen_batch(task.model)
        except UserError:
            note = "another training: BatchNorm"
    for size in range(batch.batch_size - 1, 0, -1):
        if share % size == 0:
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

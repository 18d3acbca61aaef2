"""What planning does around a run: chooses its micro-batch, explains lack of memory, compares predictions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distributed.interfaces.history import History
from distributed.interfaces.launcher import Launcher
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.registry.catalog import Catalog
from distributed.resilience.memory_failures import lacks_memory
from distributed.system.host_memory import host_memory
from distributed.system.output import print_line

# Other modules of this package import the framework, or take long: a run imports them where it needs them.
if TYPE_CHECKING:
    from distributed.operations.planning.auto_batch import ChoiceInRanks

__all__ = ["before_run", "choose_micro_batch", "explain_memory", "print_comparison"]


def choose_micro_batch(
    plan: RunPlan, task: Task, launcher: Launcher | None, earlier: History | None
) -> tuple[RunPlan, ChoiceInRanks | None]:
    """Under ``batch_size=auto``: the plan with the size that fits, and what ranks choose with where they
    choose.

    Args:
        earlier: of the `fit` that this one continues; its size is kept.
    """
    if not plan.config.chooses_batch:
        return plan, None
    from distributed.operations.planning.auto_batch import ChoiceInRanks, choose_before_run

    chosen = choose_before_run(plan, task, launcher, earlier.batch if earlier is not None else None)
    return chosen, ChoiceInRanks(has_fitted=not chosen.micro_batches)


def before_run(plan: RunPlan, task: Task) -> tuple[Task, int]:
    """The task as it is before the run, and the bytes that a process of the run can have."""
    room = host_memory(plan.local_size).nbytes
    if plan.mode == "spawn" or plan.spec.framework != "torch":
        return task, room
    from distributed.operations.planning import memory_advice

    return memory_advice.before_run(plan, task, room)


def explain_memory(
    error: BaseException,
    plan: RunPlan,
    task: Task,
    catalog: Catalog,
    replan: Callable[[Mapping[str, Any]], RunPlan],
    room: int,
    choice: ChoiceInRanks | None,
) -> None:
    """Add to an error by lack of memory the parts of memory, and changes that fit.

    Args:
        task: of the run, as it was before it.
        replan: the plan of this run with other fields.
        room: bytes that a process of the run could have before it.
        choice: with which ranks have chosen the micro-batch.
    """
    if plan.spec.framework != "torch" or not lacks_memory(error):
        return
    from distributed.operations.planning.memory_advice import add_advice, plan_that_ran

    plan = plan_that_ran(plan, error, choice.plan if choice is not None else None)
    add_advice(error, plan, task, catalog, replan, room)


def print_comparison(plan: RunPlan, history: History) -> None:
    """What a plan predicted for the run, beside what was measured."""
    if plan.config.planned.split is None or (plan.joined is not None and plan.joined.rank != 0):
        return
    from distributed.operations.planning.plan_history import lines_of

    for line in lines_of(plan.config.planned.model_dump(), history):
        print_line(line, sys.stdout)

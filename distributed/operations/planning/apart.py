"""Call a function with a task in a process of its own, which ends with it.

Predictions call code of the user: the loss, the training step, hooks, a factory, the dataset. Any of them may
have a state or draw random numbers, which would leave the process that predicts, rank 0 for example, in
another state than the other ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.launcher import RankCommand
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task
from distributed.launch import run
from distributed.launch.local_launcher import LocalLauncher
from distributed.operations.planning.optimizer_facts import settings_of
from distributed.operations.planning.private_copies import empty_as, private_copies
from distributed.operations.planning.task_facts import SAMPLES
from distributed.registry.catalog import get_catalog
from distributed.system.private_folders import PrivateFolder

__all__ = ["call_apart", "first_of", "for_prediction", "without_values"]

_ALONE = "serial"
"""The backend of the process: of one rank, without a group."""
_NO_GPUS = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")


def call_apart(
    plan: RunPlan, task: Task, function: Callable[[Task], dict[str, Any]], in_rank: bool = False
) -> dict[str, Any]:
    """What `function` returns for `task` in a new process. Nothing of this process changes.

    Args:
        plan: of the run, for its configuration.
        task: of which the process gets what decides the memory of a step: the model without its values, the
            class of the optimizer, and of tensors given as data the first samples.
        function: returns values for JSON. It is pickled.
        in_rank: this process is a rank of the run.

    Raises:
        UserError: the task cannot be pickled, or `function` has raised one.
        WorkerError: the process failed.
    """
    is_fresh = in_rank or plan.device != "cpu"
    start = "fresh" if is_fresh else plan.config.launch_start
    # A prediction takes what time it needs, without a step that a monitor could see.
    watched = {"stall_report": None, "hang_timeout": None, "launch_start": start}
    alone = replace(
        plan,
        config=plan.config.model_copy(update=watched),
        spec=get_catalog().backends[_ALONE],
        world_size=1,
        local_size=1,
        num_nodes=1,
        node_rank=0,
        num_replicas=1,
        device="cpu",
        precision="fp32",
        dims=ParallelDims(),
        codec=None,
    )
    launcher = _WithoutGPUs() if is_fresh else LocalLauncher()
    with PrivateFolder() as folder:
        return run.probe(alone, for_prediction(task), partial(_called, function), Path(folder), launcher)


class _WithoutGPUs(LocalLauncher):
    """Starts a process that sees no GPU: the context that a process makes on one takes hundreds of MiB of the
    memory that the run lacks."""

    def run(self, plan: RunPlan, command: RankCommand) -> None:
        super().run(plan, replace(command, env={**command.env, **_NO_GPUS}))


def _called(
    function: Callable[[Task], dict[str, Any]], plan: RunPlan, task: Task, backend: Backend, folder: Path
) -> dict[str, Any]:
    return function(task)


def for_prediction(task: Task) -> Task:
    """What predictions need of `task`: the model without its values, the class of the optimizer with its
    settings, and of tensors given as data the first samples. Values of large tensors are neither kept nor
    copied.

    A run in this process wraps or divides the model in place; predictions after it need what this returned
    before. What cannot be copied is as in `task`.
    """
    given: Any = task.optimizer
    if isinstance(given, torch.optim.Optimizer):
        given = partial(type(given), **settings_of(given))
    task = first_of(task, SAMPLES)
    memo: dict[int, Any] = {}
    model = without_values(task.model, memo=memo)
    loss_fn, training_step = task.loss_fn, task.training_step
    with suppress(UserError):  # it holds what cannot be copied
        loss_fn, training_step = private_copies(
            (loss_fn, training_step), memo, partial(empty_as, device="meta")
        )
    return replace(
        task,
        model=model,
        optimizer=given,
        loss_fn=loss_fn,
        training_step=training_step,
        run_state=None,
        state_dir=None,
    )


def first_of(task: Task, number: int) -> Task:
    """`task` for another process that trains at most a few steps: without callbacks, validation and its
    position; of tensors given as data it has the first `number` samples."""
    data = task.train_data
    if data is not None and data.tensors is not None:
        data = replace(data, dataset=TensorDataset(*(tensor[:number].clone() for tensor in data.tensors)))
    return replace(
        task,
        train_data=data,
        callbacks=[],
        val_data={},
        scheduler=None,
        metrics=None,
        validation_step=None,
        progress=None,
    )


def without_values(model: Any, device: str = "meta", memo: dict[int, Any] | None = None) -> Any:
    """A copy of a module whose parameters and buffers have no values; what cannot be copied so, and a
    factory, as it is.

    Args:
        device: of the copy. Under fake tensors it can be any.
        memo: of `copy.deepcopy`, which gets what was copied.
    """
    if not isinstance(model, nn.Module):
        return model
    found: dict[int, Any] = {id(buffer): empty_as(buffer, device) for buffer in model.buffers()}
    try:
        for parameter in model.parameters():
            empty = empty_as(parameter, device)
            found[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        copied = copy.deepcopy(model, found)
    except Exception:  # noqa: BLE001 - copying calls code of the user's modules
        return model
    if memo is not None:
        # deepcopy keeps alive what it has copied, under the address of its memo, where another object may lie
        # once this one is gone.
        kept = found.pop(id(found), [])
        memo.update(found)
        memo.setdefault(id(memo), []).extend(kept)
    return copied

"""TorchFramework: torch models, optimizers and data in the caller's process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from distributed.checkpoint.optimizer_state import kept_beside
from distributed.checkpoint.torch_state import (
    export_replicated,
    import_replicated,
    load_full_model,
)
from distributed.errors import UserError
from distributed.interfaces.framework import Framework, refuse_foreign
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.state import BackendState, StateReader
from distributed.interfaces.task import Task
from distributed.system.devices import visible_gpus
from distributed.system.tensors import digest_of
from distributed.training.loss_parameters import with_loss
from distributed.training.optimizers import build_model, build_optimizer, check_optimizer, check_trainable
from distributed.training.task_checks import check_task


class TorchFramework(Framework):
    """What `Trainer` asks of torch."""

    def is_model(self, model: Any) -> bool:
        return not isinstance(model, type) and hasattr(model, "state_dict")

    def check(self, model: Any, optimizer: Any) -> None:
        refuse_foreign(model, "model", "torch")
        refuse_foreign(optimizer, "optimizer", "torch")
        if self.is_model(model):
            check_trainable(model)
            if hasattr(optimizer, "param_groups"):
                check_optimizer(optimizer, model)
        elif hasattr(optimizer, "param_groups"):
            raise UserError(
                "an optimizer object cannot belong to a model that is yet to be built",
                field="optimizer",
                got=type(optimizer).__name__,
                remedy="Give its class, or a function from the model to an optimizer",
            )

    def complete(self, task: Task) -> Task:
        """`task` as it is, once it was checked.

        Raises:
            UserError: `loss_fn`, `scheduler` or `metrics` would train something else, or nothing.
        """
        check_task(task)
        return task

    def carries_rate(self, model: Any, optimizer: Any) -> bool:
        return hasattr(optimizer, "param_groups")

    def num_gpus(self) -> int:
        return visible_gpus()

    def build(self, model: Any, seed: int, task: Task) -> Any:
        return build_model(model, seed)

    def num_bytes(self, model: Any) -> int | None:
        return sum(int(tensor.nbytes) for tensor in (*model.parameters(), *model.buffers()))

    def load_weights(self, reader: StateReader, model: Any) -> None:
        load_full_model(reader, model)

    def optimizer_of(self, model: Any, optimizer: Any) -> Any:
        return optimizer if isinstance(optimizer, Optimizer) else None

    def build_optimizer(self, task: Task, plan: RunPlan) -> Any:
        model = with_loss(task.model, task.loss_fn)
        return build_optimizer(task.optimizer, model, plan.config, plan.learning_rate)

    def load_state(self, reader: StateReader, model: Any, optimizer: Any) -> None:
        import_replicated(reader, model, optimizer)

    def digest(self, value: Any) -> str:
        beside = [tensor for _, _, pairs in kept_beside(value) for _, tensor in pairs]
        return digest_of((value.state_dict(), beside))

    def state_of(self, model: Any, optimizer: Any) -> BackendState:
        return export_replicated(model, optimizer, None, 0, 1)

    def has_history(self, optimizer: Any) -> bool:
        return optimizer is not None and (len(optimizer.state) > 0 or any(kept_beside(optimizer)))

    @contextmanager
    def without_history(self, optimizer: Any) -> Iterator[None]:
        state, optimizer.state = optimizer.state, defaultdict(dict)
        try:
            yield
        finally:
            optimizer.state = state

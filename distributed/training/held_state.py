"""State that a run changes in the script's objects beside weights and ``Optimizer.state``: what modules, the
optimizer, the loss and functions hold, for checkpoints and for a second `fit`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from distributed.checkpoint.dtensor import is_sharded
from distributed.checkpoint.optimizer_state import kept_beside, parts_of
from distributed.checkpoint.torch_state import canonical_name
from distributed.errors import UserError
from distributed.interfaces.task import Task
from distributed.training.callback_state import fingerprint, is_data, restore_attributes, save_attributes
from distributed.training.loss_parameters import has_parameters
from distributed.training.plain_attributes import OF_MODULES
from distributed.training.refilling import functions, parts

__all__ = ["HeldState", "given_holders", "inner_holders", "shared"]

logger = logging.getLogger("distributed")

_HOOKS = (
    *("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_FLAGS = "requires_grad"
_SMALL = 2**20
"""Bytes of a tensor in an attribute of a module from which on it counts as a result, which nothing reads."""


def given_holders(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, object) of what a script gives that may keep something for it, with the methods of objects. To
    be called before wrappers add hooks."""
    for name, holder in _given(task):
        yield name, holder
        yield from ((f"{name}.{method}", function) for method, function in functions(holder))


def _given(task: Task) -> Iterator[tuple[str, Any]]:
    yield from ((f"callbacks.{number}", callback) for number, callback in enumerate(task.callbacks))
    for name in ("loss_fn", "training_step", "validation_step"):
        if getattr(task, name) is not None:
            yield name, getattr(task, name)
    yield from ((f"metrics.{name}", metric) for name, metric in (task.metrics or {}).items())
    modules = task.model.named_modules() if isinstance(task.model, nn.Module) else ()
    for name, holder in (*modules, ("the optimizer", task.optimizer)):
        for table in _HOOKS:
            hooks = vars(holder).get(table) if hasattr(holder, "__dict__") else None
            yield from ((f"{name}.{table}.{i}", hook) for i, hook in enumerate((hooks or {}).values()))


def inner_holders(task: Task, model: Any, optimizer: Any) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
    """(name, what it holds) of the modules of a model, of the optimizer, and of other objects if modules."""
    of_model: Mapping[int, Any] = {}
    if isinstance(model, nn.Module):
        # Of a wrapper and what it wraps, which have one name, the inner one counts.
        modules = {canonical_name(name): module for name, module in model.named_modules()}
        of_model = {id(module): module for module in model.modules()}
        yield from ((f"module {name}", _Attributes(module)) for name, module in modules.items())
        yield _FLAGS, _Flags(model)
    for number, part in enumerate(parts_of(optimizer) if isinstance(optimizer, Optimizer) else ()):
        if type(part).state_dict is Optimizer.state_dict:  # others save what they need
            yield f"optimizer {number}", _Attributes(part)
    for given, holder in _given(task):
        root = holder.__self__ if isinstance(holder, MethodType) else holder
        beside = isinstance(model, nn.Module) and root is task.loss_fn and has_parameters(root, model)
        for name, module in root.named_modules() if isinstance(root, nn.Module) else ():
            if id(module) not in of_model:
                yield f"{given} {name}", _Attributes(module)
                if not beside:  # its tensors are saved as those of the model
                    yield f"{given} {name} buffers", module._buffers
                    yield f"{given} {name} parameters", module._parameters


def shared(task: Task) -> Iterator[tuple[str, Any]]:
    """(name, object) of what the caller and the ranks both have, and others may refer to."""
    for name in ("optimizer", "scheduler", "train_data"):
        if getattr(task, name) is not None:
            yield name, getattr(task, name)
    yield from _given(task)
    if has_parameters(task.loss_fn, task.model):  # which return as those of the model do
        loss_fn: Any = task.loss_fn
        yield from ((f"loss tensor {name}", part) for name, part in loss_fn.named_parameters())
    if isinstance(task.model, nn.Module):
        yield from ((f"module {name}", part) for name, part in task.model.named_modules())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_parameters())
        yield from ((f"tensor {name}", part) for name, part in task.model.named_buffers())
    elif task.model is not None:
        yield "model", task.model


class _Attributes(MutableMapping[str, Any]):
    """Attributes of a module or an optimizer that are not torch's, as far as a checkpoint can hold them.

    Attributes:
        replaces: gets new tensors: those of modules may be views of parameters, as of `spectral_norm`.
    """

    def __init__(self, holder: Any) -> None:
        self.attributes, self.replaces = vars(holder), isinstance(holder, nn.Module)
        beside = () if self.replaces else (name for name, _, _ in kept_beside(holder))  # saved with its state
        self._left_out = (OF_MODULES if self.replaces else _of_optimizers()).union(beside)
        self._largest = _SMALL if self.replaces else None

    def __iter__(self) -> Iterator[str]:
        own = ((name, value) for name, value in list(self.attributes.items()) if name not in self._left_out)
        return (name for name, value in own if is_data(value, self._largest))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        return self.attributes[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.attributes[name] = value

    def __delitem__(self, name: str) -> None:
        del self.attributes[name]


class _Flags(dict[str, Any]):
    """``requires_grad`` of the parameters of a model; setting one changes it."""

    def __init__(self, model: nn.Module) -> None:
        self._flagged = {canonical_name(name): p for name, p in model.named_parameters()}
        super().__init__({name: p.requires_grad for name, p in self._flagged.items()})

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._flagged:
            self._flagged[name].requires_grad_(value)


@cache
def _of_optimizers() -> frozenset[str]:
    """Names of what torch's optimizers hold, and of the method that a scheduler wraps."""
    return frozenset(vars(SGD([torch.zeros(1)], 0.1))) | {"step"}


class HeldState:
    """State of the objects of a run when it began, and what training has changed since.

    Args:
        loop: a `TrainingLoop`, whose model is not placed yet.
    """

    def __init__(self, loop: Any) -> None:
        self._loop, task = loop, loop.task
        self._functions = [
            (name, holder)
            for name, holder in given_holders(task)
            if not any(holder is callback for callback in task.callbacks)
        ]
        self._when_marked: dict[str, dict[str, Any]] = {}
        self._when_begun: dict[str, dict[str, Any]] = {}
        self._changed_before: dict[str, Collection[str]] = {}
        self._known_names: dict[int, tuple[str, Any]] = {}
        self._structure: dict[str, list[list[str]]] = {}

    def _holders(self) -> Iterator[tuple[str, MutableMapping[str, Any]]]:
        task = self._loop.task
        yield from ((name, parts(holder)) for name, holder in self._functions)
        yield from inner_holders(task, self._loop.model, self._loop.optimizer)

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        live, memo = self.live(), dict[int, Any]()
        return {
            name: {part: fingerprint(value, live, memo) for part, value in held.items()}
            for name, held in self._holders()
        }

    def live(self) -> dict[int, Any]:
        """Return what the run trains, by ``id``: references to it are no state."""
        loop = self._loop
        found: list[Any] = [
            loop,
            loop.model,
            loop.optimizer,
            loop.task,
            loop.task.scheduler,
            *loop.task.callbacks,
        ]
        if isinstance(loop.model, nn.Module):
            found += [*loop.model.modules(), *loop.model.parameters(), *loop.model.buffers()]
        return {id(part): part for part in found if part is not None}

    def mark(self) -> None:
        """Note what all holders hold before training, and before a saved state is loaded."""
        self._when_marked = self._fingerprints()
        self._known_names = {id(value): (name, value) for name, value in shared(self._loop.task)}
        self._structure = dict(self._structures())

    def name_of(self, value: Any) -> str | None:
        """Return the name by which the caller has `value`, too."""
        return self._known_names.get(id(value), (None,))[0]

    def returning(self) -> Iterator[tuple[str, str, Any]]:
        """(holder, part, value) of what training has changed in model, optimizer and loss. A module of which
        parts were replaced or renamed, as pruning does, is left with all that it has."""
        holders, given = dict(self._holders()), {name for name, _ in self._functions}
        for name, names in self.changed().items():
            yield from () if name in given else ((name, part, holders[name][part]) for part in names)
        for name, parts_of_module in self._structures():
            if self._structure.get(name, parts_of_module) != parts_of_module:
                yield from ((name, part, value) for part, value in self._modules()[name].items())

    def _structures(self) -> Iterator[tuple[str, list[list[str]]]]:
        for name, held in self._modules().items():
            yield name, [[*held[kind]] for kind in ("_parameters", "_buffers", "_modules")]

    def _modules(self) -> dict[str, dict[str, Any]]:
        """All that the modules of the model hold, by the name of their holder."""
        holders = inner_holders(self._loop.task, self._loop.model, None)
        return {name: held.attributes for name, held in holders if isinstance(held, _Attributes)}

    def begin(self) -> None:
        """Note what a resumed run sets again by itself."""
        self._when_begun, self._has_stepped = self._fingerprints(), False

    def check_first_step(self) -> None:
        """Check, after the first step, what the optimizer keeps.

        Raises:
            UserError: parts of tensors that would be lost.
        """
        if not self._has_stepped:
            self._has_stepped = True
            self._refuse_parts()

    def changed(self) -> dict[str, list[str]]:
        """Names of what training has changed, by holder."""
        found = {}
        for name, now in self._fingerprints().items():
            before, earlier = self._when_marked.get(name, {}), self._changed_before.get(name, ())
            names = [part for part, value in now.items() if before.get(part) != value or part in earlier]
            if names:
                found[name] = names
        return found

    def save(self) -> dict[str, Any]:
        """Entries of what training has changed, as plain data."""
        found, live, holders = {}, self.live(), dict(self._holders())
        for name, names in self.changed().items():
            entries, lost = save_attributes(holders[name], names, live)
            if entries:
                found[name] = entries
            if lost and name in ("loss_fn", "training_step") and self._when_begun:
                self._warn(name, lost, holders[name], live)
        return found

    def _warn(self, name: str, lost: list[str], held: Mapping[str, Any], live: Mapping[int, Any]) -> None:
        begun = self._when_begun.get(name, {})
        lost = [part for part in lost if begun.get(part) != fingerprint(held[part], live, {})]
        if lost:
            logger.warning(
                "%s.%s is of a kind that a checkpoint cannot hold: a resumed run begins without it. Keep it"
                " as numbers, text, tensors, lists and dicts",
                name,
                lost[0],
            )
            self._when_begun = {}  # one warning is enough

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Load what `save` returned. In a second `fit` the caller's objects count, which hold it already."""
        task, holders = self._loop.task, dict(self._holders())
        self._changed_before = {name: list(entries) for name, entries in saved.items()}
        for name, entries in saved.items():
            if name in holders and (task.progress is None or self._is_built(name)):
                restore_attributes(holders[name], entries, name, self._loop.world.device)

    def _is_built(self, name: str) -> bool:
        """True of what the ranks of this `fit` have made from a factory."""
        task = self._loop.task
        if task.run_state is not None:
            return False
        given = task.optimizer if name.startswith("optimizer ") else task.model
        return name.startswith(("optimizer ", "module ", _FLAGS)) and not hasattr(given, "state_dict")

    def _refuse_parts(self) -> None:
        """Raise a UserError for an optimizer with a tensor of each parameter outside of its state, where
        each rank has a part of it."""
        optimizer, model = self._loop.optimizer, self._loop.model
        if not isinstance(model, nn.Module):
            return
        whole = set(map(id, model.parameters()))
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if all(id(p) in whole and not is_sharded(p) for p in held):
            return
        for attributes in map(_Attributes, parts_of(optimizer)):
            for part, value in attributes.items():
                for tensor in _tensors(value):
                    is_own = tensor.dim() and not isinstance(tensor, nn.Parameter)
                    if is_own and any(tensor.shape == p.shape for p in held):
                        raise _sharded(part, optimizer)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _sharded(part: str, optimizer: Any) -> UserError:
    return UserError(
        f"the optimizer keeps tensors of its parameters in its attribute '{part}', which is"
        " no list or dict of one for each: each rank has a part of them, and no checkpoint would have them",
        field="optimizer",
        got=type(optimizer).__name__,
        allowed="Optimizer.state, or a list or dict of one tensor like each parameter",
        remedy="Keep them in self.state[parameter], or train with backend=pytorch-ddp",
    )

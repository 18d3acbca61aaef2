"""What all ranks have to hold alike besides weights: parameters, hyperparameters, modes of modules.

The ranks compare it when training begins and at log steps. A callback that runs on rank 0 alone is checked
after each of its events: the other ranks do not see what it changes.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from operator import attrgetter
from typing import Any, Protocol

from torch import Tensor, nn

from distributed.communication.equal_values import differences
from distributed.communication.torch_settings import read_settings
from distributed.errors import UserError
from distributed.interfaces.backend import Backend, SharedSettings
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.collectives import Ranks
from distributed.training.model_traits import written_weights
from distributed.training.objective import Objective
from distributed.training.optimizers import hyperparameters
from distributed.training.plain_attributes import PARTS, plain_attributes
from distributed.training.weight_digests import WeightDigests

__all__ = [
    "Settings",
    "WatchedBackend",
    "WatchedSettings",
    "check_same_model",
    "check_same_torch",
    "named_groups",
    "plain_groups",
]

# Callbacks of the project change no weights, and need no digests.
_OWN = ("distributed", "distributed_backends", "distributed_plugins")
_Values = tuple[list[dict[str, Any]], list[bool], list[bool], str]


class WatchedBackend(Ranks, Protocol):
    """The part of a backend that `WatchedSettings` reads.

    Attributes:
        spec: what it was registered as.
        trains_copies: what a callback changes of the module's weights is discarded by the next step.
    """

    spec: BackendSpec
    trains_copies: bool

    def replicated(self) -> Mapping[str, Any] | None:
        """As `Backend.replicated`."""

    def held_weights(self) -> dict[str, Tensor]:
        """Weights and buffers of this rank that a callback could change, by name."""

    def callback_scope(self) -> AbstractContextManager[Any]:
        """Surrounds a callback that may not change weights."""


class WatchedRank(WatchedBackend, Protocol):
    """A rank of torch.

    Attributes:
        module: the model, as it was placed.
        optimizer: the optimizer in use.
        objective: the loss.
    """

    module: nn.Module
    optimizer: Any
    objective: Objective


class WatchedSettings(SharedSettings):
    """Settings of one rank, and the digests of weights around callbacks.

    Args:
        backend: has placed the model.
    """

    def __init__(self, backend: WatchedBackend) -> None:
        self._watched_objects: Sequence[tuple[str, Any]] = ()
        self._watched = backend
        self._replicated = backend.world.size > 1 and backend.replicated() is not None
        self._unread: tuple[Any, WeightDigests, WeightDigests] | None = None

    @abstractmethod
    def read(self) -> Any:
        """The values now, as plain data."""

    @abstractmethod
    def named(self, values: Any) -> dict[str, Any]:
        """Values that `read` returned, by names for a message."""

    def watch(self, holders: Sequence[tuple[str, Any]]) -> None:
        self._watched_objects = holders

    def attributes(self) -> dict[str, Any]:
        """Plain values that training on this rank depends on, besides those of `read`, by names."""
        return plain_attributes(self._watched_objects)

    def moments(self) -> dict[str, Tensor]:
        """State of the optimizer on this rank, by names for a message."""
        return {}

    def hooks(self) -> list[tuple[dict[int, Any], int, Any]]:
        """(dict, key, hook) of the hooks of forward and backward passes."""
        return []

    def digest(self) -> float:
        self._read_digests()
        return float(zlib.crc32(repr(self.read()).encode()))

    def check_equal(self, backend: Backend) -> None:
        for rank, *pair in differences(backend, self.read()):
            first, values = map(self.named, pair)
            name = _difference(first, values)
            if name is not None:
                raise UserError(
                    f"the ranks train with different settings: {name} is {values.get(name)!r} on rank {rank}"
                    f" and {first.get(name)!r} on rank 0",
                    field="callbacks",
                    remedy="Give all ranks the same value; a callback that changes it needs all_ranks = True,"
                    " and has to decide from values that are equal on all ranks",
                )

    @contextmanager
    def unchanged_by(self, callback: Any) -> Iterator[None]:
        is_only_here = not callback.all_ranks and self._watched.world.size > 1
        with self._weights_unchanged_by(callback, is_only_here):
            before = (self.read(), self.attributes()) if is_only_here else None
            hooks = {id(hook) for _, _, hook in self.hooks()} if is_only_here else None
            yield
        for held, key, hook in self.hooks() if hooks is not None else ():
            if hooks is not None and id(hook) not in hooks:
                held[key] = _reading(hook, callback)
        after = before and (self.read(), self.attributes())
        if before == after or before is None or after is None:
            return
        old, new = ({**self.named(values), **attributes} for values, attributes in (before, after))
        name = _difference(old, new) or ""
        values = "" if name.startswith(PARTS) else f" from {old.get(name)!r} to {new.get(name)!r}"
        raise _only_here(callback, f"{name}{values}")

    @contextmanager
    def _weights_unchanged_by(self, callback: Any, is_only_here: bool) -> Iterator[None]:
        """Compare digests around a callback; on a device, they are read when the next callback begins."""
        own = type(callback).__module__.partition(".")[0] in _OWN
        if own or not (is_only_here or self._watched.trains_copies):
            self.is_written |= self._replicated and not own
            yield
            return
        self._read_digests()
        before = WeightDigests(self._held(is_only_here))
        with self._watched.callback_scope():
            yield
        self._unread = (callback, before, WeightDigests(self._held(is_only_here)))
        if not before.waits:
            self._read_digests()

    def _held(self, is_only_here: bool) -> dict[str, Tensor]:
        return self._watched.held_weights() | (self.moments() if is_only_here else {})

    def _read_digests(self) -> None:
        """Raise a UserError if a callback has changed a weight that it may not change."""
        unread, self._unread = self._unread, None
        name = unread and unread[1].first_difference(unread[2])
        if not unread or name is None:
            return
        if self._watched.trains_copies:
            raise written_weights(f"the parameter '{name}'", self._watched.spec.name)
        raise _only_here(unread[0], f"the values of '{name}'")


class Settings(WatchedSettings):
    """Hyperparameters, trainable parameters, module modes and kinds of losses of one rank of torch."""

    def __init__(self, backend: WatchedRank) -> None:
        super().__init__(backend)
        self._optimizer, self._objective = backend.optimizer, backend.objective
        self._parameters = dict(backend.module.named_parameters())
        self._modules = dict(backend.module.named_modules())

    @property
    def is_known(self) -> bool:
        return self._objective.knows_averages

    def attributes(self) -> dict[str, Any]:
        named = [(f"module '{name}'" if name else "the model", m) for name, m in self._modules.items()]
        held = vars(self._optimizer).items()
        found = {f"'{name}' of the optimizer": v for name, v in held if isinstance(v, int | float | str)}
        return {**plain_attributes([*named, *self._watched_objects]), **found}

    def hooks(self) -> list[tuple[dict[int, Any], int, Any]]:
        return [
            (hooks, key, hook)
            for m in self._modules.values()
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks)
            for key, hook in hooks.items()
        ]

    def moments(self) -> dict[str, Tensor]:
        return {
            f"{slot} of parameter {number} in the optimizer": value
            for number, state in enumerate(self._optimizer.state.values())
            for slot, value in state.items()
            if isinstance(value, Tensor)
        }

    def read(self) -> _Values:
        return (
            plain_groups(self._optimizer),
            list(map(attrgetter("requires_grad"), self._parameters.values())),
            list(map(attrgetter("training"), self._modules.values())),
            f"{self._objective.averaged_over} (history {self._objective.averages:08x})",
        )

    def named(self, values: _Values) -> dict[str, Any]:
        groups, trainable, training, average = values
        found = {"what the loss is a mean of": average, **named_groups(groups)}
        for name, value in zip(self._parameters, trainable, strict=True):
            found[f"requires_grad of parameter '{name}'"] = value
        for name, value in zip(self._modules, training, strict=True):
            found[f"the training mode of {f'module {name!r}' if name else 'the model'}"] = value
        return found


def plain_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Hyperparameters of each parameter group as values that can be compared and printed."""
    return [{name: _plain(value) for name, value in group.items()} for group in hyperparameters(optimizer)]


def named_groups(groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Values that `plain_groups` returned, by names for a message."""
    return {
        f"{name!r} of parameter group {i}": v for i, group in enumerate(groups) for name, v in group.items()
    }


def _reading(hook: Any, callback: Any) -> Any:
    """`hook`, of rank 0 alone, which may read values and return none."""

    @wraps(hook)
    def checked(*args: Any, **kwargs: Any) -> Any:
        found = hook(*args, **kwargs)
        if found is not None and found is not args[-1]:
            raise _only_here(callback, f"what a {type(args[0]).__name__} returns, by a hook")
        return found

    return checked


def _only_here(callback: Any, changed: str) -> UserError:
    name = type(callback).__name__
    return UserError(
        f"{name} runs on rank 0 only and changed {changed}; the other ranks would train with the old value",
        field="callbacks",
        got=f"{name} with all_ranks = False",
        allowed="callbacks with all_ranks = True, if they change how the model trains",
        remedy="Set all_ranks = True in the callback's class, or restore the value before it returns",
    )


def check_same_model(backend: Backend, model: nn.Module) -> None:
    """Compare names, shapes, dtypes and trainable flags of the parameters and buffers. Collective.

    Raises:
        UserError: they differ; names the first difference.
    """
    if backend.world.size == 1:
        return
    tensors = [*model.named_parameters(), *model.named_buffers()]
    own = {name: f"{tuple(t.shape)}, {t.dtype}, requires_grad={t.requires_grad}" for name, t in tensors}
    for name, values in _differing(backend, own):
        raise UserError(
            f"the ranks built different models: '{name}' is {values}",
            field="model",
            got=type(model).__name__,
            remedy="Build the same model on all ranks; let nothing in it depend on the rank",
        )


def check_same_torch(backend: Backend) -> None:
    """Compare the settings of torch that change values. Collective.

    Raises:
        UserError: they differ; names the first difference.
    """
    if backend.world.size == 1:
        return
    own = {name: str(value) for name, value in read_settings().items()}
    for name, values in _differing(backend, own):
        raise UserError(
            f"the ranks compute differently: it is {values}",
            field=name,
            remedy="Set it on all ranks, or on none",
        )


def _differing(backend: Backend, own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the first name at which a rank differs from rank 0, and both values in words. Collective."""
    for rank, first, other in differences(backend, own):
        name = _difference(first, other)
        if name is not None:
            yield (
                name,
                f"{other.get(name, 'absent')} on rank {rank} and {first.get(name, 'absent')} on rank 0",
            )


def _difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str | None:
    """The first key at which two mappings differ."""
    names = dict.fromkeys([*first, *second])
    return next((name for name in names if first.get(name) != second.get(name)), None)


def _plain(value: Any) -> Any:
    """A hyperparameter as a value that can be compared and printed; other objects by their type."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else type(value).__name__

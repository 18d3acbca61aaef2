"""State that a model carries from one forward pass to the next: hidden states, queues, averages of weights.

A step of several micro-batches, or of several ranks, changes it otherwise than one micro-batch does. It is
found by value: the loss of a batch is computed with the state before and after a forward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from distributed.checkpoint.random_state import capture_rng, restore_rng
from distributed.errors import UserError
from distributed.interfaces.backend import Window
from distributed.training.forward_state import Buffers, refuse_changes, warn_of_changes

__all__ = ["CarriedState", "check_carried"]

_OF_TORCH = frozenset(vars(nn.Module()))


class CarriedState(Buffers):
    """The buffers of a model, and attributes of its modules with tensors, at one moment.

    Args:
        model: whose state is copied.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._model = model
        self._attributes = {
            (f"{prefix}.{name}".lstrip("."), module, name): _shallow(value)
            for prefix, module in model.named_modules()
            for name, value in vars(module).items()
            if name not in _OF_TORCH and _is_state(value)
        }
        # Also what held no tensor yet, to which `put` returns.
        self._plain = {
            (module, name): value
            for module in model.modules()
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }
        self._frozen = {n: (p, p._version) for n, p in model.named_parameters() if not p.requires_grad}

    def written(self) -> list[str]:
        """Names of the frozen parameters that were written since, such as those of a momentum encoder."""
        return [name for name, (parameter, version) in self._frozen.items() if parameter._version != version]

    def changed_attributes(self) -> list[str]:
        """Names of the attributes that hold other tensors since."""
        return [path for path, module, name in self._keys() if self._is_other(path, module, name)]

    def _is_other(self, path: str, module: nn.Module, name: str) -> bool:
        before = list(_tensors(self._attributes.get((path, module, name))))
        now = list(_tensors(vars(module).get(name)))
        return len(before) != len(now) or any(a is not b for a, b in zip(before, now, strict=True))

    def _keys(self) -> list[tuple[str, nn.Module, str]]:
        return list(CarriedState(self._model)._attributes | self._attributes)

    def put(self, buffers: Buffers) -> None:
        """Give the model these attributes, and the state of `buffers`."""
        for path, module, name in self._keys():
            if (path, module, name) in self._attributes:
                vars(module)[name] = _shallow(self._attributes[path, module, name])
            elif (module, name) in self._plain:
                vars(module)[name] = self._plain[module, name]
            else:
                vars(module).pop(name)
        buffers.restore()

    def matters(self, loss: Callable[[], float], with_buffers: bool) -> bool:
        """True if `loss` differs between the state of this moment and that of now, to which it returns.

        Args:
            with_buffers: False compares with other attributes alone.
        """
        after, generators = CarriedState(self._model), capture_rng()
        numbers = [
            (module, name, value)
            for module in self._model.modules()
            for name, value in vars(module).items()
            if isinstance(value, int | float)
        ]

        def value(state: CarriedState, buffers: Buffers) -> float:
            state.put(buffers)
            restore_rng(generators)
            return loss()

        try:
            now = value(after, after)
            before, again = (value(self, self if with_buffers else after) for _ in range(2))
        finally:
            after.put(after)
            for module, name, number in numbers:
                vars(module)[name] = number
            restore_rng(generators)
        return abs(now - before) > 8 * max(abs(again - before), sys.float_info.epsilon * abs(before))


def check_carried(backend: Any, first: CarriedState, window: Window, several: bool) -> None:
    """Refuse state that the first micro-batches have changed, if the loss depends on it. Collective.

    Args:
        backend: a `TorchBackend`.
        first: the state before `window`.
        several: whether a step has several micro-batches, on this or other ranks.

    Raises:
        UserError: the run would not carry it as one micro-batch in one process does.
    """
    buffers, attributes = first.changed(), first.changed_attributes()
    # Ranks that train on their own meet at other steps.
    on_any = (lambda values: values) if backend.reads_own_parameters else backend.all_reduce
    if backend.config.chooses_batch:
        refuse_changes(buffers)
    exact = backend.config.carried_state == "exact" and backend.world.model_parallel_size == 1
    if exact and len(window.micro_batches) > 1 and first.written():
        _refuse(first.written(), several)
    found = attributes + buffers if several else attributes
    if exact and on_any([float(len(found))])[0]:
        batch, num_samples = window.micro_batches[0]
        on_device = backend.to_device(batch)

        def loss() -> float:
            with torch.no_grad(), backend.autocast():
                return float(backend.objective(backend.module, on_device, num_samples)[0])

        matters = first.matters(lambda: float(backend.through("carried state", loss)), several)
        backend.free_gathered()  # no backward pass follows, which would
        if on_any([float(matters)])[0]:
            _refuse(found or ["on another rank"], several)
    if several and backend.world.rank == 0:
        warn_of_changes(buffers)


def _refuse(names: list[str], several: bool) -> NoReturn:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    where = "a step has several micro-batches" if several else "checkpoints leave attributes out"
    raise UserError(
        f"the model carries state from one forward pass to the next ('{names[0]}'{more}), on which its loss"
        f" depends, and {where}",
        field="carried_state",
        got="exact",
        allowed="exact for buffers, on one rank without gradient accumulation; per_rank",
        remedy="Train so (num_processes=1, gradient_accumulation_steps=1), or set carried_state=per_rank:"
        " each rank carries the state of its own micro-batches, which depends on their number"
        if several
        else "Make it a buffer (register_buffer), or set carried_state=per_rank: a resumed run begins without"
        " it",
    )


def _is_state(value: Any) -> bool:
    found = list(_tensors(value))
    return bool(found) and not any(isinstance(tensor, nn.Parameter) for tensor in found)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple, dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict) else value

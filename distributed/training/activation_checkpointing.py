"""Recompute the activations of a model's blocks in backward instead of storing them.

Built on `torch.utils.checkpoint`, which recomputes with the random numbers of the first forward pass. What
would silently differ is an error: a buffer that a block changes in forward, and an input that is changed in
place.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from distributed.errors import UserError
from distributed.training.blocks import flat_parts
from distributed.training.lever import Forwards

__all__ = ["FIELD", "Recomputed", "recompute"]

FIELD = "activation_checkpointing"
_CACHING = "use_cache"
"""Argument of the models of transformers."""
_IN_PLACE = re.compile("modified by an inplace operation|activation checkpoint has been mutated")
_OTHER_CALLS = "encountered during backward but not found in storage"
"""In torch's messages about tensors that backward needs, and about other operations (torch 2.13)."""
_ATEN = torch.ops.aten
_MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv")
_ATTENTION = (
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward"),
    *("_efficient_attention_forward", "_cudnn_attention_forward"),
)
_STORED = {
    *(getattr(_ATEN, name).default for name in (*_MATMULS, *_ATTENTION) if hasattr(_ATEN, name)),
    torch.ops.higher_order.flex_attention,
}


def recompute(model: nn.Module, blocks: Sequence[nn.Module], mode: str) -> Recomputed:
    """Let backward compute the activations of `blocks` again.

    Args:
        model: that holds the blocks.
        blocks: none of them inside another; without any, the parts of flat Sequentials (`flat_parts`).
        mode: ``full``: store the inputs of a block alone; ``selective``: also the results of matrix
            multiplications and of attention; ``offload``: store the inputs in host memory.

    Returns:
        What undoes it.

    Raises:
        UserError: there are no blocks, or BatchNorm in one would see every batch twice.
    """
    parts = {} if blocks else flat_parts(model)
    blocks = blocks or [part for found in parts.values() for part in found]
    if not blocks:
        raise UserError(
            f"found no blocks in {type(model).__name__} whose activations could be recomputed",
            field=FIELD,
            got=mode,
            remedy="Name their classes: block_classes=[...]",
        )
    if any(isinstance(module, _BatchNorm) for block in blocks for module in block.modules()):
        raise UserError(
            "BatchNorm in a recomputed block would add every batch to its statistics twice",
            field=FIELD,
            got=mode,
            allowed="none with BatchNorm inside the blocks",
        )
    forwards: list[tuple[nn.Module, Any]] = [
        (sequence, _Chain([_Forward(part, mode) for part in found])) for sequence, found in parts.items()
    ]
    if not parts:
        forwards = [(block, _Forward(block, mode)) for block in blocks]
    return Recomputed(forwards, mode, _caching(model, blocks))


def _caching(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Modules of transformers that fill a cache of keys and values: the recomputation of a block would add
    its keys a second time."""
    inner = {module for block in blocks for module in block.modules()}
    return [
        module
        for module in model.modules()
        if module not in inner
        and getattr(getattr(module, "config", None), "use_cache", None) is True
        and _CACHING in signature(module.forward).parameters
    ]


class Recomputed(Forwards):
    """Blocks whose forward was replaced by one that stores little.

    Args:
        forwards: the blocks, or the modules that hold them, and their new forwards.
        mode: see `recompute`.
        caching: modules that are called with ``use_cache=False`` unless the caller gives another value. Their
            configuration is left as it is: callbacks may save it.
    """

    def __init__(
        self, forwards: Sequence[tuple[nn.Module, Any]], mode: str, caching: Sequence[nn.Module] = ()
    ) -> None:
        self._mode = mode
        super().__init__([*forwards, *((module, _Uncached(module)) for module in caching)])

    def explained(self) -> AbstractContextManager[None]:
        return _explained(self._mode)


class _Uncached:
    """Forward of a module that would fill a cache of keys and values, which no training step reads."""

    def __init__(self, module: nn.Module) -> None:
        self.__wrapped__: Callable[..., Any] = module.forward
        self._position = list(signature(module.forward).parameters).index(_CACHING)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) <= self._position and kwargs.get(_CACHING) is None:
            kwargs[_CACHING] = False
        return self.__wrapped__(*args, **kwargs)


class _Forward:
    """Forward of a block whose activations are recomputed."""

    def __init__(self, block: nn.Module, mode: str) -> None:
        self.__wrapped__: Callable[..., Any] = block.forward
        self._name = type(block).__name__
        self._buffers = [
            (m, name) for m in block.modules() for name, b in m._buffers.items() if b is not None
        ]
        self._mode = mode

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return self._traced(*args, **kwargs)
        # Tensors that are arguments of `checkpoint` are stored as activations are: with a check that they
        # have not changed, and in host memory where that is asked for.
        leaves, structure = tree_flatten((args, kwargs))
        call = _Call(self, structure)
        options: dict[str, Any] = {}
        if self._mode == "selective":
            options["context_fn"] = call.contexts
        with _in_host_memory() if self._mode == "offload" else nullcontext():
            return checkpoint(call, *leaves, use_reentrant=False, **options)

    def _traced(self, *args: Any, **kwargs: Any) -> Any:
        """The form that torch.compile knows: the compiler partitions forward and backward by it."""
        if self._mode == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(self.__wrapped__, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs)

    def versions(self) -> list[int]:
        """How often each buffer of the block was changed in place, and which tensor it is."""
        buffers = [module._buffers[name] for module, name in self._buffers]
        return [number for b in buffers if b is not None for number in (id(b), b._version)]

    def check_buffers(self, before: list[int]) -> None:
        """Raise a UserError if a buffer is another than when `versions` returned `before`."""
        after = self.versions()
        if after != before:
            changed = next(i for i, pair in enumerate(zip(before, after, strict=False)) if len({*pair}) > 1)
            raise UserError(
                f"the forward pass of {self._name} changes its buffer '{self._buffers[changed // 2][1]}', and"
                " its recomputation would change it again",
                field=FIELD,
                got=self._mode,
                allowed="none, for blocks with such buffers",
                remedy="Leave it out, or name other blocks (block_classes)",
            )


class _Chain:
    """Forward of a Sequential whose parts are recomputed, one after the other."""

    def __init__(self, parts: Sequence[_Forward]) -> None:
        self._parts = parts

    def __call__(self, x: Any) -> Any:
        for part in self._parts:
            x = part(x)
        return x


class _Call:
    """One call of a block's forward, which `checkpoint` repeats in backward."""

    def __init__(self, forward: _Forward, structure: Any) -> None:
        self._forward, self._structure = forward, structure
        self._draws: _Draws | None = None
        self._stored: _Unchanged | None = None

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Contexts of the forward pass and of the recomputation under ``selective``."""
        storing, reading = create_selective_checkpoint_contexts(_policy)
        self._stored = _Unchanged(storing.storage)
        return _both(storing, self._stored), reading

    def __call__(self, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, self._structure)
        if self._draws is None:
            self._draws = _Draws.now()
            before = self._forward.versions()
            found = self._forward.__wrapped__(*args, **kwargs)
            self._forward.check_buffers(before)
            if self._stored is not None:
                self._stored.protect(found)
            return found
        with self._draws.again():
            return self._forward.__wrapped__(*args, **kwargs)


class _Unchanged(TorchDispatchMode):
    """Copies a stored result before it is changed in place, which its recomputation would start from.

    torch raises an error for it where the version of the tensor shows the change. A view of a matrix product
    may not share its version, and the gradients would silently be others (torch 2.13: ``_unsafe_view`` of a
    product with three dimensions).

    Args:
        storage: of `create_selective_checkpoint_contexts`: stored results by operation, and from torch 2.12
            on by call.
    """

    def __init__(self, storage: dict[Any, dict[int, Any] | list[Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storage = storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)  # not of flex_attention
        if schema is not None and schema.is_mutable:
            self.protect(_written(schema, args, kwargs))
        return func(*args, **kwargs)

    def protect(self, tensors: Any) -> None:
        """Copy the stored results that share memory with one of `tensors`."""
        with _disable_current_modes():  # the storing mode would count the copies
            changed = _addresses(tensors)
            calls = (c.values() if isinstance(c, dict) else c for c in self._storage.values())
            for entry in tree_leaves([list(results) for results in calls]):
                value = getattr(entry, "val", None)
                if isinstance(value, Tensor) and changed & _addresses(value):
                    entry.val = value.clone()
                    entry.version = entry.val._version


class _Draws(NamedTuple):
    """State of the generators beside torch's, which `checkpoint` restores by itself."""

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> _Draws:
        numpy = sys.modules.get("numpy")
        return cls(random.getstate(), numpy.random.get_state() if numpy is not None else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers as then; afterwards those that would have come."""
        here = _Draws.now()
        self._set()
        try:
            yield
        finally:
            here._set()

    def _set(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Store the results of matrix multiplications and of attention. Attention with dropout is recomputed:
    it would otherwise not draw the random numbers that those after it depend on."""
    if operation in _STORED and not _drops(getattr(operation, "_schema", None), args, kwargs):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield


def _addresses(tensors: Any) -> set[int]:
    """Of the memory of all tensors in a tree."""
    found: set[int] = set()
    for value in tree_leaves(tensors):
        if is_traceable_wrapper_subclass(value):
            found |= _addresses([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif isinstance(value, Tensor) and value.layout is torch.strided and value.numel():
            found.add(value.untyped_storage().data_ptr())
    return found


def _written(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to."""
    return [
        args[place] if place < len(args) else kwargs.get(argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _drops(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [] if schema is None else [argument.name for argument in schema.arguments]
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _in_host_memory() -> AbstractContextManager[None]:
    """Store what autograd saves as copies in host memory, page-locked for a GPU."""
    return saved_tensors_hooks(_to_host, _to_device)


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    pinned = tensor.is_cuda
    copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
    return tensor.device, copy.copy_(tensor, non_blocking=pinned)


def _to_device(stored: tuple[torch.device, Tensor]) -> Tensor:
    device, copy = stored
    return copy.to(device, non_blocking=True)


@contextmanager
def _explained(mode: str) -> Iterator[None]:
    """Raise errors of torch about a recomputation in the block as errors of the configuration."""
    try:
        yield
    except RuntimeError as error:
        if _IN_PLACE.search(str(error)):
            raise _in_place(mode) from error
        if not isinstance(error, CheckpointError) and _OTHER_CALLS not in str(error):
            raise
        raise UserError(
            "the recomputation of a block gave other tensors than its forward pass, so it keeps state between"
            " calls",
            field=FIELD,
            got=mode,
            allowed="none, for such blocks",
            remedy="Leave it out, or remove the state: a model of transformers must not fill a cache of keys"
            " (model.config.use_cache = False)",
        ) from error


def _in_place(mode: str) -> UserError:
    return UserError(
        "an input of a block, or another tensor that backward needs, was changed in place",
        field=FIELD,
        got=mode,
        allowed="none, offload, for blocks that change their inputs",
        remedy="Use one of these, or operations that return a new tensor (x = x + y instead of x += y)",
    )

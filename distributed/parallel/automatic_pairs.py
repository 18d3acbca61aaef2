"""Pairs of linear layers that can be cut without a plan: one by columns, the next by rows.

Between both every function has to treat each element by itself, so that a rank can compute its part of the
hidden layer alone. Which functions lie between is read from one forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.parallel.sample_batch import undisturbed

__all__ = ["find_pairs"]

_ALIASES = {"aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::contiguous"}


def find_pairs(model: nn.Module, forward: Callable[[], Any]) -> dict[str, str]:
    """Name of a linear layer -> ``colwise`` or ``rowwise``.

    Args:
        model: whole; left as it was.
        forward: calls it with a batch.
    """
    names: dict[nn.Module, str] = {
        module: name for name, module in model.named_modules() if type(module) is nn.Linear
    }
    trace = _Trace(names)
    hooks = [module.register_forward_pre_hook(trace.enter) for module in names]
    hooks += [module.register_forward_hook(trace.leave) for module in names]
    try:
        with undisturbed(model), trace:
            trace.use(forward())
    finally:
        for hook in hooks:
            hook.remove()
    return trace.pairs()


class _Trace(TorchDispatchMode):
    """Follows the outputs of linear layers through elementwise functions into other linear layers.

    Args:
        names: of the layers.
    """

    def __init__(self, names: dict[nn.Module, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._inside = names, 0
        self._made_by: dict[int, frozenset[str]] = {}
        self._alive: list[Tensor] = []
        self._read_by: dict[str, set[str]] = {}
        self._reads: dict[str, list[frozenset[str]]] = {}
        self._elsewhere: set[str] = set()

    def pairs(self) -> dict[str, str]:
        """The layers that can be cut, in the order in which they were called."""
        found: dict[str, str] = {}
        for first in self._read_by:
            makers, readers = self._connected(first)
            mixed = any(not read for reader in readers for read in self._reads[reader])
            if mixed or makers & (self._elsewhere | readers) or (makers | readers) & found.keys():
                continue
            found |= dict.fromkeys(makers, "colwise") | dict.fromkeys(readers, "rowwise")
        # The order of a set depends on the hash seed of the process.
        return {name: found[name] for name in self._reads if name in found}

    def _connected(self, first: str) -> tuple[set[str], set[str]]:
        """All layers whose outputs are read together with those of `first`, and all that read them."""
        makers, readers, before = {first}, set[str](), 0
        while before < len(makers):
            before = len(makers)
            readers = {reader for maker in makers for reader in self._read_by.get(maker, ())}
            makers |= {name for reader in readers for read in self._reads[reader] for name in read}
        return makers, readers

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Note whose output a layer reads."""
        self._inside += 1
        if self._inside > 1:
            return
        sources = self._sources(args)
        self._reads.setdefault(self._names[module], []).append(sources)
        for source in sources:
            self._read_by.setdefault(source, set()).add(self._names[module])

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Follow its output."""
        self._inside -= 1
        if not self._inside:
            self._follow(output, frozenset({self._names[module]}))

    def use(self, value: Any) -> None:
        """Whatever the layers gave to `value` is used as a whole."""
        self._elsewhere |= self._sources(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        sources = self._sources((args, kwargs))
        if sources and not self._inside:
            if self._is_elementwise(function, args, result):
                self._follow(result, sources)
            else:
                self._elsewhere |= sources
        return result

    def _is_elementwise(self, function: Any, args: Any, result: Any) -> bool:
        """Whether each element of the result is computed from the elements at its place alone."""
        if not isinstance(result, Tensor):
            return False
        tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
        if any(not self._made_by.get(id(t)) and t.numel() > 1 for t in tensors):
            return False  # the other operand would have to be cut, too
        pointwise = torch.Tag.pointwise in function.tags or function._schema.name in _ALIASES
        return pointwise and all(t.shape == result.shape or t.numel() == 1 for t in tensors)

    def _follow(self, tensor: Tensor, sources: frozenset[str]) -> None:
        self._made_by[id(tensor)] = sources
        self._alive.append(tensor)  # or another would get its id

    def _sources(self, value: Any) -> frozenset[str]:
        leaves = torch.utils._pytree.tree_leaves(value)
        found = (self._made_by.get(id(leaf)) for leaf in leaves if isinstance(leaf, Tensor))
        return frozenset(name for names in found if names for name in names)

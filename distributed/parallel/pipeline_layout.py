"""Which modules and parameters each stage of a pipeline holds, read from a model's own forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from distributed.errors import UserError
from distributed.parallel.pipeline_balance import balance
from distributed.parallel.pipeline_pieces import batch_tensors
from distributed.parallel.pipeline_trace import Call, Key, chains, first_tensor, takes, trace

__all__ = ["Block", "Layout", "TensorForm", "fill", "no_equal_layout", "read_layouts"]

_PARAMETER_COST = 1e-3
"""Operations that a parameter counts for, so that layers without counted operations are not free."""

_TRIED = 16
"""Chains that are tried: each costs a forward pass."""


@dataclass(frozen=True)
class TensorForm:
    """The shape of a tensor for any number of samples.

    Attributes:
        shape: for one sample.
        dtype: of its elements.
        axis: the dimension that grows with the samples; None if none does.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None

    def sized(self, rows: int) -> tuple[int, ...]:
        """The shape for `rows` samples."""
        return tuple(n * rows if axis == self.axis else n for axis, n in enumerate(self.shape))

    def zeros(self, rows: int, device: str) -> Tensor:
        """Zeros without memory."""
        return torch.zeros((), dtype=self.dtype, device=device).expand(self.sized(rows))

    @classmethod
    def of(cls, one: Tensor, two: Tensor) -> TensorForm | None:
        """From the tensor for one sample and the one for two; None if they are of no such form."""
        if one.dim() != two.dim() or one.dtype != two.dtype:
            return None
        axes = [axis for axis in range(one.dim()) if one.shape[axis] != two.shape[axis]]
        if len(axes) > 1 or (axes and two.shape[axes[0]] != 2 * one.shape[axes[0]]):
            return None
        return cls(tuple(one.shape), one.dtype, axes[0] if axes else None)


@dataclass(frozen=True)
class Block:
    """A module of the chain that stages divide.

    Attributes:
        name: its name in the model.
        key: the argument that holds what the block before has returned.
        output: what it returns, with `TensorForm` in place of tensors.
    """

    name: str
    key: Key
    output: Any

    @property
    def form(self) -> TensorForm:
        """Of the tensor that the next block takes."""
        form: TensorForm = self.output if isinstance(self.output, TensorForm) else self.output[0]
        return form


@dataclass(frozen=True)
class Layout:
    """A model divided into stages, described by names, so that another rank can use it.

    Attributes:
        blocks: the chain.
        starts: index of the first block of each stage.
        before: names of modules with parameters that are called before the chain -> what each call returns,
            with `TensorForm` in place of tensors.
        stages: names of parameters and buffers -> the stages that hold them, in order.
        inputs: shapes of one sample of the tensors in a batch.
        costs: floating-point operations of each stage for one sample.
    """

    blocks: tuple[Block, ...]
    starts: tuple[int, ...]
    before: dict[str, list[Any]]
    stages: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.starts)

    def blocks_of(self, stage: int) -> range:
        """Indices of the blocks of a stage."""
        ends = (*self.starts[1:], len(self.blocks))
        return range(self.starts[stage], ends[stage])


@dataclass(frozen=True)
class _Chain:
    """A run of calls that stages could divide, with what is around it."""

    run: list[Call]
    before: list[Call]
    after: list[Call]
    starts: list[int]
    largest: float

    @property
    def costs(self) -> list[float]:
        """Operations of each stage."""
        ends = [*self.starts[1:], len(self.run)]
        costs = [sum(map(_cost, self.run[a:b])) for a, b in zip(self.starts, ends, strict=True)]
        costs[0] += sum(map(_cost, self.before))
        costs[-1] += sum(map(_cost, self.after))
        return costs


def read_layouts(
    model: nn.Module,
    forwards: tuple[Callable[[], Any], Callable[[], Any]],
    batch: Any,
    num_stages: int,
    names: Sequence[str] = (),
) -> Iterator[Layout]:
    """Ways to divide `model`, the most balanced first. Whether its output stays the same is not known yet: a
    chain may be inside a block, with a connection around it.

    Args:
        forwards: what calls it with one sample and with two.
        batch: the one sample.
        num_stages: number of stages.
        names: modules with which the stages begin; empty balances their cost.

    Raises:
        UserError: the model has no chain of as many blocks.
    """
    one, two = (trace(model, forward) for forward in forwards)
    if [call.module for call in one] != [call.module for call in two]:
        raise _no_chain("calls other modules for two samples than for one", num_stages, 0)
    partner = dict(zip(one, two, strict=True))
    inputs = tuple(tuple(t.shape[1:]) for t in batch_tensors(batch))
    for chain in _candidates(one, num_stages, [_module_named(model, name) for name in names]):
        yield _layout(model, chain, partner, inputs)


def no_equal_layout(num_stages: int, given: bool) -> UserError:
    """The error for a model whose output changes with each layout.

    Args:
        given: ``parallel.stages`` names the stages.
    """
    return UserError(
        f"the model computes something else when {num_stages} stages divide it: it uses what a module returns"
        " in other places than the next module",
        field="parallel.stages" if given else "parallel.pipeline",
        got=f"{num_stages} stages",
        allowed="models with a chain of blocks that nothing goes around, such as the layers of a transformer",
        remedy="Use fewer stages, or parallel.tensor or parallel.data",
    )


def _layout(
    model: nn.Module, chain: _Chain, partner: dict[Call, Call], inputs: tuple[tuple[int, ...], ...]
) -> Layout:
    known = {module: name for name, module in model.named_modules()}

    def forms(call: Call) -> Any:
        return _forms(call.output, partner[call].output, known[call.module], len(chain.starts))

    blocks = []
    for index, call in enumerate(chain.run):
        key = takes(call, chain.run[index - 1]) if index else first_tensor(call)
        blocks.append(Block(known[call.module], 0 if key is None else key, forms(call)))
    before: dict[str, list[Any]] = {}
    for call in filter(_has_parameters, chain.before):
        before.setdefault(known[call.module], []).append(forms(call))
    return Layout(
        tuple(blocks),
        tuple(chain.starts),
        before,
        _stages_of_tensors(model, chain),
        inputs,
        tuple(chain.costs),
    )


def _candidates(calls: list[Call], num_stages: int, first: list[nn.Module]) -> list[_Chain]:
    """Chains, in the order in which to try them: those with most of the cost first, and of these the one
    whose most expensive stage is cheapest."""
    runs = chains(calls)
    if first:
        return [_given(calls, runs, first)]
    found = [_balanced(calls, run, num_stages) for run in runs if len(run) >= num_stages]
    if not found:
        longest = max(map(len, runs), default=0)
        raise _no_chain(f"has no chain of {num_stages} blocks", num_stages, longest)
    total = _cost(calls[0])
    found.sort(key=lambda chain: (sum(map(_cost, chain.run)) < total / 2, chain.largest))
    return found[:_TRIED]


def _balanced(calls: list[Call], run: list[Call], num_stages: int) -> _Chain:
    before, after = _around(calls, run)
    costs = sum(map(_cost, before)), sum(map(_cost, after))
    starts, largest = balance([_cost(call) for call in run], num_stages, *costs)
    return _Chain(run, before, after, starts, largest)


def _given(calls: list[Call], runs: list[list[Call]], first: list[nn.Module]) -> _Chain:
    for run in runs:
        modules = [call.module for call in run]
        if all(module in modules for module in first):
            starts = [0, *(modules.index(module) for module in first[1:])]
            if starts == sorted(set(starts)):
                return _Chain(run, *_around(calls, run), starts, 0.0)
    raise UserError(
        "the modules are no blocks of one chain, each of which takes what the one before it returns, in this"
        " order",
        field="parallel.stages",
        got=", ".join(type(module).__name__ for module in first),
        remedy="Leave it out, or name modules such as layers.0 and layers.4",
    )


def _around(calls: list[Call], run: list[Call]) -> tuple[list[Call], list[Call]]:
    """The outermost calls before the chain, and those after it."""
    around = {None, *run[0].ancestors}
    outermost = [call for call in calls if call.parent in around and call not in around and call not in run]
    before = [call for call in outermost if call.end <= run[0].start]
    return before, [call for call in outermost if call.start >= run[-1].end]


def _stages_of_tensors(model: nn.Module, chain: _Chain) -> dict[str, tuple[int, ...]]:
    """The stages that hold each parameter and buffer: those that call its module; all, where no call shows
    which stage uses it."""
    everywhere = set(range(len(chain.starts)))
    used: dict[nn.Module, set[int]] = {}
    for index, call in enumerate(chain.run):
        _add(used, call.module, {max(s for s, start in enumerate(chain.starts) if start <= index)})
    for call in chain.before:
        # Every stage computes what needs no parameters, such as rotary embeddings.
        _add(used, call.module, {0} if _has_parameters(call) else everywhere)
    for call in chain.after:
        _add(used, call.module, {max(everywhere)})
    holders: dict[int, set[int]] = {}
    named: dict[str, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                named[f"{prefix}.{name}".lstrip(".")] = id(tensor)
                holders.setdefault(id(tensor), set()).update(used.get(module, everywhere))
    return {name: tuple(sorted(holders[key])) for name, key in named.items()}


def _add(used: dict[nn.Module, set[int]], outer: nn.Module, stages: set[int]) -> None:
    for module in outer.modules():
        used.setdefault(module, set()).update(stages)


def _has_parameters(call: Call) -> bool:
    return any(True for _ in call.module.parameters())


def _forms(one: Any, two: Any, name: str, num_stages: int) -> Any:
    """`one` with the form of each tensor in its place."""
    tensors = [t for t in tree_leaves(two) if isinstance(t, Tensor)]
    pairs = iter(tensors)

    def form(tensor: Tensor) -> TensorForm:
        found = TensorForm.of(tensor, next(pairs))
        if found is None:
            raise _no_chain(
                f"has a module '{name}' whose output does not grow with the samples", num_stages, 0
            )
        return found

    if len(tensors) != sum(isinstance(t, Tensor) for t in tree_leaves(one)):
        raise _no_chain(f"has a module '{name}' with other outputs for two samples", num_stages, 0)
    return tree_map_only(Tensor, form, one)


def fill(form: Any, rows: int, device: str) -> Any:
    """What a module would return for `rows` samples, of zeros."""
    return tree_map(lambda f: f.zeros(rows, device) if isinstance(f, TensorForm) else f, form)


def _module_named(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise UserError(
            f"the model has no module '{name}'",
            field="parallel.stages",
            got=name,
            remedy="Give names as model.named_modules() has them, such as layers.4",
        ) from None


def _no_chain(what: str, num_stages: int, longest: int) -> UserError:
    return UserError(
        f"the model {what}, which stages of a pipeline could divide: modules called one after the other, each"
        " with what the one before has returned",
        field="parallel.pipeline",
        got=f"{num_stages} stages",
        allowed=f"up to {longest} stages" if longest > 1 else "1",
        remedy="Use fewer stages, or parallel.tensor or parallel.data",
    )


def _cost(call: Call) -> float:
    return call.cost + _PARAMETER_COST * sum(p.numel() for p in call.module.parameters())

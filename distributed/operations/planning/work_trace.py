"""Count the operations of a computation: their kind, floating-point operations and bytes.

Floating-point operations are those of `torch.utils.flop_counter`, and those of attention are its two or four
matrix products, also on CPU, where that module does not know it. An operation belongs to the innermost
block that calls it. In backward, it belongs to the block whose forward created its node of the graph; nodes
have consecutive numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from distributed.errors import UserError
from distributed.parallel.pipeline_trace import attention_flops
from distributed.planner.estimates.size import Size
from distributed.planner.estimates.work_facts import NARROW, BlockWork, Operations, matmul_kind

__all__ = ["RawOperation", "WorkTrace", "count", "flops_of", "merge"]

_TRANSCENDENTAL = (
    "_log_softmax", "_softmax", "celu", "cos", "elu", "erf", "exp", "expm1", "gelu", "gelu_backward", "log",
    "log1p", "log_sigmoid_forward", "logsumexp", "mish", "sigmoid", "silu", "silu_backward", "sin",
    "softplus", "tanh",
)  # fmt: skip
_REDUCTION = (
    "_batch_norm_with_update", "_fused_rms_norm", "_fused_rms_norm_backward", "_log_softmax_backward_data",
    "_softmax_backward_data", "amax", "amin", "batch_norm_backward",
    "linalg_vector_norm", "max", "mean", "min",
    "native_batch_norm", "native_batch_norm_backward", "native_group_norm", "native_group_norm_backward",
    "native_layer_norm", "native_layer_norm_backward", "prod", "std", "sum", "var", "var_mean",
)  # fmt: skip
_INDEXING = (
    "embedding", "embedding_dense_backward", "gather", "index", "index_add", "index_put", "index_put_",
    "index_select", "masked_select", "nll_loss_backward", "nll_loss_forward", "nll_loss2d_backward",
    "nll_loss2d_forward", "scatter", "scatter_add", "sort", "topk",
)  # fmt: skip
_RANDOM = (
    "bernoulli", "multinomial", "native_dropout", "normal", "normal_functional", "rand", "rand_like",
    "randint", "randn", "randn_like", "uniform",
)  # fmt: skip
_POOLING = ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool")
_TWO_PASSES = ("_batch_norm_with_update", "native_batch_norm", "native_batch_norm_backward")
"""Operations that read their first arguments again when they know the statistics."""
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
_EXCHANGES = ("c10d", "_c10d_functional", "_dtensor")
"""Namespaces of collectives, whose time is not that of an operation."""
_ROWS_ONLY = ("embedding", "gather", "index", "index_select")
"""Operations that read as many bytes of their first argument as they return."""


class RawOperation(NamedTuple):
    """One operation at one number of samples.

    Attributes:
        block: index of its block.
        backward: whether it belongs to backward.
        kind: of `distributed.planner.estimates.work_facts.KINDS`.
        flops: floating-point operations.
        nbytes: bytes read and written.
        sides: of the factors of a matrix product.
    """

    block: int
    backward: bool
    kind: str
    flops: int
    nbytes: int
    sides: tuple[int, ...] = ()


class WorkTrace(TorchDispatchMode):
    """Records operations while it is entered.

    Args:
        blocks: in the order of their indices; each is above all that follow it and lie in it.

    Attributes:
        active: whether operations are recorded.
    """

    def __init__(self, blocks: Iterable[nn.Module] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active = True
        self._operations: list[RawOperation] = []
        self._inside: list[int] = []
        self._nodes: list[tuple[int, int]] = [(0, 0)]
        self._handles: list[Any] = []
        for index, block in enumerate(blocks):
            self._watch(index, block)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def take(self) -> list[RawOperation]:
        """The operations since the last call, in order."""
        operations, self._operations = self._operations, []
        self._nodes = [(0, 0)]
        return operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its own operations on what it wraps come here, too
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.active:
            return result
        node = torch._C._current_autograd_node()
        block = self._block_of(node) if node is not None else self._inside[-1] if self._inside else 0
        found = RawOperation(block, node is not None, *count(func, args, kwargs, result))
        self._operations.append(found)
        return result

    def _block_of(self, node: Any) -> int:
        number = node._sequence_nr()
        if number >= 2**63:  # it adds to the gradient of a parameter, and has no number of its own
            return 0
        return self._nodes[bisect_right(self._nodes, number, key=itemgetter(0)) - 1][1]

    def _watch(self, index: int, block: nn.Module) -> None:
        def enter(module: nn.Module, args: Any) -> None:
            self._inside.append(index)
            self._change_block()

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._inside.pop()
            self._change_block()

        self._handles.append(block.register_forward_pre_hook(enter))
        self._handles.append(block.register_forward_hook(leave))

    def _change_block(self) -> None:
        if torch._C._current_autograd_node() is None:
            number = torch._C._autograd._get_sequence_nr()
            self._nodes.append((number, self._inside[-1] if self._inside else 0))


def merge(
    small: list[RawOperation], large: list[RawOperation], num_blocks: int, samples: tuple[int, int]
) -> tuple[BlockWork, ...]:
    """Work of each block from the same computation at two numbers of samples.

    Raises:
        UserError: the two do not call the same operations.
    """
    if list(map(_place_of, small)) != list(map(_place_of, large)):
        raise UserError(
            "what the model computes for one micro-batch depends on the number of samples in it",
            field="batch_size",
            got=" and ".join(map(str, samples)),
            allowed="the same operations for any number of samples",
            remedy="Plan from the numbers of the model instead: `plan --parameters`, or `--layers` and"
            " `--hidden`, and a mapping of them for `distributed.plan`",
        )
    groups: list[tuple[Counter[Any], Counter[Any]]] = [(Counter(), Counter()) for _ in range(num_blocks)]
    for one, other in zip(small, large, strict=True):
        flops, nbytes, *sides = (
            Size.through(a, b, samples)
            for a, b in zip((*one[3:5], *one.sides), (*other[3:5], *other.sides), strict=True)
        )
        kind = "matmul" if sides else one.kind  # whether it is thin depends on the samples
        groups[one.block][one.backward][kind, flops, nbytes, tuple(sides)] += 1
    return tuple(BlockWork(_grouped(forward), _grouped(backward)) for forward, backward in groups)


def _place_of(operation: RawOperation) -> tuple[object, ...]:
    """What does not depend on the number of samples. A matrix product may be thin for few of them alone."""
    kind = "matmul" if operation.sides else operation.kind
    return operation.block, operation.backward, kind, len(operation.sides)


def _grouped(counter: Counter[Any]) -> tuple[Operations, ...]:
    return tuple(
        Operations(kind, count, flops, nbytes, sides)
        for (kind, flops, nbytes, sides), count in counter.items()
    )


def count(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[str, int, int, tuple[int, ...]]:
    """(kind, floating-point operations, bytes, sides) of one call."""
    packet = func._overloadpacket
    name = packet.__name__
    outputs = _tensors(result)
    if name == "pow" and args[1:] == (2,):
        name = "mul"
    if name.startswith("_foreach_") and not outputs:
        outputs = _tensors(args[0])
    if name in _EMPTY or func.is_view or not outputs or func.namespace in _EXCHANGES:
        return "view", 0, 0, ()
    inputs = _tensors((args, kwargs))
    moved = sum(map(_bytes, outputs))
    if name in _ROWS_ONLY:
        moved += moved + sum(map(_bytes, inputs[1:]))
    else:
        # An operation in place, or one that writes to a given tensor, has it among both.
        moved += sum(map(_bytes, inputs))
    if name in _TWO_PASSES:
        moved += sum(map(_bytes, inputs[: 1 + ("backward" in name)]))
    direction = "-backward" if "backward" in name else ""
    if "attention" in name:
        causal = "causal-" if _is_causal(func, args, kwargs) else ""
        return f"{causal}attention{direction}", flops_of(packet, args, kwargs, result), moved, ()
    if packet in flop_registry:
        flops = flops_of(packet, args, kwargs, result)
        if "conv" in name:
            return _convolution(inputs, direction), flops, moved, ()
        # The factors of a matrix product are its last two tensors.
        sides = (*inputs[-2].shape[-2:], *inputs[-1].shape[-2:])
        return matmul_kind(sides), flops, moved, sides
    if _shares_storage(inputs, outputs) and not func._schema.is_mutable:
        return "view", 0, 0, ()
    return _kind_of(name), 0, moved, ()


def _kind_of(name: str) -> str:
    for kind, names in (
        ("transcendental", _TRANSCENDENTAL),
        ("reduction", _REDUCTION),
        ("indexing", _INDEXING),
        ("random", _RANDOM),
    ):
        if name.rstrip("_") in names or name in names:
            return kind
    return "pooling" if any(part in name for part in _POOLING) else "elementwise"


def _convolution(inputs: list[Tensor], direction: str) -> str:
    """Kind of a convolution; its weight is its second tensor, and the third of its backward."""
    weight = inputs[2 if direction else 1]
    return ("narrow-" if weight.shape[1] < NARROW else "") + f"convolution{direction}"


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    return dict(zip(names, args, strict=False), **kwargs).get("is_causal") is True


def flops_of(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations; 0 if torch does not count them.

    Those of attention are two matrix products forward and four backward, whether or not a causal mask leaves
    out half of them, and without the scores that kernels compute again in backward. torch before 2.12 cannot
    count attention whose keys have fewer heads.
    """
    name = packet.__name__
    if not name.startswith("_scaled_dot_product"):
        return int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0
    backward = "backward" in name
    query, key, value = args[1:4] if backward else args[:3]
    return attention_flops(query.shape, key.shape, value.shape) * (2 if backward else 1)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Bytes that reading `tensor` takes from memory: an expanded one has fewer than elements."""
    expanded = 1
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        expanded *= length if stride or not length else 1
    return expanded * tensor.element_size()


def _shares_storage(inputs: list[Tensor], outputs: list[Tensor]) -> bool:
    storages = {id(tensor.untyped_storage()) for tensor in inputs}
    return all(id(tensor.untyped_storage()) in storages for tensor in outputs)

"""Sketched layers cut over a group: the ranks exchange `rank` numbers a row instead of a whole width.

With A = factor_in (rank, in) and B = factor_out (out, rank), and the frozen halves cut likewise:

- column-wise, A is whole on every rank and B has out / P of its rows; the backward pass adds up the
  gradient of h = A x over the ranks;
- row-wise, A has in / P of its columns and B is whole; the forward pass adds up h.

Either sum carries rows x rank elements, once; everything else is local.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.linear import SKLinear


class _SKParallel(ParallelStyle):
    """Base of both styles: parameters become DTensors, hooks bring inputs and outputs into layout."""

    _cut: ClassVar[dict[str, Placement]]
    """Sharded dimension of each parameter; others are unsharded on every rank."""
    _side: ClassVar[str]
    """Which features are sharded: ``in`` or ``out``."""
    _inner_input: Placement
    _inner_output: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        self.input_layouts = input_layouts or self._inner_input
        self.output_layouts = output_layouts or self._inner_output
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer = _one_layer(module, device_mesh, type(self).__name__)
        features = f"{self._side}_features"
        own = _own_range(features, getattr(layer, features), device_mesh)
        if layer.sketch is not None:
            setattr(layer.sketch, f"{self._side}_range", own)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            place = self._cut.get(name, Replicate())
            part = distribute_tensor(parameter.detach(), device_mesh, [place])
            layer.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        layer.register_forward_pre_hook(partial(self._enter, mesh=device_mesh))
        layer.register_forward_hook(partial(self._leave, mesh=device_mesh))
        return layer

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        x = args[0]
        assert isinstance(layer, SKLinear)
        if not isinstance(x, DTensor):
            _check_width(x, layer.in_features, self.input_layouts, mesh.size())
            x = DTensor.from_local(x, mesh, [self.input_layouts], run_check=False)
        return (x.redistribute(placements=[self._inner_input]).to_local(), *args[1:])

    def _leave(self, layer: nn.Module, args: Any, out: Tensor, mesh: DeviceMesh) -> Tensor:
        whole = DTensor.from_local(out, mesh, [self._inner_output], run_check=False)
        whole = whole.redistribute(placements=[self.output_layouts])
        return whole.to_local() if self.use_local_output else whole


class SKColwiseParallel(_SKParallel):
    """A `ParallelStyle` for `SKLinear`: every rank computes out_features / P of the outputs.

    Args:
        input_layouts: layouts of inputs that are not DTensors; unsharded on every rank by default.
        output_layouts: layouts of the outputs; sharded at the last dimension by default.
        use_local_output: plain tensors instead of DTensors.

    Raises:
        KernelError: (when applied) the module is no `SKLinear`, the mesh has several dimensions, or
            out_features is not divisible by its size.
    """

    _cut: ClassVar[dict[str, Placement]] = {"factor_out": Shard(0), "bias": Shard(0)}
    _side = "out"
    _inner_input, _inner_output = Replicate(), Shard(-1)


class SKRowwiseParallel(_SKParallel):
    """A `ParallelStyle` for `SKLinear`: every rank takes in_features / P of the inputs.

    Args:
        input_layouts: layouts of inputs that are not DTensors; sharded at the last dimension by default.
        output_layouts: layouts of the outputs; unsharded on every rank by default.
        use_local_output: plain tensors instead of DTensors.

    Raises:
        KernelError: (when applied) as for `SKColwiseParallel`, of in_features.
    """

    _cut: ClassVar[dict[str, Placement]] = {"factor_in": Shard(1)}
    _side = "in"
    _inner_input, _inner_output = Shard(-1), Replicate()


class TensorParallelSKLinear(SKLinear):
    """An `SKLinear` whose outputs are computed in parts by the ranks of a group.

    The factors are those of the group's first rank; each rank keeps out_features / P rows of `factor_out`.

    Args:
        in_features, out_features, sketch_size: as for `SKLinear`; sketch_size is the rank of the factors.
        tensor_parallel_group: the ranks that share the layer, this one among them.
        gather_output: every rank gets all outputs; False leaves each its own out_features / P.
        given: further arguments of `SKLinear`.

    Raises:
        KernelError: as `SKLinear`; out_features is not divisible by the group's size, or this rank is not
            in the group.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sketch_size: int,
        tensor_parallel_group: dist.ProcessGroup,
        gather_output: bool = True,
        **given: Any,
    ) -> None:
        if dist.get_rank(tensor_parallel_group) < 0:
            raise KernelError(
                "tensor_parallel_group: this rank is not in it",
                got=dist.get_rank(),
                allowed="a group that this rank belongs to",
                remedy="Make the group on every rank, and build the layer with the rank's own",
            )
        super().__init__(in_features, out_features, sketch_size, **given)
        kind = self.factor_in.device.type
        mesh = DeviceMesh.from_group(tensor_parallel_group, kind)
        style = SKColwiseParallel(output_layouts=Replicate() if gather_output else Shard(-1))
        style._apply(self, mesh)


def _one_layer(module: nn.Module, mesh: DeviceMesh, style: str) -> SKLinear:
    if not isinstance(module, SKLinear):
        raise KernelError(
            f"{style}: it shards only sketched layers",
            got=type(module).__name__,
            allowed="SKLinear",
            remedy="Use torch's own style for this module",
        )
    if mesh.ndim != 1:
        raise KernelError(
            f"{style}: a layer can only be sharded over one mesh dimension",
            got=f"a mesh of {mesh.ndim} dimensions",
            allowed="1",
            remedy="Pass one dimension of the mesh, such as mesh['tp']",
        )
    return module


def _own_range(name: str, features: int, mesh: DeviceMesh) -> tuple[int, int]:
    size, place = mesh.size(), mesh.get_local_rank()
    if features % size:
        raise KernelError(
            f"{name}: not divisible by the group's {size} ranks",
            got=features,
            allowed=f"a multiple of {size}",
            remedy="Use a group of another size, or change the layer",
        )
    return place * features // size, (place + 1) * features // size


def _check_width(x: Tensor, features: int, layout: Placement, size: int) -> None:
    cut = layout.is_shard(x.dim() - 1) or layout.is_shard(-1)
    expected = features // size if cut else features
    if x.shape[-1] != expected:
        raise KernelError(
            f"input: its last dimension does not match a layer of {features} inputs over {size} ranks",
            got=x.shape[-1],
            allowed=str(expected),
            remedy="Pass the input in the layout of input_layouts, or use a group of the matching size",
        )


_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": SKColwiseParallel,
    "colwise_gather_output": partial(SKColwiseParallel, output_layouts=Replicate()),
    "rowwise": SKRowwiseParallel,
    "rowwise_split_input": partial(SKRowwiseParallel, input_layouts=Replicate()),
}


def style_of(word: str) -> ParallelStyle:
    """The style of a sketched layer for a word of a tensor-parallel plan.

    Raises:
        KernelError: there is none.
    """
    if word not in _STYLES:
        raise KernelError(
            "the plan cuts a sketched layer by a word that it does not have",
            got=word,
            allowed=", ".join(_STYLES),
            remedy="Choose one of these",
        )
    return _STYLES[word]()

"""StageTensors: which ranks of a pipeline hold which parameter and buffer, and what they exchange of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import is_sharded, local_part, whole
from distributed.checkpoint.torch_state import canonical_name
from distributed.communication.broadcast import broadcast_values
from distributed.interfaces.parallel_dims import AXES
from distributed.parallel.deferred_build import fill, tensors_of
from distributed.parallel.gradient_reducer import align_gradient
from distributed.parallel.mesh import Mesh
from distributed.parallel.original_model import filled
from distributed.planner.pipeline import PipelineShape

__all__ = ["WITHIN_STAGE", "StageTensors"]

WITHIN_STAGE = tuple(axis for axis in AXES if axis != "pipeline")
"""Axes along which ranks have the same stages."""


class StageTensors:
    """The tensors of a model that stages divide. Collective.

    Args:
        stages: names of parameters and buffers -> the stages that hold them.
        shape: of the pipeline.
        mesh: the ranks.
        device: of this rank.
    """

    def __init__(
        self, stages: Mapping[str, tuple[int, ...]], shape: PipelineShape, mesh: Mesh, device: str
    ) -> None:
        self._stages = {canonical_name(name): found for name, found in stages.items()}
        self._shape, self._device = shape, device
        self._group, self._rank = mesh.group("pipeline"), mesh.coordinates["pipeline"]
        self._within = mesh.group(*WITHIN_STAGE)
        self._is_first = mesh.dims.index(mesh.rank, *WITHIN_STAGE) == 0
        self._groups: dict[tuple[int, ...], Any] = {}
        for ranks in sorted({self.ranks_of(name) for name in self._stages}):
            if len(ranks) == shape.num_ranks:
                self._groups[ranks] = self._group
            elif len(ranks) > 1:
                self._groups[ranks] = mesh.part_of_group("pipeline", ranks)
        self._shared: list[tuple[Any, dict[str, nn.Parameter]]] = []

    # -- who holds what ---------------------------------------------------------------

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Indices, along the axis, of the ranks that hold the tensor or module of a canonical name."""
        stages = self._stages.get(name)
        if stages is None:  # a module with state of its own: where its tensors are
            inside = [s for other, s in self._stages.items() if other.startswith(f"{name}.")]
            stages = tuple({s for found in inside for s in found}) or tuple(range(self._shape.num_stages))
        return tuple(sorted({self._shape.rank_of(stage) for stage in stages}))

    def holds(self, name: str) -> bool:
        """Whether this rank does."""
        return self._rank in self.ranks_of(name)

    def copy_of(self, name: str) -> tuple[int, int]:
        """Index of this rank among those that hold it, and their number."""
        ranks = self.ranks_of(name)
        return ranks.index(self._rank), len(ranks)

    def parameters_of(self, model: nn.Module, stage: int) -> list[nn.Parameter]:
        """The trainable parameters of a stage of this rank."""
        return [
            p
            for name, p in model.named_parameters()
            if p.requires_grad and stage in self._stages[canonical_name(name)]
        ]

    @torch.no_grad()
    def drop(self, model: nn.Module) -> None:
        """Put parameters without data in the place of those that other ranks hold. Tied ones stay tied."""
        placeholders: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name, parameter in list(module._parameters.items()):
                full = canonical_name(f"{prefix}.{name}".lstrip("."))
                if parameter is None or parameter.is_meta or self.holds(full):
                    continue
                if id(parameter) not in placeholders:
                    meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                    placeholders[id(parameter)] = nn.Parameter(meta, parameter.requires_grad)
                module._parameters[name] = placeholders[id(parameter)]

    # -- a model that rank 0 has built ----------------------------------------------

    @torch.no_grad()
    def deal_out(self, model: nn.Module, built: Mapping[str, Tensor]) -> dict[Tensor, Tensor]:
        """Give each rank the tensors that it holds, one at a time. Those on the meta device are replaced.
        Collective.

        Args:
            model: cut, without values on ranks other than 0.
            built: rank 0's whole tensors by name; empty elsewhere.

        Returns:
            Tensors that were replaced -> those in their place.
        """
        made: dict[Tensor, Tensor] = {}
        for name, tensor in tensors_of(model):
            ranks = self.ranks_of(canonical_name(name))
            full = self.deal(built.get(name), tensor, ranks)
            if full is None:
                continue
            place = self._with_memory(tensor) if tensor.is_meta else tensor
            fill(place, full)
            if place is not tensor:
                made[tensor] = place
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                replaced = {key: made[t] for key, t in table.items() if t is not None and t in made}
                table.update(replaced)  # type: ignore[arg-type]
        return made

    def deal(self, full: Tensor | None, form: Tensor, ranks: tuple[int, ...]) -> Tensor | None:
        """Give a tensor of rank 0 to all ranks of some stages, on their device. Collective.

        Args:
            full: the tensor, on rank 0.
            form: has its shape and dtype.
            ranks: indices along the axis of those that receive it; others get None.
        """
        holds = self._rank in ranks
        if full is not None:
            wire = full.detach().to(self._device).contiguous()
        elif holds:
            wire = torch.empty(form.shape, dtype=form.dtype, device=self._device)
        else:
            return None
        for index in ranks if wire.numel() else ():
            # From rank 0 to the first rank of each stage, and from there to those that have the same stage.
            if self._is_first and index and self._rank in (0, index):
                send = dist.send if self._rank == 0 else dist.recv
                other = {"group_dst": index} if self._rank == 0 else {"group_src": 0}
                send(wire.reshape(-1).view(torch.uint8), group=self._group, **other)
            if index == self._rank and self._within is not None:
                broadcast_values([wire], self._within)
        return wire if holds else None

    def _with_memory(self, tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device=self._device if is_sharded(tensor) else "cpu")
        return filled(tensor, made) if isinstance(tensor, nn.Parameter) else made

    # -- gradients --------------------------------------------------------------------

    def share(self, model: nn.Module) -> None:
        """Let `add_shared` add the gradients of the parameters that `model` now has."""
        held = {n: p for n, p in model.named_parameters() if not p.is_meta}
        ranks_of = {name: self.ranks_of(canonical_name(name)) for name in held}
        self._shared = [
            (group, {name: p for name, p in held.items() if ranks_of[name] == ranks})
            for ranks, group in self._groups.items()
        ]

    @torch.no_grad()
    def add_shared(self, used: Callable[[str, nn.Parameter], bool]) -> set[str]:
        """Add up the gradients of parameters that several ranks of the pipeline hold. Collective.

        Args:
            used: whether this rank has computed a gradient of a parameter.

        Returns:
            Names of those that some rank has used.
        """
        found: set[str] = set()
        for group, held in self._shared:
            trained = {name: p for name, p in held.items() if p.requires_grad}
            if trained:
                found |= _add_up(trained, used, group)
        return found

    # -- the whole model --------------------------------------------------------------

    @torch.no_grad()
    def gather(self, tensor: Tensor, names: Mapping[int, str]) -> Tensor:
        """The whole of a parameter or buffer on all ranks. Collective.

        Args:
            names: id of a tensor -> its canonical name.
        """
        ranks = self.ranks_of(names[id(tensor)])
        if self._rank in ranks:
            value = whole(tensor).detach()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if len(ranks) < self._shape.num_ranks:
            broadcast_values([value], self._group, ranks[0])
        return value

    @torch.no_grad()
    def gather_state(self, name: str, state: dict[str, Any]) -> dict[str, Any]:
        """The optimizer's state of a parameter, whole, on all ranks. Collective."""
        ranks = self.ranks_of(name)
        full = {slot: whole(v).detach() if isinstance(v, Tensor) else v for slot, v in state.items()}
        if len(ranks) == self._shape.num_ranks:
            return full
        # On the CPU, because a pickled tensor of a GPU keeps the number of the sender's.
        moved = {slot for slot, v in full.items() if isinstance(v, Tensor) and not v.is_cpu}
        sent = {slot: v.cpu() if slot in moved else v for slot, v in full.items()}
        box: list[Any] = [(sent, moved) if self._rank == ranks[0] else None]
        dist.broadcast_object_list(box, group=self._group, group_src=ranks[0])
        if self._rank in ranks:
            return full
        sent, moved = box[0]
        return {slot: v.to(self._device) if slot in moved else v for slot, v in sent.items()}


def _add_up(
    parameters: Mapping[str, nn.Parameter], used: Callable[[str, nn.Parameter], bool], group: Any
) -> set[str]:
    device = local_part(next(iter(parameters.values()))).device
    users = torch.tensor([float(used(name, p)) for name, p in parameters.items()], device=device)
    dist.all_reduce(users, group=group)
    found = {name for name, count in zip(parameters, users.tolist(), strict=True) if count}
    for p in (parameters[name] for name in parameters if name in found):
        align_gradient(p)
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(local_part(p.grad), group=group)
    return found

"""StageTensors: which ranks of a pipeline hold which parameter and buffer, and what they exchange of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.checkpoint.dtensor import local_part, whole
from distributed.checkpoint.torch_state import canonical_name
from distributed.communication.broadcast import broadcast_values
from distributed.parallel.gradient_reducer import align_gradient
from distributed.parallel.mesh import Mesh
from distributed.planner.pipeline import PipelineShape

__all__ = ["StageTensors"]


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
        """The whole of a parameter on all ranks. Collective.

        Args:
            names: id of a parameter -> its canonical name.
        """
        ranks = self.ranks_of(names[id(tensor)])
        if self._rank in ranks:
            value = whole(tensor).detach()
        else:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        self._broadcast(value, ranks)
        return value

    def _broadcast(self, value: Tensor, ranks: tuple[int, ...]) -> None:
        """Give `value` to all ranks of the pipeline, in place. Collective.

        Args:
            ranks: those that have it.
        """
        if len(ranks) < self._shape.num_ranks:
            broadcast_values([value], self._group, ranks[0])

    @torch.no_grad()
    def gather_buffers(self, model: nn.Module) -> None:
        """Give each rank the buffers of the stages that hold them. Collective."""
        for raw, buffer in model.named_buffers():
            self._broadcast(buffer, self.ranks_of(canonical_name(raw)))

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

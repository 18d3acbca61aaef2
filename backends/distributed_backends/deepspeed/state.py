"""Convert ZeRO's parameters and optimizer state to and from named tensors.

The attributes of DeepSpeed used here are private, as of 0.19.8;
``tests/backends/test_deepspeed_state.py`` detects a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from distributed.checkpoint.torch_state import Part, named_tensors
from distributed.errors import UserError

State = dict[Tensor, dict[str, Any]]
"""Parameter -> {slot: value}, as `Optimizer.state` of whole parameters is."""


class _Range(NamedTuple):
    """This rank's range of one parameter.

    Attributes:
        shape: full (unsharded) shape of the parameter.
        start: index of the first owned element in the flattened parameter.
        group: index of its group in the optimizer.
        flat: tensor that the optimizer steps: master weights of many parameters, one after another.
        offset: index in `flat` of the first owned element.
        length: number of owned elements; 0 where other ranks own all.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    start: int
    group: int
    flat: Tensor
    offset: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """This range of `flat`, or of state with the same layout; a view."""
        return flat.detach()[self.offset : self.offset + self.length]


class ShardedOptimizer:
    """A ZeRO optimizer of stage 1, 2 or 3, seen by names of parameters.

    Args:
        zero: DeepSpeed's; just made, for its notes on the parameters are read once.
        optimizer: the user's, whose groups now hold `zero`'s flat tensors.
        members: the parameters that each group held before, frozen ones included.
        module: the user's.
    """

    def __init__(
        self, zero: Any, optimizer: Optimizer, members: list[list[nn.Parameter]], module: nn.Module
    ) -> None:
        self._zero, self._optimizer, self._members = zero, optimizer, members
        self.partitioned = hasattr(zero, "fp16_partitioned_groups_flat")
        found = _ranges_of_stage_3(zero) if self.partitioned else _ranges_of_stage_1_and_2(zero)
        self._ranges: dict[Tensor, _Range] = {r.parameter: r for r in found}
        self._names = {tensor: name for name, tensor in named_tensors(module)[0].items()}
        self._frozen = _frozen_parts(module, self._ranges) if self.partitioned else {}

    @property
    def parts(self) -> dict[Tensor, Part]:
        """Master weights of this rank, as the portable format takes them."""
        trained = {p: Part(r.shape, r.start, r.of(r.flat)) for p, r in self._ranges.items()}
        return trained | self._frozen

    def gradients(self) -> list[Tensor]:
        """Reduced gradients that this rank owns; padding is zero."""
        flats = self._flats()
        if getattr(self._zero, "cpu_offload", False) or getattr(self._zero, "offload_optimizer", False):
            return [flat.grad for flat in flats if flat.grad is not None]
        return [g for part in self._zero.averaged_gradients.values() for g in part or ()]

    @torch.no_grad()
    def gradient_norm(self, device: str) -> Tensor:
        """Norm of the gradient over all ranks, with the engine's scale, in float64 on the CPU. Collective."""
        square = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in self.gradients():
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).square().to(square.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(square)
        return square.sqrt().cpu()

    def use_exact_norm(self, norm: Callable[[], Tensor]) -> None:
        """Let DeepSpeed clip by `norm`; its own is rounded to float32."""
        self._zero.scaled_global_norm = norm
        self._zero._get_norm_groups = lambda: [norm()]

    def forget_gradients(self) -> None:
        """Drop gradients: stage 3 keeps the last ones of a parameter that a window does not use."""
        buffer = getattr(self._zero, "grad_partitions_flat_buffer", None)
        if buffer is not None:
            buffer.zero_()

    def _flats(self) -> list[Tensor]:
        unique = {id(r.flat): r.flat for r in self._ranges.values()}
        return list(unique.values())

    # -- state by parameter --------------------------------------------------------------

    def view(self) -> tuple[Optimizer, dict[Tensor, tuple[str, int]]]:
        """(the optimizer as if it held this rank's range of each parameter by itself, range ->
        (name, first element)). Its tensors are live; its groups are copies."""
        pieces = {p: r.of(r.flat) for p, r in self._ranges.items()}
        shown = copy(self._optimizer)
        shown.param_groups = [
            {**group, "params": [pieces.get(p, p) for p in members]}
            for group, members in zip(self._optimizer.param_groups, self._members, strict=True)
        ]
        state: Any = {
            pieces[p]: {slot: _narrow(r, value) for slot, value in self._state_of(r).items()}
            for p, r in self._ranges.items()
            if self._state_of(r)
        }
        shown.state = state
        return shown, {piece: (self._names[p], self._ranges[p].start) for p, piece in pieces.items()}

    def take(self, shown: Optimizer) -> None:
        """Store the values that were put into the `view`.

        Raises:
            UserError: parameters that ZeRO steps together differ in their counts of steps.
        """
        for group, seen in zip(self._optimizer.param_groups, shown.param_groups, strict=True):
            group.update({key: value for key, value in seen.items() if key != "params"})
        state: dict[Tensor, dict[str, Any]] = {}
        for group, members in zip(shown.param_groups, self._members, strict=True):
            state |= {
                p: shown.state.get(piece, {}) for p, piece in zip(members, group["params"], strict=True)
            }
        self._pour(state)

    def take_whole(self, state: State) -> None:
        """Keep state of whole parameters, which an earlier fit left. Same on all ranks."""
        cut: dict[Tensor, dict[str, Any]] = {
            p: {slot: _cut(r, slot, value) for slot, value in state.get(p, {}).items()}
            for p, r in self._ranges.items()
        }
        self._pour(cut)

    def _pour(self, state: Mapping[Tensor, Mapping[str, Any]]) -> None:
        self._optimizer.state.clear()
        for flat in self._flats():
            together = [r for r in self._ranges.values() if r.flat is flat]
            slots = dict.fromkeys(slot for r in together for slot in state.get(r.parameter, {}))
            for slot in slots:
                values = [(r, state.get(r.parameter, {}).get(slot)) for r in together]
                self._optimizer.state[flat][slot] = self._joined(flat, slot, values)

    def _joined(self, flat: Tensor, slot: str, values: list[tuple[_Range, Any]]) -> Any:
        tensors = [(r, v) for r, v in values if isinstance(v, Tensor) and v.dim() == 1]
        if tensors:
            joined = torch.zeros_like(flat, dtype=tensors[0][1].dtype, requires_grad=False)
            for place, value in tensors:
                place.of(joined).copy_(value)
            return joined
        first = values[0][1]
        for place, value in values:
            if not (value is first or (None not in (value, first) and bool(value == first))):
                raise UserError(
                    f"ZeRO steps the parameters of a group together, and the optimizer's '{slot}' of"
                    f" '{self._names[place.parameter]}' is {value} where that of"
                    f" '{self._names[values[0][0].parameter]}' is {first}",
                    field="optimizer",
                    remedy="Put them into parameter groups of their own, or resume under another backend",
                )
        return first

    def _state_of(self, place: _Range) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(place.flat, {})
        return found

    # -- weights ---------------------------------------------------------------------------

    @torch.no_grad()
    def set_masters(self, whole: Mapping[Tensor, Tensor]) -> None:
        """Set master weights from `whole` parameters, which were rounded on the way into the engine."""
        for p, r in self._ranges.items():
            r.of(r.flat).copy_(whole[p].reshape(-1)[r.start : r.start + r.length])

    @torch.no_grad()
    def spread_masters(self) -> None:
        """Give stage 3's parameters, gathered ones excepted, the masters' values."""
        for number, flat in enumerate(self._zero.fp32_partitioned_groups_flat):
            self._zero.fp16_partitioned_groups_flat[number].data.copy_(flat.data)
            self._zero._unflatten_partitioned_parameters(number)

    def release_gathered(self) -> None:
        """Release gathered parameters of stage 3, so that their next use gathers them again."""
        if self.partitioned:
            self._zero._partition_all_parameters()

    def whole_weights(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, its whole master weights) one by one, on every rank. Collective."""
        for p, part in self.parts.items():
            yield p, _gathered(part.shape, part.start, part.data)

    def give_back(self) -> list[dict[str, Any]]:
        """Let the user's optimizer hold its own parameters again, with their state. Collective.

        Returns:
            The groups that were added since, which DeepSpeed does not know, taken out.
        """
        groups = self._optimizer.param_groups
        added = groups[len(self._members) :]
        del groups[len(self._members) :]
        state: State = {}
        for p, r in self._ranges.items():
            found = self._state_of(r)
            if found:
                state[p] = {slot: self._whole(r, value) for slot, value in found.items()}
        for group, members in zip(groups, self._members, strict=True):
            group["params"] = members
        self._optimizer.state.clear()
        self._optimizer.state.update(state)
        return added

    def _whole(self, place: _Range, value: Any) -> Any:
        part = _narrow(place, value)
        if isinstance(value, Tensor) and value.shape == place.flat.shape:
            return _gathered(place.shape, place.start, part).to(place.parameter.device)
        return value.clone() if isinstance(value, Tensor) else value


def _ranges_of_stage_1_and_2(zero: Any) -> Iterator[_Range]:
    for number, group in enumerate(zero.bit16_groups):
        flat = zero.single_partition_of_fp32_groups[number]
        for p in group:
            found = p._hp_mapping
            if found is None:
                yield _Range(p, tuple(p.shape), 0, number, flat, 0, 0)
                continue
            here, there = found.lp_fragment_address, found.hp_fragment_address
            yield _Range(p, tuple(p.shape), here.start, number, flat, there.start, there.numel)


def _ranges_of_stage_3(zero: Any) -> Iterator[_Range]:
    rank = dist.get_rank()
    for number, group in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[number]
        for p in group:
            _, offset, _ = zero.grad_position[zero.get_param_id(p)]
            start, length = _share(p, rank)
            owner = zero.sub_group_to_group_id[number]
            yield _Range(p, tuple(p.ds_shape), start, owner, flat, offset, length)


def _share(parameter: Any, rank: int) -> tuple[int, int]:
    """(first element, number of elements) of stage 3's partition, whose end may be padding."""
    size, numel = parameter.partition_numel(), parameter.ds_numel
    start = min(rank * size, numel)
    return (start, min(size, numel - start)) if start < numel else (0, 0)


def _frozen_parts(module: nn.Module, trained: Mapping[Tensor, Any]) -> dict[Tensor, Part]:
    parts: dict[Tensor, Part] = {}
    for parameter in module.parameters():
        p: Any = parameter
        if parameter not in trained:
            start, length = _share(p, dist.get_rank())
            parts[parameter] = Part(tuple(p.ds_shape), start, p.ds_tensor.detach().reshape(-1)[:length])
    return parts


def _narrow(place: _Range, value: Any) -> Any:
    """A parameter's own of a flat tensor's state."""
    return place.of(value) if isinstance(value, Tensor) and value.shape == place.flat.shape else value


def _cut(place: _Range, slot: str, value: Any) -> Any:
    """This rank's own of a whole parameter's state; of one without a dimension, all but its step."""
    if isinstance(value, Tensor) and value.shape == place.shape and (value.dim() or slot != "step"):
        return value.detach().reshape(-1)[place.start : place.start + place.length]
    return value


@torch.no_grad()
def _gathered(shape: tuple[int, ...], start: int, data: Tensor) -> Tensor:
    """The whole tensor, of which each rank holds a range of its own."""
    whole = torch.zeros(shape, dtype=data.dtype, device=data.device)
    whole.view(-1)[start : start + len(data)] = data
    if dist.get_world_size() > 1:
        dist.all_reduce(whole)
    return whole

"""Callbacks that look at what a library keeps inside, on every rank: `test_library_traps` runs them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from distributed import Callback
from distributed.checkpoint.dtensor import own_copies, own_pieces
from distributed.interfaces.callback import Context
from tests.backends.fsdp_model import tiny

__all__ = ["CutByRows", "FlatRanges", "PartitionedRanges", "Steps", "need"]

_STATE = "backends/distributed_backends/deepspeed/state.py"


def need(thing: Any, where: str, *names: str) -> None:
    """Fail, and say who relies on it, when `thing` lacks one of `names`."""
    kind = thing if isinstance(thing, type) else type(thing)
    library = (getattr(kind, "__module__", "") or "").partition(".")[0]
    for name in names:
        assert hasattr(thing, name), (
            f"{library} {version(library)}: {kind.__name__} has no '{name}' any more; {where} relies on it"
        )


def means(found: Any, expected: Any, what: str) -> None:
    """Fail when something internal is no longer what `what` says."""
    same = torch.equal(found, expected) if isinstance(expected, Tensor) else found == expected
    assert same, f"{what}: expected {expected}, found {found}"


class Probe(Callback):
    """Calls `look(backend)` on every rank before the first step of a `tiny` model."""

    all_ranks = True

    def on_run_start(self, context: Context) -> None:
        backend: Any = context.backend  # type: ignore[attr-defined]
        self.look(backend, {name: p.detach().flatten() for name, p in tiny().named_parameters()})

    def look(self, backend: Any, expected: dict[str, Tensor]) -> None:
        """`expected` are the model's flattened parameters by name."""
        raise NotImplementedError


def covered(backend: Any, found: dict[str, int], expected: dict[str, Tensor]) -> None:
    """The ranks' ranges together are every element of each parameter, once."""
    ranks = backend.gather_objects(found)
    for name in found:
        means(sum(part[name] for part in ranks), len(expected[name]), f"elements of '{name}' over all ranks")


class FlatRanges(Probe):
    """Stages 1 and 2: where master weights lie."""

    def __init__(self, offload: bool) -> None:
        self.offload = offload

    def look(self, backend: Any, expected: dict[str, Tensor]) -> None:
        zero, lengths = backend.engine.optimizer, {}
        need(zero, _STATE, "bit16_groups", "single_partition_of_fp32_groups", "averaged_gradients")
        need(zero, _STATE, "cpu_offload")
        means(bool(zero.cpu_offload), self.offload, "cpu_offload says whether the optimizer is offloaded")
        assert not hasattr(zero, "fp16_partitioned_groups_flat"), f"{_STATE} takes it for stage 3"
        means(len(zero.bit16_groups), len(backend.optimizer.param_groups), "a flat partition per group")
        names = {p: name for name, p in backend.module.named_parameters()}
        for number, group in enumerate(zero.bit16_groups):
            flat = zero.single_partition_of_fp32_groups[number]
            means(flat.dtype, torch.float64, "float64 weights have float64 masters")
            for p in group:
                need(p, _STATE, "_hp_mapping")
                mapping, name = p._hp_mapping, names[p]
                lengths[name] = 0
                if mapping is None:
                    continue
                need(mapping, _STATE, "lp_fragment_address", "hp_fragment_address")
                here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                means(here.numel, there.numel, "both addresses are as long")
                means(
                    flat.detach()[there.start : there.start + there.numel],
                    expected[name][here.start : here.start + here.numel],
                    f"_hp_mapping of '{name}' says where its elements lie",
                )
                lengths[name] = here.numel
        covered(backend, lengths, expected)


class PartitionedRanges(Probe):
    """Stage 3: where master weights and parameters lie."""

    def __init__(self, offload: bool) -> None:
        self.offload = offload

    def look(self, backend: Any, expected: dict[str, Tensor]) -> None:
        zero, lengths = backend.engine.optimizer, {}
        need(zero, _STATE, "fp16_groups", "fp32_partitioned_groups_flat", "fp16_partitioned_groups_flat")
        need(zero, _STATE, "grad_position", "get_param_id", "sub_group_to_group_id", "averaged_gradients")
        need(zero, _STATE, "_unflatten_partitioned_parameters", "_partition_all_parameters")
        need(zero, _STATE, "grad_partitions_flat_buffer", "offload_optimizer")
        means(bool(zero.offload_optimizer), self.offload, "offload_optimizer says whether it is offloaded")
        members = backend.sharded._members
        names = {p: name for name, p in backend.module.named_parameters()}
        for number, group in enumerate(zero.fp16_groups):
            flat = zero.fp32_partitioned_groups_flat[number].detach()
            owner = zero.sub_group_to_group_id[number]
            for p in group:
                need(p, _STATE, "partition_numel", "ds_numel", "ds_shape", "ds_tensor")
                name = names[p]
                means(sum(p is member for member in members[owner]), 1, "sub_group_to_group_id is its group")
                position = zero.grad_position[zero.get_param_id(p)]
                means(
                    (len(position), position[0]), (3, number), "grad_position is (sub-group, offset, length)"
                )
                whole = expected[name]
                means((p.ds_numel, p.ds_shape.numel()), (len(whole), len(whole)), "ds_numel and ds_shape")
                size = p.partition_numel()
                part = whole[backend.world.rank * size : (backend.world.rank + 1) * size]
                means(
                    flat[position[1] : position[1] + len(part)], part, f"grad_position says where '{name}' is"
                )
                lengths[name] = len(part)
        covered(backend, lengths, expected)
        self.look_at_parameters(backend, zero, names, expected)

    def look_at_parameters(
        self, backend: Any, zero: Any, names: dict[Any, str], expected: dict[str, Tensor]
    ) -> None:
        """What `_partition_all_parameters` and `_unflatten_partitioned_parameters` do."""
        zero._partition_all_parameters()
        for p, name in names.items():
            part = expected[name][backend.world.rank * p.partition_numel() :][: p.partition_numel()]
            means(
                p.ds_tensor.detach().flatten()[: len(part)],
                part,
                f"ds_tensor is this rank's part of '{name}'",
            )
        for number, flat in enumerate(zero.fp16_partitioned_groups_flat):
            flat.data.fill_(7.0)
            zero._unflatten_partitioned_parameters(number)
            for p in zero.fp16_groups[number]:
                means(float(p.ds_tensor.min()), 7.0, "_unflatten_partitioned_parameters fills the parameters")
        backend.sharded.spread_masters()


class Steps(Callback):
    """Our gradient norm is what DeepSpeed clips by, and our scale what it divides by."""

    all_ranks = True
    calls = 0

    def on_run_start(self, context: Context) -> None:
        backend: Any = context.backend  # type: ignore[attr-defined]
        self.zero = zero = backend.engine.optimizer
        where = "backends/distributed_backends/deepspeed/backend.py"
        need(backend.engine, where, "was_step_applied", "set_gradient_accumulation_boundary", "destroy")
        zero.external_loss_scale = 8.0
        means(float(zero.loss_scale), 8.0, "with custom_loss_scaler, external_loss_scale is the loss scale")
        zero.external_loss_scale = 1.0
        name = "_get_norm_groups" if backend.stage == 3 else "scaled_global_norm"
        need(type(zero), where, name, "unscale_and_clip_grads")
        need(zero, where, "clip_grad", "_global_grad_norm")
        means(zero.clip_grad, 0.0, "gradient_clipping 0 is no clipping")
        setattr(zero, name, self.counted(getattr(zero, name)))

    def counted(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """`function`, its calls counted; whatever it is given besides is dropped, as ours takes nothing."""

        def call() -> Any:
            self.calls += 1
            return function()

        return call

    def on_step_end(self, context: Context) -> None:
        assert self.calls > 0, "DeepSpeed does not ask for the gradient norm where it used to"
        assert context.backend.engine.was_step_applied()  # type: ignore[attr-defined]


class CutByRows(Probe):
    """FSDP2: each rank's rows are where their number times the row length says."""

    def look(self, backend: Any, expected: dict[str, Tensor]) -> None:
        where, lengths = "distributed/checkpoint/dtensor.py", {}
        for name, p in backend.module.named_parameters():
            if p.dim() == 0:
                continue
            need(p, where, "placements", "device_mesh", "to_local", "full_tensor")
            means(own_copies(p), (0, 1), f"'{name}' is on one rank each")
            lengths[name] = 0
            for piece in own_pieces(p):
                part = expected[name].reshape(p.shape)[piece.box]
                means(piece.data.flatten(), part.flatten(), f"the elements of '{name}' at {piece.offsets}")
                lengths[name] += piece.data.numel()
        covered(backend, lengths, expected)

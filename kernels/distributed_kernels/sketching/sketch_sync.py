"""Equal sketches on all ranks: compared by checksum, and made equal where they are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from distributed_kernels.errors import KernelError
from distributed_kernels.sketching.frozen_sketches import Sketch


def sketch_checksums(module: nn.Module) -> dict[str, int]:
    """A number by name for every `Sketch` in `module`; equal sketches have equal numbers."""
    return {name: sketch.checksum() for name, sketch in _sketches(module).items()}


def check_sketch_sync(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Check that all ranks hold the same sketches. Collective; every rank raises the same error.

    Args:
        module: the model; wrapped by DDP, FSDP2 or DeepSpeed, too.
        group: the ranks to compare; None is the default group, or this process alone without one.

    Raises:
        KernelError: names the layers that differ, and on which of the group's ranks.
    """
    if not dist.is_initialized():
        return
    differing = _differing(_all_gather(sketch_checksums(module), group))
    if differing:
        raise KernelError(
            "sketches differ from rank 0's: "
            + "; ".join(f"layer '{name}' on rank {_list(ranks)}" for name, ranks in differing.items()),
            got=sorted(differing),
            remedy="Build the layers with the same seeds on every rank, or call synchronize_sketches",
        )


def synchronize_sketches(
    module: nn.Module, group: dist.ProcessGroup | None = None, src: int = 0
) -> list[str]:
    """Give every rank the sketches of one. Collective.

    Only checksums travel where the sketches are equal already; else a seed, or matrices given by hand.

    Args:
        module: as for `check_sketch_sync`.
        group: likewise.
        src: the rank within `group` whose sketches all get.

    Returns:
        The names of layers that were not equal.

    Raises:
        KernelError: the ranks' models have different layers, or `src` is no rank of the group.
    """
    if not dist.is_initialized():
        return []
    size = dist.get_world_size(group)
    if not 0 <= src < size:
        raise KernelError(
            "src: not a rank of the group",
            got=src,
            allowed=f"0 to {size - 1}",
            remedy="Give a rank of the group",
        )
    root = src if group is None else dist.get_global_rank(group, src)

    def broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, root, group)
        return box[0]

    return synchronize_by(module, lambda value: _all_gather(value, group), broadcast)


def synchronize_by(
    module: nn.Module, gather: Callable[[Any], Sequence[Any]], broadcast: Callable[[Any], Any]
) -> list[str]:
    """`synchronize_sketches` for ranks that communicate by other means than torch's process groups.

    Args:
        gather: takes this rank's object and returns all ranks'.
        broadcast: takes this rank's object and returns that of one rank, the same for all.
    """
    differing = _differing(gather(sketch_checksums(module)))
    sketches = _sketches(module)
    missing = [name for name in differing if name not in sketches]
    if any(gather(missing)):
        raise KernelError(
            "the ranks' models have different sketched layers",
            got=sorted(sketches),
            remedy="Build the same model on every rank",
        )
    if differing:
        states = broadcast({name: sketches[name].export_sketch() for name in differing})
        for name, state in states.items():
            sketches[name].import_sketch(state)
    return list(differing)


def _sketches(module: nn.Module) -> dict[str, Sketch]:
    """By the name of the layer, the wrappers' own parts of it left out."""
    wrappers = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, Sketch):
            parts = [word for word in name.split(".") if word not in wrappers]
            found[".".join(parts[:-1] or parts)] = part
    return found


def _differing(everybody: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Layer -> ranks whose checksum is not the first rank's."""
    names = list(dict.fromkeys(name for own in everybody for name in own))
    first = everybody[0]
    ranks = {
        name: [r for r, own in enumerate(everybody) if own.get(name) != first.get(name)] for name in names
    }
    return {name: others for name, others in ranks.items() if others}


def _all_gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    box: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(box, value, group)
    return box


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))

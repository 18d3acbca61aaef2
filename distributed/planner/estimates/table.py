"""The table of plans of a model that is given by numbers, and what to do when no plan fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from distributed.config.compression import CompressionSection
from distributed.errors import UserError
from distributed.interfaces.codec import DENSE, CodecSpec, dense_bytes
from distributed.planner.estimates.candidates import (
    SearchSpace,
    distinct_backends,
    groups,
    leaves,
    micro_batches,
    sized,
)
from distributed.planner.estimates.configuration import refusal_of
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.memory_by_numbers import rank_memory
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.search import Table, search
from distributed.planner.estimates.split import Split
from distributed.planner.estimates.time import StepTimer
from distributed.registry.catalog import get_catalog

__all__ = ["does_not_fit", "least_memory", "plan_table", "search_numbers", "smallest_cluster", "timer_of"]

_LARGEST_CLUSTER = 2**16


def plan_table(
    numbers: ModelNumbers,
    hardware: str | HardwareProfile,
    num_devices: int,
    precision: str = "bf16",
    plans: int = 10,
    **choices: object,
) -> Table:
    """The fastest plans of the installed backends that fit.

    Args:
        hardware: name of a shipped profile, path of a file, or a profile.
        num_devices: number of devices, each with one rank.
        choices: other attributes of `SearchSpace`.

    Raises:
        UserError: the global batch cannot be divided, or no plan fits, with the smallest cluster that does.
    """
    profile = hardware if isinstance(hardware, HardwareProfile) else load_profile(hardware)
    catalog = get_catalog()
    given = {
        "backends": distinct_backends(catalog.backends.values()),
        "codec_specs": catalog.codecs,
        **choices,
    }
    space = SearchSpace(numbers, num_devices, precision=precision, **given)  # type: ignore[arg-type]
    table = search_numbers(space, profile, plans, lambda split: refusal_of(split, catalog))
    if not table.plans:
        raise does_not_fit(space, profile)
    return table


def search_numbers(
    space: SearchSpace,
    profile: HardwareProfile,
    plans: int,
    refuses: Callable[[Split], str | None] = lambda split: None,
) -> Table:
    """The fastest plans of `space` that fit, if there are any, by the predictions from numbers alone."""
    numbers = space.numbers
    return search(
        space,
        timer_of(space, profile),
        lambda split: rank_memory(numbers, split, profile).total,
        profile.memory,
        plans,
        refuses=refuses,
    )


def least_memory(space: SearchSpace, profile: HardwareProfile) -> float:
    """Bytes of the largest rank under the split that needs least, infinite without a split that can train."""
    return min(
        (rank_memory(space.numbers, split, profile).total for split in _splits(space)), default=float("inf")
    )


def _splits(space: SearchSpace) -> Iterator[Split]:
    for group, refused in groups(space):
        if refused is None:
            sizes = micro_batches(space, group)
            for leaf, reason in leaves(space, group):
                if reason is None:
                    yield from sized(space, leaf, sizes)


def smallest_cluster(space: SearchSpace, profile: HardwareProfile) -> int | None:
    """The smallest power of two of devices on which a plan fits; None up to 65,536.

    The global batch grows with the number of devices where they would not divide it.
    """
    count, weights = 1, 4.0 * space.numbers.parameters
    while count <= _LARGEST_CLUSTER:
        batch = space.numbers.global_batch
        numbers = replace(space.numbers, global_batch=-(-batch // count) * count)
        larger = replace(space, world_size=count, numbers=numbers)
        # Every weight is on some device, so that fewer devices need no search.
        if weights <= count * profile.memory and least_memory(larger, profile) <= profile.memory:
            return count
        count *= 2
    return None


def does_not_fit(space: SearchSpace, profile: HardwareProfile) -> UserError:
    """The error of a model that is larger than the cluster, with the smallest cluster that fits."""
    least, enough = least_memory(space, profile), smallest_cluster(space, profile)
    where = f"{enough} devices of this kind" if enough else "no cluster of up to 65,536 devices"
    return UserError(
        f"the model does not fit: the split with the least memory takes {least / 1e9:.1f} GB on a"
        f" rank, {(least - profile.memory) / 1e9:.1f} GB more than a device has",
        field="num_devices",
        got=space.world_size,
        allowed=f"{where} (powers of two)",
        remedy="Use more or larger devices, or offload the optimizer (offload=(False, True))",
    )


def timer_of(space: SearchSpace, profile: HardwareProfile) -> StepTimer:
    """The time model of a search, with the codecs of its space."""
    specs, hidden = dict(space.codec_specs), space.numbers.hidden

    @cache
    def share(codec: str, ranks: int) -> float:
        return 1.0 if codec == DENSE or ranks == 1 else _share(specs[codec], hidden, ranks)

    return StepTimer(space.numbers, profile, codec_share=share)


def _share(codec: CodecSpec, hidden: int, ranks: int) -> float:
    shape = (hidden, hidden)
    sent = codec.wire_bytes(shape, 4, CompressionSection(codec=codec.name), ranks)
    return sent / dense_bytes(shape, 4, ranks)

"""The table of plans of a model, and the error of a model that fits nowhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from distributed.errors import UserError
from distributed.planner.estimates.candidates import (
    SearchSpace,
    distinct_backends,
    groups,
    leaves,
    micro_batches,
    sized,
)
from distributed.planner.estimates.configuration import refusal_of
from distributed.planner.estimates.from_numbers import FromNumbers
from distributed.planner.estimates.hardware import HardwareProfile, load_profile
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.predictions import Predictions
from distributed.planner.estimates.search import Table, nothing_trains, search
from distributed.planner.estimates.split import Split
from distributed.registry.catalog import get_catalog

__all__ = ["does_not_fit", "least_memory", "plan_table", "predictions_from", "smallest_cluster", "table_of"]

_LARGEST_CLUSTER = 2**16

PredictionsOf = Callable[[SearchSpace], Predictions]


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
    return table_of(space, predictions_from(profile), profile, plans, lambda s: refusal_of(s, catalog))


def predictions_from(profile: HardwareProfile) -> PredictionsOf:
    """Predictions of spaces whose model is given by numbers."""

    def predictions(space: SearchSpace) -> Predictions:
        assert isinstance(space.sizes, ModelNumbers)
        return FromNumbers(space.sizes, profile, space.codec_specs)

    return predictions


def table_of(
    space: SearchSpace,
    predictions_of: PredictionsOf,
    profile: HardwareProfile,
    plans: int = 10,
    refuses: Callable[[Split], str | None] = lambda split: None,
) -> Table:
    """The fastest plans of `space` that fit a device.

    Raises:
        UserError: the global batch cannot be divided, or no plan fits, with the smallest cluster that does.
    """
    table = search(space, predictions_of(space), profile.memory, plans, refuses=refuses)
    if not table.plans:
        raise does_not_fit(space, predictions_of, profile, table)
    return table


def least_memory(space: SearchSpace, predictions: Predictions, enough: float = 0.0) -> float:
    """Bytes of the largest rank under the split that needs least, infinite without a split that can train.

    Args:
        enough: bytes at which the search ends, because so much is there.
    """
    least = float("inf")
    for split in _splits(space):
        try:
            least = min(least, predictions.memory(split).total)
        except UserError:
            continue
        if least <= enough:
            break
    return least


def _splits(space: SearchSpace) -> Iterator[Split]:
    """Splits among which is one with the least memory: the smallest micro-batch, or all samples at once,
    which needs no memory for accumulated gradients."""
    for group, refused in groups(space):
        if refused is None:
            sizes = micro_batches(space, group)
            for leaf, reason in leaves(space, group):
                if reason is None:
                    yield from sized(space, leaf, sorted({sizes[0], sizes[-1]}) if sizes else ())


def smallest_cluster(
    space: SearchSpace, predictions_of: PredictionsOf, profile: HardwareProfile
) -> int | None:
    """The smallest power of two of devices on which a plan fits; None up to 65,536.

    The global batch grows with the number of devices where they would not divide it.
    """
    count, weights = 1, predictions_of(space).least_weights()
    while count <= _LARGEST_CLUSTER:
        batch = -(-space.sizes.global_batch // count) * count
        larger = replace(space, world_size=count, sizes=space.sizes.with_batch(batch))
        # Every weight is on some device, so that fewer devices need no search.
        if weights <= count * profile.memory:
            predictions = predictions_of(larger)
            if least_memory(larger, predictions, profile.memory) <= profile.memory:
                return count
        count *= 2
    return None


def does_not_fit(
    space: SearchSpace,
    predictions_of: PredictionsOf,
    profile: HardwareProfile,
    table: Table,
    field: str = "num_devices",
) -> UserError:
    """The error of a model that is larger than the cluster, with the smallest cluster that fits; or of one
    that no backend trains.

    Args:
        field: the caller's name of the number of devices.
    """
    least = least_memory(space, predictions_of(space))
    if least <= profile.memory or least == float("inf"):
        return nothing_trains(space, table)
    enough = smallest_cluster(space, predictions_of, profile)
    where = f"{enough} devices of this kind" if enough else "no cluster of up to 65,536 devices"
    return UserError(
        f"the model does not fit: the split with the least memory takes {least / 1e9:.1f} GB on a"
        f" rank, {(least - profile.memory) / 1e9:.1f} GB more than a device has",
        field=field,
        got=space.world_size,
        allowed=f"{where} (powers of two)",
        remedy="Use more devices, or devices with more memory",
    )

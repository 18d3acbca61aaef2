"""Plans for a transformer that is given by numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

from distributed.config import DistributedConfig, Layer, load_layers
from distributed.errors import UserError, did_you_mean
from distributed.operations.planning.default_hardware import profile_of
from distributed.operations.planning.machine_match import announce_difference
from distributed.operations.planning.options import PlanOptions, limited, note_on_batch
from distributed.operations.planning.plans import Plans, names_in
from distributed.planner.estimates.configuration import check_places, refusal_of
from distributed.planner.estimates.memory_by_numbers import SPREAD
from distributed.planner.estimates.numbers import ModelNumbers, model_numbers
from distributed.planner.estimates.space_of_config import space_of
from distributed.planner.estimates.table import predictions_from, table_of
from distributed.registry.catalog import get_catalog

__all__ = ["NUMBERS", "plan_numbers"]

NUMBERS = tuple(signature(model_numbers).parameters)
"""Names of the numbers of a transformer."""


def plan_numbers(
    given: Mapping[str, Any] | ModelNumbers,
    base: Sequence[Layer],
    asked: Sequence[Layer],
    options: PlanOptions,
) -> Plans:
    """See `distributed.plan`.

    Args:
        given: arguments of `model_numbers`, or its result.
        base: layers of the configuration to start from.
        asked: layers with the fields that a plan has to have.
    """
    catalog, layers = get_catalog(), (*base, *asked)
    config = load_layers(layers)
    numbers = _numbers(given, config)
    profile, whence = profile_of(options.hardware)
    devices, kept = options.devices_of(config, profile), frozenset(names_in(asked))
    check_places(config, kept, devices, profile.device, profile.devices_of_host)
    announce_difference(profile, devices)
    space = space_of(numbers, config, kept, profile, devices, catalog, options.codecs)
    space = limited(space, options.axes)
    table = table_of(
        space,
        predictions_from(profile),
        profile,
        options.num_plans,
        lambda split: refusal_of(split, catalog, profile.device, layers, kept),
    )
    subject = f"a transformer with {numbers.parameters:,.0f} parameters"
    notes = _assumptions(numbers, given, config) + note_on_batch(config)
    return Plans(subject, space, profile, table, layers, kept, layers, SPREAD, whence, notes)


def _assumptions(
    numbers: ModelNumbers, given: Mapping[str, Any] | ModelNumbers, config: DistributedConfig
) -> tuple[str, ...]:
    """Each size that was not given, with the value that is planned for."""
    names = [*numbers.assumed]
    if isinstance(given, Mapping):
        known = {*given, *(("global_batch",) if config.global_batch_size is not None else ())}
        names += [name for name in ("sequence", "global_batch", "family") if name not in known]
    values = ", ".join(f"{name}={getattr(numbers, name)}" for name in names)
    return (f"not given and assumed: {values}",) if names else ()


def _numbers(given: Mapping[str, Any] | ModelNumbers, config: DistributedConfig) -> ModelNumbers:
    if isinstance(given, ModelNumbers):
        return given
    for name in given:
        if name not in NUMBERS:
            raise UserError(
                f"unknown number of a transformer.{did_you_mean(str(name), NUMBERS)}",
                field=str(name),
                got=given[name],
                allowed=", ".join(NUMBERS),
                remedy="Correct the name; fields of the configuration are arguments of their own",
            )
    values, batch = dict(given), config.global_batch_size
    if batch is not None and values.setdefault("global_batch", batch) != batch:
        raise UserError(
            "the numbers of the model have another global batch",
            field="global_batch_size",
            got=batch,
            allowed=str(values["global_batch"]),
            remedy="Leave one of them out",
        )
    return model_numbers(**values)

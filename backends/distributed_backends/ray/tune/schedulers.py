"""Ray Tune's schedulers by the names that a search gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.tune.schedulers import (
    AsyncHyperBandScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search.sample import Domain, Function

from distributed.errors import UserError
from distributed.interfaces.search import Search
from distributed.operations.tuning.search_space import parse_space
from distributed.operations.tuning.trial import EPOCHS
from distributed_backends.ray.tune.search_space import translate

_NO_LAST = 10**6
"""Epochs; a trial's configuration sets its end."""


_INDEPENDENT = (AsyncHyperBandScheduler, MedianStoppingRule)
_NAMES = ("asha", "pbt")


def hands_over(search: Search) -> int:
    """Number of epochs between the checkpoints that Ray gets of a trial, for that trial after a pause or
    for another; 0 is never.

    Raises:
        UserError: no such scheduler.
    """
    scheduler = search.scheduler
    if isinstance(scheduler, TrialScheduler):
        alone = type(scheduler) is FIFOScheduler or isinstance(scheduler, _INDEPENDENT)
        return 0 if alone else 1
    if scheduler is not None and scheduler not in _NAMES:
        raise UserError(
            "unknown scheduler",
            field="scheduler",
            got=scheduler,
            allowed=f"none, {', '.join(_NAMES)}, or an object of ray.tune.schedulers",
        )
    if scheduler != "pbt":
        return 0
    every = search.scheduler_options.get("perturbation_interval", search.grace_period)
    return every if isinstance(every, int) and every > 0 else 1


def own_metric(scheduler: Any) -> bool:
    """Whether a scheduler that the user built knows its metric already."""
    return getattr(scheduler, "metric", None) is not None


def make_scheduler(search: Search, space: Mapping[str, Any]) -> TrialScheduler | None:
    """The scheduler that `search` names.

    Raises:
        UserError: an option that it does not have, or nothing in the space that ``pbt`` could change.
    """
    if search.scheduler is None or isinstance(search.scheduler, TrialScheduler):
        return search.scheduler
    make = _pbt if search.scheduler == "pbt" else _asha
    try:
        return make(search, space)
    except (TypeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{search.scheduler} does not accept these options: {error}",
            field="scheduler_options",
            got=dict(search.scheduler_options),
        ) from None


def _asha(search: Search, space: Mapping[str, Any]) -> TrialScheduler:
    options = {
        "reduction_factor": 3,
        "grace_period": search.grace_period,
        "max_t": _NO_LAST,
        # A trial at its last epoch has yet to end its run.
        "stop_last_trials": False,
        **search.scheduler_options,
    }
    return AsyncHyperBandScheduler(time_attr=EPOCHS, **options)


def _pbt(search: Search, space: Mapping[str, Any]) -> TrialScheduler:
    options = dict(search.scheduler_options)
    named = options.pop("hyperparam_mutations", None)
    found = translate(parse_space(named)) if named else space
    changes = {n: v for n, v in found.items() if isinstance(v, Domain) and not isinstance(v, Function)}
    if not changes:
        raise UserError(
            "pbt changes sampled parameters, but the space has only fixed values and grids",
            field="search_space",
            allowed="a choice, uniform, loguniform, ...",
        )
    options = {
        "perturbation_interval": search.grace_period,
        "require_attrs": False,
        "hyperparam_mutations": changes,
        **options,
    }
    return PopulationBasedTraining(time_attr=EPOCHS, **options)

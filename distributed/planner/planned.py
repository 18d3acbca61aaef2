"""Predictions in a configuration hold for one split: a run with another one does not keep them."""

from __future__ import annotations

from dataclasses import replace

from distributed.config.planned import PlannedSection
from distributed.errors import UserError
from distributed.interfaces.plan import RunPlan
from distributed.planner.estimates.split import describe
from distributed.planner.estimates.split_of_plan import split_of

__all__ = ["with_own_predictions"]


def with_own_predictions(plan: RunPlan) -> RunPlan:
    """`plan`; without the section `planned`, and with a note, if that is about another split."""
    planned = plan.config.planned
    if planned.split is None:
        return plan
    try:
        own = describe(split_of(plan))
    except UserError as error:
        own = f"one whose {error.field} is not predicted"
    if own == planned.split:
        return plan
    config = plan.config.model_copy(update={"planned": PlannedSection()})
    note = f"the predictions in `planned` are ignored: they are for {planned.split}, and this run is {own}"
    return replace(plan, config=config, notes=(*plan.notes, note))

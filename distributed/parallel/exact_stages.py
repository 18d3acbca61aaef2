"""The division of a model into stages that leaves its output as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from distributed.parallel.cut_check import CutCheck
from distributed.parallel.pipeline_layout import Layout
from distributed.parallel.pipeline_pieces import batch_tensors, rows_of
from distributed.parallel.staged_model import StagedModel

__all__ = ["first_exact"]


def first_exact(
    model: nn.Module,
    layouts: Iterable[Layout],
    call: Callable[[], Any],
    batch: Any,
    check: CutCheck,
    agree: Callable[[bool], bool] = bool,
) -> Layout | None:
    """The first of `layouts` whose stages compute the output of the whole model; None if there is none.

    Args:
        model: whole, with values.
        call: calls it with `batch`.
        check: knows the output of the whole model.
        agree: what all ranks found from what this one has, where each holds a slice of the samples.
    """
    for layout in layouts:
        if agree(check.accepts(partial(_in_stages, model, layout, call, batch))):
            return layout
    return None


def _in_stages(model: nn.Module, layout: Layout, forward: Callable[[], Any], batch: Any) -> Any:
    """What the stages of `layout` compute one after the other."""
    staged = StagedModel(model, layout, str(batch_tensors(batch)[0].device))
    rows, found = rows_of(batch), None
    staged.install()
    try:
        for stage in range(layout.num_stages):
            found = staged.run(stage, found, rows, forward)
        return found
    finally:
        staged.remove()

"""Predict the memory of a rank: replay what one optimizer step allocates, as a backend divides it.

A timeline of one micro-batch, recorded from the model, is played forward event by event. What a backend adds
(buckets, gathered parameters, staging memory of collectives) and frees (gradients that were reduced,
parameters that were gathered) is inserted where it happens. The peak therefore is that of one order of
events and not a sum of maxima which are never live together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distributed.errors import UserError
from distributed.interfaces.parallel_dims import AXES
from distributed.planner.estimates.device_memory import EXACT, DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.layouts import layout_of
from distributed.planner.estimates.ledger import Ledger, MemoryParts
from distributed.planner.estimates.model_facts import Cut, FactsSource, ModelFacts
from distributed.planner.estimates.pipeline_window import StageLines, place_buffers, play_stages
from distributed.planner.estimates.split import Split
from distributed.planner.stage_order import SPLIT, rank_stages

__all__ = ["MemoryParts", "check_split", "offloaded_memory", "predict_memory"]


def predict_memory(
    facts: ModelFacts | FactsSource, split: Split, device: DeviceMemory = EXACT
) -> MemoryParts:
    """Memory of the rank that needs most, at the peak of a step of steady training.

    Args:
        facts: of the model, recorded at the precision and with the optimizer of `split`; or what gives those
            of each part of it, for ranks that share the model.
        split: how it is divided.
        device: how its allocator and its collectives use memory.

    Raises:
        UserError: the memory of such a split is not predicted, the model cannot be divided so, or the facts
            are of another configuration.
    """
    layout = layout_of(split)
    _check_layout(split, layout)
    number = split.dims.pipeline
    ranks = [rank_stages(split.schedule, number, rank) if number > 1 else (0,) for rank in range(number)]
    found = [
        _of_rank([_facts_of(facts, split.cut(stage)) for stage in stages], split, device, layout)
        for stages in ranks
    ]
    return max(found, key=lambda parts: parts.total)


def offloaded_memory(facts: ModelFacts, split: Split) -> MemoryParts:
    """Host memory of a rank in the update of an offloaded optimizer: copies of the parameters and of their
    gradients, the state, and the temporary memory of one parameter after the other. `predict_memory` has what
    is left on the device.

    Args:
        facts: of the model, or of what the rank has of it.
        split: how it is divided; without `Split.offload`, nothing is in host memory.
    """
    trained = [parameter.nbytes for parameter in facts.parameters if parameter.trained]
    if not split.offload:
        return MemoryParts()
    ledger = Ledger(EXACT)
    layout = layout_of(split)(facts, replace(split, offload=False), ledger, EXACT)
    copies = sum(trained)
    state = sum(nbytes for parameter in trained for nbytes in layout.state(parameter))
    return MemoryParts(parameters=copies, gradients=copies, optimizer=state + sum(layout.workspace(trained)))


def check_split(split: Split) -> None:
    """Raise a UserError if the memory of such a split is not predicted for any model."""
    _check_layout(split, layout_of(split))


def _facts_of(facts: ModelFacts | FactsSource, cut: Cut) -> ModelFacts:
    if not isinstance(facts, ModelFacts):
        return facts(cut)
    if facts.cut != cut:
        raise UserError(
            "the facts are those of another part of the model",
            field="parallel",
            got=str(facts.cut),
            allowed=str(cut),
            remedy="Give what collects the facts of each part (`facts_source`)",
        )
    return facts


def _of_rank(
    stages: Sequence[ModelFacts], split: Split, device: DeviceMemory, layout_class: type[Layout]
) -> MemoryParts:
    """Memory of the rank that has `stages`, each of which has the parameters of all of them."""
    for facts in stages:
        _check_facts(facts, split, layout_class)
    facts, lines = stages[0], [_timelines(facts, split) for facts in stages]
    first, later = lines[0].whole
    ledger = Ledger(device)
    ledger.take("framework", device.framework_bytes)
    ledger.take("activations", device.workspace_bytes)
    layout = layout_class(facts, split, ledger, device)
    layout.place()
    number = split.num_micro_batches
    for size in first.inputs * number:
        ledger.take("activations", size.at(split.micro_batch))
    if split.dims.pipeline > 1:
        place_buffers(layout, stages, split)
        play_stages(layout, stages, lines, split)
    else:
        # All micro-batches between the first and the last have the same peak.
        for position in sorted({0, min(1, number - 1), number - 1}):
            line = later if position and layout.adds_gradients else first
            layout.play(line, is_last=position == number - 1)
    layout.end_window()
    layout.step()
    return ledger.peak.with_reserved(device.reserved)


def _timelines(facts: ModelFacts, split: Split) -> StageLines:
    if not split.activation_checkpointing:
        first, later = facts.first_halves, facts.later_halves
        halves = None if first is None or later is None else (first, later)
        return StageLines((facts.first, facts.later), halves)
    if facts.first_recomputed is None or facts.later_recomputed is None:
        raise UserError(
            "the facts of the model were recorded without activation checkpointing"
            + (f": {facts.cannot_recompute}" if facts.cannot_recompute else ""),
            field="activation_checkpointing",
            got=True,
            allowed="false",
            remedy="Name the blocks of the model (block_classes) and collect its facts again",
        )
    return StageLines((facts.first_recomputed, facts.later_recomputed))


def _check_facts(facts: ModelFacts, split: Split, layout: type[Layout]) -> None:
    for field, recorded in (("precision", facts.precision), ("optimizer", facts.optimizer_name)):
        if getattr(split, field) != recorded:
            raise UserError(
                "the facts of the model were recorded with another value",
                field=field,
                got=getattr(split, field),
                allowed=recorded,
                remedy="Collect the facts of the model with this value",
            )
    repeated = next((block for block in facts.blocks[1:] if block.calls > 1), None)
    if repeated is not None and layout.gathers_once:
        raise UserError(
            "the memory of blocks that a forward pass calls several times is not predicted for the backend",
            field="backend",
            got=f"{repeated.calls} calls of '{repeated.name}'",
            allowed="a backend that does not gather blocks",
            remedy="Choose serial, pytorch-ddp or zero_stage of at most 2, or measure a run",
        )


def _check_layout(split: Split, layout: type[Layout]) -> None:
    codec = "none" if layout.has_codecs else split.cut().codec
    offload = split.offload and not layout.can_offload
    for field, value, allowed in (("codec", codec, "none"), ("offload", offload, False)):
        if value != allowed:
            raise UserError(
                "the memory that this setting needs is not predicted",
                field=field,
                got=value,
                allowed=str(allowed).lower(),
                remedy="Leave it out, or measure a run",
            )
    for axis in (*AXES, "expert"):
        if split.dims.size(axis) > 1 and axis not in layout.axes:
            raise UserError(
                "the memory of ranks along this axis of the mesh is not predicted for the backend",
                field=f"parallel.{axis}",
                got=split.dims.size(axis),
                allowed="1",
                remedy="Choose another backend, or measure a run",
            )
    if split.dims.pipeline > 1 and split.schedule not in layout.schedules:
        raise UserError(
            "the memory of a rank under this schedule is not predicted",
            field="parallel.schedule",
            got=split.schedule,
            allowed=", ".join(layout.schedules),
            remedy="Choose one of these, or measure a run",
        )
    if split.dims.pipeline > 1 and split.schedule in SPLIT and split.activation_checkpointing:
        raise UserError(
            "this schedule computes the gradients of weights and of activations apart, which a block that is"
            " computed again does not",
            field="activation_checkpointing",
            got=True,
            allowed="false",
            remedy="Leave it out, or choose another parallel.schedule",
        )
    if split.zero_stage not in layout.zero_stages:
        raise UserError(
            "the memory of this stage of ZeRO is not predicted for the backend",
            field="zero_stage",
            got=split.zero_stage,
            allowed=", ".join(map(str, layout.zero_stages)),
            remedy="Choose one of these, or measure a run",
        )

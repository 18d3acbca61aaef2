"""Predict the memory of a rank: replay what one optimizer step allocates, as a backend divides it.

A timeline of one micro-batch, recorded from the model, is played forward event by event. What a backend adds
(buckets, gathered parameters, staging memory of collectives) and frees (gradients that were reduced,
parameters that were gathered) is inserted where it happens. The peak therefore is that of one order of
events and not a sum of maxima which are never live together.
"""

from __future__ import annotations

from distributed.errors import UserError
from distributed.planner.estimates.device_memory import EXACT, DeviceMemory
from distributed.planner.estimates.layout import Layout
from distributed.planner.estimates.layouts import LAYOUTS
from distributed.planner.estimates.ledger import Ledger, MemoryParts
from distributed.planner.estimates.model_facts import ModelFacts, Timeline
from distributed.planner.estimates.split import Split

__all__ = ["MemoryParts", "predict_memory"]


def predict_memory(facts: ModelFacts, split: Split, device: DeviceMemory = EXACT) -> MemoryParts:
    """Memory of the rank that needs most, at the peak of a step of steady training.

    Args:
        facts: of the model, recorded at the precision and with the optimizer of `split`.
        split: how it is divided.
        device: how its allocator and its collectives use memory.

    Raises:
        UserError: the memory of such a split is not predicted, or the facts are of another configuration.
    """
    _check(facts, split)
    first, later = _timelines(facts, split)
    ledger = Ledger(device)
    ledger.take("framework", device.framework_bytes)
    layout = LAYOUTS[split.backend](facts, split, ledger, device)
    layout.place()
    number = split.num_micro_batches
    for size in first.inputs * number:
        ledger.take("activations", size.at(split.micro_batch))
    # All micro-batches between the first and the last have the same peak.
    for position in sorted({0, min(1, number - 1), number - 1}):
        line = later if position and layout.adds_gradients else first
        layout.play(line, is_last=position == number - 1)
    layout.step()
    return ledger.peak


def _timelines(facts: ModelFacts, split: Split) -> tuple[Timeline, Timeline]:
    if not split.activation_checkpointing:
        return facts.first, facts.later
    if facts.first_recomputed is None or facts.later_recomputed is None:
        raise UserError(
            "the facts of the model were recorded without activation checkpointing"
            + (f": {facts.cannot_recompute}" if facts.cannot_recompute else ""),
            field="activation_checkpointing",
            got=True,
            allowed="false",
            remedy="Name the blocks of the model (block_classes) and collect its facts again",
        )
    return facts.first_recomputed, facts.later_recomputed


def _check(facts: ModelFacts, split: Split) -> None:
    for field, recorded in (("precision", facts.precision), ("optimizer", facts.optimizer_name)):
        if getattr(split, field) != recorded:
            raise UserError(
                "the facts of the model were recorded with another value",
                field=field,
                got=getattr(split, field),
                allowed=recorded,
                remedy="Collect the facts of the model with this value",
            )
    if split.backend not in LAYOUTS:
        raise UserError(
            "the memory of a rank is not predicted for this backend",
            field="backend",
            got=split.backend,
            allowed=", ".join(sorted(LAYOUTS)),
            remedy="Choose one of these, or measure a run",
        )
    dims = split.dims
    for axis in ("tensor", "pipeline", "context", "expert"):
        if dims.size(axis) > 1:
            raise UserError(
                "the memory of ranks that share a model is not predicted",
                field=f"parallel.{axis}",
                got=dims.size(axis),
                allowed="1",
                remedy="Set it to 1, or measure a run",
            )
    for field, value, allowed in (("codec", split.codec, "none"), ("offload", split.offload, False)):
        if value != allowed:
            raise UserError(
                "the memory that this setting needs is not predicted",
                field=field,
                got=value,
                allowed=str(allowed).lower(),
                remedy="Leave it out, or measure a run",
            )
    _check_layout(split, LAYOUTS[split.backend])
    repeated = next((block for block in facts.blocks[1:] if block.calls > 1), None)
    if repeated is not None and LAYOUTS[split.backend].gathers_once:
        raise UserError(
            "the memory of blocks that a forward pass calls several times is not predicted for the backend",
            field="backend",
            got=f"{repeated.calls} calls of '{repeated.name}'",
            allowed="serial, pytorch-ddp, deepspeed",
            remedy="Choose one of these, or measure a run",
        )


def _check_layout(split: Split, layout: type[Layout]) -> None:
    for axis in ("data", "shard"):
        if split.dims.size(axis) > 1 and axis not in layout.axes:
            raise UserError(
                "the memory of ranks along this axis of the mesh is not predicted for the backend",
                field=f"parallel.{axis}",
                got=split.dims.size(axis),
                allowed="1",
                remedy="Choose another backend, or measure a run",
            )
    if split.zero_stage not in layout.zero_stages:
        raise UserError(
            "the memory of this stage of ZeRO is not predicted for the backend",
            field="zero_stage",
            got=split.zero_stage,
            allowed=", ".join(map(str, layout.zero_stages)),
            remedy="Choose one of these, or measure a run",
        )

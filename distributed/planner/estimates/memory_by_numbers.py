"""Memory of a rank for a model that is given by its sizes alone: what each part stores at five moments.

Coarser than a prediction from the model object: operations inside of a block are not followed. Sources:
Rajbhandari et al., 2020 (arXiv:1910.02054), for bytes of a parameter by ZeRO stage; Korthikanti et al., 2022
(arXiv:2205.05198), for activations and the micro-batches in flight under 1F1B; the layouts of this package,
for buckets and gathered parameters. Compared with recorded facts by
``python -m tests.benchmarks.planner_numbers_memory``.
"""

from __future__ import annotations

from typing import NamedTuple

from distributed.planner.estimates.block_time import ITEM_SIZES
from distributed.planner.estimates.device_memory import GPU, HOST
from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.rank_share import RankShare, rank_share
from distributed.planner.estimates.split import SGD_WITH_MOMENTUM, Split
from distributed.planner.estimates.zero3_layout import LARGEST_BUCKET, REUSED

__all__ = ["SPREAD", "rank_memory"]

SPREAD = 0.45
"""Relative half-width of the interval around a prediction: the command above shows no larger factor between
it and recorded facts."""

_WEIGHT = 4
"""Bytes of an element of a weight, a gradient or a moment: all float32."""

_STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, SGD_WITH_MOMENTUM: 4}
"""Optimizer -> bytes of its state for an element."""

_ENDS = 3
"""Values of the width that a token has outside of the blocks: the output of the last one, and two of the last
norm."""

_LOGIT = 4
"""Bytes of a logit that a micro-batch keeps until its backward pass: the logarithmic softmax, in float32. At
the loss there are the logit and its gradient besides."""


class _Moments(NamedTuple):
    """Bytes at five moments of a step.

    Attributes:
        at_loss: the last forward pass has ended; there are logits and their gradient.
        in_block: backward is inside the last block.
        in_second: so is that of the second micro-batch, where all of them wait for the last loss; under
            ZeRO 1, all gradients are about to be copied into buckets.
        at_end: backward ends, or under ZeRO 3 the next forward pass begins.
        at_step: the optimizer updates.
    """

    at_loss: float = 0.0
    in_block: float = 0.0
    in_second: float = 0.0
    at_end: float = 0.0
    at_step: float = 0.0


def rank_memory(
    numbers: ModelNumbers, split: Split, profile: HardwareProfile, engine: Engine = OURS
) -> MemoryParts:
    """Memory of the rank that needs most, at the moment when it needs most."""
    device = HOST if profile.device == "cpu" else GPU
    share = rank_share(numbers, split, engine)
    moments = zip(
        _weights(numbers, share, split, engine),
        _gradients(share, split),
        _optimizer(share, split, foreach=device.framework_bytes > 0),
        _activations(numbers, split, engine),
        _staging(share, split, engine),
        strict=True,
    )
    parameters, gradients, optimizer, activations, staging = max(moments, key=sum)
    parts = MemoryParts(
        parameters=round(parameters),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(activations) + device.workspace_bytes,
        framework=device.framework_bytes + round(staging),
    )
    return parts.with_reserved(device.reserved)


def _optimizer(share: RankShare, split: Split, *, foreach: bool) -> _Moments:
    """Moments, DeepSpeed's copy of the weights that a rank updates, and what an update of all parameters at
    once needs besides."""
    if split.offload:
        return _Moments()
    held = share.held(split, 1)
    state = ((_WEIGHT if split.zero_stage else 0) + _STATE_BYTES[split.optimizer]) * held
    roots = _WEIGHT * held if foreach and split.optimizer in ("adam", "adamw") else 0.0
    return _Moments(state, state, state, state, state + roots)


def _weights(numbers: ModelNumbers, share: RankShare, split: Split, engine: Engine) -> _Moments:
    held = _WEIGHT * share.held(split, 3)
    whole, block, embedding, output = share.whole, share.block, share.embedding, share.output
    dims, size = split.dims, ITEM_SIZES[split.precision]
    at_loss = in_block = held
    if split.zero_stage == 3:
        at_loss = in_block = held + _WEIGHT * min(whole, REUSED)
    elif dims.shard > 1:
        # What lies outside of blocks stays gathered, and the next block is gathered ahead.
        gathered = engine.gathered_bytes or size
        at_loss += gathered * (max(embedding, output) if dims.pipeline > 1 else embedding + output)
        in_block = at_loss + gathered * min(2, -(-numbers.layers // dims.pipeline)) * block
    at_end = at_loss if split.zero_stage == 3 else held
    if split.precision == "fp32":
        return _Moments(at_loss, in_block, in_block, at_end, held)
    # Each micro-batch keeps 16-bit copies of weights that multiply between its forward and its backward.
    first, last = _in_flight(split, engine)
    if split.activation_checkpointing:
        copies = size * last * output
        inside = in_block + copies + size * block
        return _Moments(at_loss + copies, inside, inside, at_end, held)
    multiply = whole if dims.pipeline > 1 or numbers.tied else whole - embedding
    copies = size * max(first, last) * multiply
    return _Moments(at_loss + copies, in_block + copies, in_block + copies, at_end, held)


def _gradients(share: RankShare, split: Split) -> _Moments:
    """Gradients and the buckets in which they are reduced."""
    dims, accumulates = split.dims, split.num_micro_batches > 1
    whole = _WEIGHT * share.whole
    held = _WEIGHT * share.held(split, 2)
    if split.zero_stage:
        owned = _WEIGHT * share.held(split, 1)
        return _zero_gradients(split.zero_stage, accumulates, whole, owned)
    if dims.shard > 1:
        # Ranks reduce after the last micro-batch, and keep whole gradients until then.
        later = whole if accumulates else 0.0
        return _Moments(0.0 if _waits(split) else later, later, later, held, held)
    # Under gpipe no micro-batch has gradients before the last loss.
    before = whole if accumulates and not _waits(split) else 0.0
    if dims.model_parallel_size > 1:
        return _Moments(before, before, whole, whole, whole)
    before += whole if dims.data > 1 else 0.0  # in buckets, from the first step on
    return _Moments(before, before, before, whole, whole)


def _zero_gradients(stage: int, accumulates: bool, whole: float, owned: float) -> _Moments:
    bucket = min(whole, _WEIGHT * LARGEST_BUCKET)
    if stage == 3:
        return _Moments(*[owned + bucket] * 5)
    if stage == 2:
        before = owned if accumulates else 0.0
        return _Moments(before, before + bucket, before + bucket, before + bucket + owned, owned)
    # Stage 1 keeps its bucket from the first micro-batch to the last.
    before = whole + bucket if accumulates else 0.0
    return _Moments(before, before or bucket, whole + bucket, bucket + owned, owned)


def _waits(split: Split) -> bool:
    """Whether all forward passes of a step come before its first backward pass."""
    return split.dims.pipeline > 1 and split.schedule in ("gpipe", "looped-bfs")


def _staging(share: RankShare, split: Split, engine: Engine) -> _Moments:
    """What gathers and reductions hold beside parameters and gradients."""
    if split.zero_stage in (1, 2):
        whole = _WEIGHT * share.whole
        bucket = min(whole, _WEIGHT * LARGEST_BUCKET)
        return _Moments(in_block=bucket if bucket < whole else 0.0, at_end=bucket)
    if split.zero_stage == 3:
        return _Moments(at_end=_WEIGHT * min(share.whole, REUSED))
    if split.dims.shard > 1:
        gathered = engine.gathered_bytes or ITEM_SIZES[split.precision]
        return _Moments(*[gathered * share.block] * 2)
    if split.dims.model_parallel_size > 1 and split.dims.size("data", "context") > 1:
        return _Moments(at_end=_WEIGHT * share.whole)
    return _Moments()


def _activations(numbers: ModelNumbers, split: Split, engine: Engine) -> _Moments:
    """Those of the first or of the last stage, whichever has more."""
    dims, item = split.dims, ITEM_SIZES[split.precision]
    tokens = split.micro_batch * numbers.sequence / dims.context
    blocks = -(-numbers.layers // dims.pipeline)
    block = numbers.activation_bytes(dims.tensor, engine.sequence_parallel, item)
    # The residual stream stays in float32 under autocast, and with it the inputs of both norms.
    block += 2 * numbers.hidden * (_WEIGHT - item) / (dims.tensor if engine.sequence_parallel else 1)
    stored = blocks * (numbers.checkpoint_bytes(_WEIGHT) if split.activation_checkpointing else block)
    again = block if split.activation_checkpointing else 0.0
    first, last = _in_flight(split, engine)
    logits = numbers.vocabulary / (dims.tensor if engine.cuts_embedding else 1)
    # Schedules with several stages on a rank keep the outputs of all micro-batches.
    kept = 1 if dims.pipeline == 1 or split.schedule == "1f1b" else split.num_micro_batches
    ends = _ENDS * numbers.hidden * _WEIGHT + _LOGIT * (kept + 2) * logits
    at_first, at_last = first * stored + again, last * stored
    outputs = _LOGIT * (kept - 1) * logits
    rest = (last - 1) * stored + outputs + again if _waits(split) else 0.0
    return _Moments(
        tokens * max(at_first, at_last + ends),
        tokens * max(at_first, at_last + outputs + again),
        tokens * rest,
    )


def _in_flight(split: Split, engine: Engine) -> tuple[float, float]:
    """Micro-batches whose activations the first and the last stage store at once."""
    stages, count = split.dims.pipeline, split.num_micro_batches
    if stages == 1:
        return 1.0, 1.0
    if _waits(split):
        return float(count), float(count)
    if split.schedule == "1f1b":
        return float(min(count, stages)), 1.0
    # Narayanan et al., 2021, section 2.2: interleaving stores (1 + (p - 1) / (p v)) times as much.
    each = engine.stages_per_rank
    first = stages * (1.0 + (stages - 1) / (stages * each))
    last = ((each - 1) * stages + 1) / each
    return min(float(count), first), min(float(count), last)

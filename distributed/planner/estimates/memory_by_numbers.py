"""Memory of a rank for a model that is given by its sizes alone: sums of what each part stores at most.

Coarser than a prediction from the model object: operations inside of a block are not followed. Sources:
Rajbhandari et al., 2020 (arXiv:1910.02054), for bytes of a parameter by ZeRO stage; Korthikanti et al., 2022
(arXiv:2205.05198), for activations and the micro-batches in flight under 1F1B.
"""

from __future__ import annotations

from distributed.planner.estimates.block_time import ITEM_SIZES
from distributed.planner.estimates.engine import OURS, Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.ledger import MemoryParts
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.rank_share import held_parameters, rank_parameters
from distributed.planner.estimates.split import SGD_WITH_MOMENTUM, Split

__all__ = ["rank_memory"]

_WEIGHT = 4
"""Bytes of an element of a weight, a gradient or a moment: all float32."""

_STATE_BYTES = {"adamw": 8, "adam": 8, "sgd": 0, SGD_WITH_MOMENTUM: 4}
"""Optimizer -> bytes of its state for an element."""

_CONTEXT = 1_000_000_000
"""Bytes of a device context with its libraries and communicators, on devices with memory of their own."""
_LARGE_DEVICE = 16_000_000_000

_RESERVED = 0.1
"""Share of activations and gathered parameters that the allocator reserves beyond them. torchtitan logs 1.2
times the live bytes as the largest reservation; parameters and optimizer state do not fragment."""

_LOGIT_BYTES = 4
"""Bytes of a logit in the loss, which is computed in float32, beside those of the output layer."""


def rank_memory(
    numbers: ModelNumbers, split: Split, profile: HardwareProfile, engine: Engine = OURS
) -> MemoryParts:
    """Memory of the rank that needs most."""
    elements, dims = sum(rank_parameters(numbers, split)), split.dims
    sharded = dims.shard > 1 or split.zero_stage == 3
    gathered = _gathered(numbers, split, engine) if sharded else _copies(split, elements)
    stored = _activations(numbers, split, engine)
    moments = 0.0 if split.offload else _STATE_BYTES[split.optimizer] * held_parameters(numbers, split, 1)
    return MemoryParts(
        parameters=round(_WEIGHT * held_parameters(numbers, split, 3) + gathered),
        gradients=round(_WEIGHT * _gradients(numbers, split)),
        optimizer=round(moments),
        activations=round(stored),
        framework=_CONTEXT if profile.memory >= _LARGE_DEVICE else 0,
        fragmentation=round(_RESERVED * (stored + gathered)),
    )


def _copies(split: Split, elements: float) -> float:
    """Autocast keeps a 16-bit copy of each weight between forward and backward."""
    return 0.0 if split.precision == "fp32" else elements * ITEM_SIZES[split.precision]


def _gathered(numbers: ModelNumbers, split: Split, engine: Engine) -> float:
    """Two blocks, one of which is prefetched, or a block and the larger of embedding and output layer."""
    experts = numbers.expert_parameters / split.dims.expert
    block = numbers.shared_parameters + experts
    ends = max(numbers.embedding_parameters, numbers.output_parameters)
    size = engine.gathered_bytes or ITEM_SIZES[split.precision]
    return (block + max(block, ends)) / split.dims.tensor * size


def _gradients(numbers: ModelNumbers, split: Split) -> float:
    """Elements of gradients and of the buckets in which they are reduced."""
    dims, whole = split.dims, sum(rank_parameters(numbers, split))
    if dims.shard > 1:
        # Ranks reduce after the last micro-batch, and keep whole gradients until then.
        return whole if split.num_micro_batches > 1 else held_parameters(numbers, split, 2)
    if split.zero_stage >= 2:
        return held_parameters(numbers, split, 2)
    return whole * (2.0 if dims.data * dims.context > 1 else 1.0)


def _activations(numbers: ModelNumbers, split: Split, engine: Engine) -> float:
    dims, item = split.dims, ITEM_SIZES[split.precision]
    tokens = split.micro_batch * numbers.sequence / dims.context
    blocks = -(-numbers.layers // dims.pipeline)
    whole = numbers.activation_bytes(dims.tensor, engine.sequence_parallel, item)
    in_flight = _in_flight(split, engine)
    if split.activation_checkpointing:
        stored = blocks * in_flight * numbers.checkpoint_bytes(item) + whole
    else:
        stored = blocks * in_flight * whole
    logits = numbers.vocabulary / dims.tensor * (2 * item + 2 * _LOGIT_BYTES)
    return tokens * (stored + logits)


def _in_flight(split: Split, engine: Engine) -> float:
    """Micro-batches whose activations the first stage stores at once."""
    stages, count = split.dims.pipeline, split.num_micro_batches
    if stages == 1:
        return 1.0
    if split.schedule in ("gpipe", "looped-bfs"):
        return float(count)
    if split.schedule == "1f1b":
        return float(min(count, stages))
    # Narayanan et al., 2021, section 2.2: interleaving stores (1 + (p - 1) / (p v)) times as much.
    return min(float(count), stages * (1.0 + (stages - 1) / (stages * engine.stages_per_rank)))

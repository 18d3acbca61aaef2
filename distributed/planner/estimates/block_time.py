"""Time of one block and of the output layer for one micro-batch on one rank.

A roofline with a floor: matrix products at a share of the peak, plus elementwise operations at a share of the
memory bandwidth, against the time in which the host launches the kernels. The two are combined as the root of
the sum of squares, which lies above the larger and is smooth where they are equal. Sources: Williams et al.,
2009 (doi:10.1145/1498765.1498785), for the roofline; Shoeybi et al., 2019 (arXiv:1909.08053), for two
all-reduces in each direction of a block; Liu et al., 2023 (arXiv:2310.01889), for keys and values in a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot

from distributed.interfaces.parallel_dims import ParallelDims
from distributed.planner.estimates.engine import Engine
from distributed.planner.estimates.hardware import HardwareProfile
from distributed.planner.estimates.links import link_of
from distributed.planner.estimates.numbers import ModelNumbers
from distributed.planner.estimates.split import Split

__all__ = ["ITEM_SIZES", "PassTime", "block_time", "output_time", "send_time"]

ITEM_SIZES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Precision -> bytes of a value in forward and backward."""

_LOGIT_PASSES = 4
"""How often the logits move through memory forward: written, and read and written by softmax and loss."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of one micro-batch.

    Attributes:
        forward: computation of the forward pass.
        backward: computation of the backward pass, recomputation included.
        exposed: communication that nothing hides, both directions.
    """

    forward: float
    backward: float
    exposed: float = 0.0

    @property
    def compute(self) -> float:
        """Computation of both directions."""
        return self.forward + self.backward


def block_time(numbers: ModelNumbers, split: Split, profile: HardwareProfile, engine: Engine) -> PassTime:
    """Time of one block for one micro-batch."""
    dims, reached, item = split.dims, profile.achievable, ITEM_SIZES[split.precision]
    tokens = split.micro_batch * numbers.sequence / dims.context
    rate = profile.flops(split.precision) * reached.matmul
    causal = 0.5 if numbers.fused_attention else 1.0  # fused kernels skip what a causal mask hides
    attention = causal * tokens * numbers.attention_flops / dims.tensor / rate
    local = -(-numbers.experts // dims.expert)
    weights = (numbers.attention_weights + local * numbers.expert_weights) / dims.tensor * item
    stored = tokens * numbers.activation_bytes(dims.tensor, engine.sequence_parallel, item)
    moved = weights + reached.activation_passes * engine.elementwise * stored
    device = tokens * numbers.block_flops / dims.tensor / rate + attention
    device += moved / (profile.memory_bandwidth * reached.memory)
    forward = hypot(device, reached.block_seconds)
    passes = 1.0 + (engine.recomputed if split.activation_checkpointing else 0.0)
    exchange = _exchange_time(numbers, dims, profile, tokens * item)
    keys = _ring_time(numbers, dims, profile, tokens * item) - attention
    exposed = (passes + 1.0) * exchange + (passes + 2.0) * max(0.0, keys)
    return PassTime(forward, forward * (passes + 1.0), exposed)


def _exchange_time(
    numbers: ModelNumbers, dims: ParallelDims, profile: HardwareProfile, values: float
) -> float:
    """Collectives of a block in one direction that the next operation waits for.

    Args:
        values: bytes of one number for each token of the rank.
    """
    width = values * numbers.hidden
    seconds = 2.0 * link_of(profile, dims, "tensor").seconds("all-reduce", width)
    if dims.expert > 1:
        experts = link_of(profile, dims, "data", "shard", size=dims.expert)
        seconds += 2.0 * experts.seconds("all-to-all", width * numbers.experts_per_token)
    return seconds


def _ring_time(numbers: ModelNumbers, dims: ParallelDims, profile: HardwareProfile, values: float) -> float:
    """Keys and values of a slice of the sequence on their way over all ``context`` ranks, once."""
    if dims.context == 1:
        return 0.0
    own = 2.0 * values * numbers.kv_heads * numbers.head_size / dims.tensor
    return (dims.context - 1) * link_of(profile, dims, "context").seconds("send-recv", own)


def output_time(numbers: ModelNumbers, split: Split, profile: HardwareProfile) -> PassTime:
    """Time of the output layer and the loss for one micro-batch."""
    dims, reached, item = split.dims, profile.achievable, ITEM_SIZES[split.precision]
    tokens = split.micro_batch * numbers.sequence / dims.context
    products = tokens * numbers.output_flops / dims.tensor
    logits = tokens * numbers.vocabulary / dims.tensor * item
    forward = products / (profile.flops(split.precision) * reached.matmul)
    forward += _LOGIT_PASSES * logits / (profile.memory_bandwidth * reached.memory)
    return PassTime(forward, 2.0 * forward)


def send_time(numbers: ModelNumbers, split: Split, profile: HardwareProfile) -> float:
    """Seconds of the messages of one micro-batch between two stages: an activation, and its gradient."""
    dims = split.dims
    if dims.pipeline == 1:
        return 0.0
    tokens = split.micro_batch * numbers.sequence / dims.context
    nbytes = tokens * numbers.hidden * ITEM_SIZES[split.precision]
    return 2.0 * link_of(profile, dims, "pipeline").seconds("send-recv", nbytes)
